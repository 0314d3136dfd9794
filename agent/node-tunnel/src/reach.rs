//! The way to the seed's proxy: directly or through an HTTP proxy, in plain text or over TLS.

use culvert_host::flags::HostPort;
use culvert_host::net::congestion::{ChosenCongestion, disable_bbr_on_loopback};
use culvert_host::net::dial::dial;
use culvert_host::net::long_path;
use culvert_host::net::proxy::{self, ProxyScheme};
use culvert_host::net::readahead::ReadAhead;
use culvert_host::tls::reload::{ClientFiles, ClientTls};
use culvert_host::tls::{self, ClientStream, TlsError, TlsOptions};
use rustls_pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_util::either::Either;

use super::config::ProxyTls;
use super::files::{Files, Reloader};
use super::pool::{ADVICE, CONNECT_TIMEOUT, Reach};

/// Dials the seed's proxy.
pub(crate) struct SeedProxy {
    address: HostPort,
    tls: Option<(ClientTls, ServerName<'static>)>,
    congestion: ChosenCongestion,
}

// === impl SeedProxy ===

impl SeedProxy {
    /// Creates the way to `address`. `reloader` follows the files of `tls`; a connection uses the latest ones that can be
    /// used.
    ///
    /// # Errors
    /// Fails if a file of `tls` cannot be used. The error text names the file and the remedy.
    pub(crate) async fn new(
        address: HostPort,
        tls: Option<ProxyTls>,
        congestion: ChosenCongestion,
        reloader: &mut Reloader,
    ) -> Result<Self, TlsError> {
        let tls = match tls {
            Some(tls) => {
                let pair = tls.identity.as_ref();
                let pair = pair.map(|(cert, key)| (cert.as_path(), key.as_path()));
                let files = ClientFiles::new(&tls.ca, pair, &[b"h2"], &TlsOptions::default())?;
                let latest = reloader.follow(Files::Proxy, files).await?;
                Some((latest, tls.server_name))
            }
            None => None,
        };
        Ok(Self {
            address,
            tls,
            congestion,
        })
    }

    async fn tcp(&self) -> Result<TcpStream, String> {
        let HostPort { host, port } = &self.address;
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let stream = match proxy::from_env(host, *port, ProxyScheme::Counts)
            .map_err(|error| error.to_string())?
        {
            None => {
                let dialed = dial("tcp", &self.address.to_string(), CONNECT_TIMEOUT).await;
                dialed.map_err(|error| {
                    let why = error.text;
                    format!("{why}; {ADVICE}")
                })?
            }
            Some(target) => {
                let connected = proxy::connect(&target, host, *port, deadline).await;
                connected.map_err(|error| {
                    format!("through HTTPS_PROXY: {error}; check HTTPS_PROXY and NO_PROXY")
                })?
            }
        };
        self.congestion.apply(&stream);
        long_path::tune_link(&stream);
        disable_bbr_on_loopback(&stream);
        Ok(stream)
    }
}

impl Reach for SeedProxy {
    type Stream = Either<ReadAhead<TcpStream>, ClientStream<ReadAhead<TcpStream>>>;

    async fn reach(&self) -> Result<Self::Stream, String> {
        let stream = ReadAhead::new(self.tcp().await?);
        let Some((tls, name)) = &self.tls else {
            return Ok(Either::Left(stream));
        };
        let connected = ClientStream::connect(tls.get(), name.clone(), stream).await;
        let stream = connected.map_err(|error| {
            let why = tls::explain(&error);
            format!("TLS handshake failed: {why}; check --proxy-ca, --proxy-cert and --proxy-server-name")
        })?;
        Ok(Either::Right(stream))
    }
}
