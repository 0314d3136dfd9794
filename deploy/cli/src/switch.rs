//! The command `culvert switch`: requests a tunnel mode from a server, and can wait for the end of the
//! switch.

use std::time::Duration;

use anyhow::bail;
use culvert_host::flags::GoDuration;
use culvert_server::switch::SetBy;
use culvert_server::switch::status::{Progress, Request, Status};
use culvert_server::tunnel::Mode;
use tokio::time::{Instant, sleep_until};

use crate::admin::{Admin, TIMEOUT, duration};
use crate::description::progress;
use crate::stdout::printable;

/// Pause between two status requests while waiting.
const POLL: Duration = Duration::from_millis(250);

/// Longest pause between two progress lines while waiting.
const REPORT: Duration = Duration::from_secs(5);

/// Longest time without an answer while waiting; the server may restart in the middle of a switch.
const RESTART: Duration = Duration::from_secs(60);

/// Flags of `culvert switch`.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    admin: Admin,

    /// The mode: konnectivity, openvpn, prefer-konnectivity or prefer-openvpn.
    #[arg(long, value_name = "MODE")]
    to: Mode,

    /// Time for connections of the old tunnel to end; by default the server's --tunnel-drain. If a switch to
    /// the same mode is already in progress, its deadline is replaced: the time counts from now.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    drain: Option<GoDuration>,

    /// Wait until no connection of the old mode is left. If the wait is interrupted, the switch continues; a switch to the
    /// old mode undoes the switch.
    #[arg(long)]
    wait: bool,

    /// Longest time for the request, and with --wait for request and wait together; the switch continues afterwards. Without
    /// the flag, the wait has no limit. The request alone never takes longer than 30s.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    timeout: Option<GoDuration>,
}

/// Runs the command.
///
/// # Errors
/// Fails if the server rejects the request, if the wait ends before the switch is complete, or if the server cannot save the
/// mode.
pub async fn run(options: &Options) -> anyhow::Result<()> {
    let started = Instant::now();
    let request = Request::new(options.to, options.drain);
    let limit = options.timeout.map(GoDuration::saturating);
    let patience = limit.map_or(TIMEOUT, |limit| limit.min(TIMEOUT));
    let status = options.admin.switch(&request, patience).await?;
    tell(&status);
    let status = match options.wait {
        true => wait(options, status, limit.map(|limit| started + limit)).await?,
        false => status,
    };
    if status.unsaved {
        bail!("the server has accepted the switch but cannot save it: a restart would undo it");
    }
    Ok(())
}

fn tell(status: &Status) {
    match status.switch {
        Progress::Settled => say!("{}: in force", status.mode),
        _ => say!("{}: {}", status.mode, progress(&status.switch)),
    }
    for problem in &status.problems {
        say!("problem: {}", printable(problem));
    }
}

/// Waits for the end of the switch, at most until `end`. Returns the last status.
async fn wait(
    options: &Options,
    mut status: Status,
    end: Option<Instant>,
) -> anyhow::Result<Status> {
    let mut answered = Instant::now();
    let mut told = answered;
    while status.switch != Progress::Settled {
        let now = Instant::now();
        if end.is_some_and(|end| now >= end) {
            bail!(
                "the switch is not complete yet: {}",
                progress(&status.switch)
            );
        }
        let poll = now + POLL;
        sleep_until(end.map_or(poll, |end| end.min(poll))).await;
        let before = std::mem::discriminant(&status.switch);
        let left = end.map_or(TIMEOUT, |end| end.saturating_duration_since(Instant::now()));
        match options.admin.status(left.min(TIMEOUT)).await {
            Ok(now) => status = now,
            Err(error) if answered.elapsed() >= RESTART => return Err(error),
            Err(_) => continue,
        }
        answered = Instant::now();
        if status.mode != options.to {
            bail!("{}", changed(&status));
        }
        if before != std::mem::discriminant(&status.switch) || told.elapsed() >= REPORT {
            told = answered;
            tell(&status);
        }
    }
    Ok(status)
}

/// Explains a mode that is not the requested one.
fn changed(status: &Status) -> String {
    let mode = status.mode;
    match status.set_by {
        SetBy::Flag => format!(
            "the server has restarted with --tunnel-mode={mode}: without --tunnel-state-file it does not keep a switch"
        ),
        SetBy::File => format!("--tunnel-mode-file has changed the mode to {mode}"),
        SetBy::Switch => format!("another switch has changed the mode to {mode}"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::path::Path;

    use culvert_host::tls::{self, Identity, TlsOptions, TrustBundle};
    use culvert_kit::pki::Pki;
    use culvert_server::tunnel::Kind;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, UnixListener};
    use tokio_rustls::TlsAcceptor;

    use super::*;

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    /// Runs `culvert switch` against an admin listener that sends `answers`, one for each connection, and then stays
    /// silent. Returns the error.
    async fn failure(answers: Vec<String>, flags: &[&str]) -> String {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("admin.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let server = tokio::spawn(async move {
            let mut answers = answers.into_iter();
            let mut open = Vec::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.read(&mut [0; 4096]).await;
                let answer = answers.next().unwrap_or_default();
                stream.write_all(answer.as_bytes()).await.unwrap();
                open.push(stream);
            }
        });
        let socket = format!("--admin-uds={}", socket.display());
        let words = ["culvert", &socket, "--to=konnectivity"].into_iter();
        let cli = <Cli as clap::Parser>::parse_from(words.chain(flags.iter().copied()));
        let limit = Duration::from_secs(10);
        let outcome = tokio::time::timeout(limit, run(&cli.options)).await;
        server.abort();
        format!("{:#}", outcome.unwrap().unwrap_err())
    }

    fn accepted(length: usize, body: &str) -> String {
        format!("HTTP/1.1 202 Accepted\r\ncontent-length: {length}\r\n\r\n{body}")
    }

    #[tokio::test]
    async fn accepted_switch_is_reported_without_a_readable_answer() {
        let error = failure(vec![accepted(2, "{}")], &[]).await;
        assert!(
            error.starts_with("the server has accepted the switch"),
            "{error}"
        );
        assert!(
            error.contains("use the culvert of the server's version"),
            "{error}"
        );
        let flags = ["--wait", "--timeout=2s"];
        let error = failure(vec![accepted(20, "{")], &flags).await;
        assert!(
            error.starts_with("the server has accepted the switch"),
            "{error}"
        );
        assert!(error.contains("in 2s"), "{error}");
    }

    #[tokio::test]
    async fn timeout_limits_the_request_and_the_polls() {
        for flags in [
            ["--timeout=200ms"].as_slice(),
            &["--wait", "--timeout=200ms"],
        ] {
            let error = failure(vec![], flags).await;
            assert!(error.contains("may have accepted the switch"), "{error}");
            assert!(error.contains("in 200ms"), "{error}");
        }
        let status = Status {
            draining: false,
            server_id: None,
            version: None,
            link_congestion: None,
            mode: Mode::Konnectivity,
            set_by: SetBy::Switch,
            new_dials: vec![Kind::Konnectivity],
            switch: Progress::Draining {
                tunnel: Kind::Openvpn,
                seconds: 1.0,
                left: 3,
                seconds_left: 60.0,
            },
            tunnels: Vec::new(),
            last_switch_seconds: None,
            problems: Vec::new(),
            unsaved: false,
        };
        let body = serde_json::to_string(&status).unwrap();
        // The server accepts the switch and answers no status request.
        let flags = ["--wait", "--timeout=1s"];
        let error = failure(vec![accepted(body.len(), &body)], &flags).await;
        assert!(
            error.starts_with("the switch is not complete yet"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn refused_certificate_is_reported_as_a_refusal() {
        let folder = tempfile::tempdir().unwrap();
        let pki = Pki::create(folder.path()).unwrap();
        let stranger = Pki::create_other(folder.path()).unwrap();
        let config = tls::server_config(
            &Identity::load(&pki.server.cert, &pki.server.key).unwrap(),
            Some(&TrustBundle::load(&pki.ca).unwrap()),
            &[],
            &TlsOptions::default(),
        )
        .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let refused = TlsAcceptor::from(config).accept(stream).into_fallible();
            let (_, mut stream) = refused.await.unwrap_err();
            // A socket with unread bytes would be reset, and the client might not receive the alert.
            stream.read_to_end(&mut Vec::new()).await.unwrap();
        });
        let file = |path: &Path| path.display().to_string();
        let (cert, key) = (file(&stranger.client.cert), file(&stranger.client.key));
        let cli = <Cli as clap::Parser>::parse_from([
            "culvert",
            "--to=konnectivity",
            &format!("--admin={address}"),
            &format!("--ca-cert={}", file(&pki.ca)),
            &format!("--cert={cert}"),
            &format!("--key={key}"),
        ]);
        let limit = Duration::from_secs(10);
        let outcome = tokio::time::timeout(limit, run(&cli.options)).await;
        let error = format!("{:#}", outcome.unwrap().unwrap_err());
        server.abort();
        let expected = format!("{address} refused the connection: the peer does not know the CA");
        assert!(error.starts_with(&expected), "{error}");
    }
}
