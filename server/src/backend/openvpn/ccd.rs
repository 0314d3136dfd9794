//! The per-client files of the client-config-dir, looked up by the common name of the client's certificate.

use std::fs::{File, Metadata};
use std::io::{self, Read as _};
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;

use culvert_host::file_follower::{PROMPT_READ, read_until, too_slow};
use culvert_openvpn_io::config_file::lexer::{self, Directive};
use ipnet::Ipv4Net;
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// Name of the file for clients without their own file.
const DEFAULT: &str = "DEFAULT";

/// Maximum number of bytes read from a file; the rest of the file is ignored.
const MAX_BYTES: u64 = 256 << 10;

/// Largest number of iroutes per client. The stock program limits its learned routes to the same number.
const MAX_IROUTES: usize = 256;

/// Contents of one client's file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientConfig {
    /// `ifconfig-push`: address of the client, and the remote end or netmask.
    pub address: Option<(Ipv4Addr, Option<Ipv4Addr>)>,
    /// `iroute`: networks behind the client.
    pub iroutes: Vec<Ipv4Net>,
    /// Changes to the pushed options, in order.
    pub push: Vec<PushChange>,
    /// `disable`: the client is refused.
    pub disabled: bool,
    /// Invalid lines, for the log.
    pub problems: Vec<String>,
}

/// Change to the pushed options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PushChange {
    /// `push`.
    Add(String),
    /// `push-reset`: removes all options.
    Reset,
    /// `push-remove`: removes options with this prefix.
    Remove(String),
}

impl ClientConfig {
    /// As [`find`](Self::find), on a thread of its own. Reads with the same `turn`, a semaphore with one permit, wait for
    /// each other.
    ///
    /// # Errors
    /// As [`find`](Self::find), and after [`PROMPT_READ`].
    pub async fn read(
        directory: &Path,
        common_name: &str,
        turn: &Arc<Semaphore>,
    ) -> Result<Option<Self>, String> {
        let (owned, name) = (directory.to_owned(), common_name.to_owned());
        let find = move || Self::find(&owned, &name);
        let found = read_until(Instant::now() + PROMPT_READ, turn, find).await;
        let path = directory.join(file_name(common_name));
        let found = found.ok_or_else(|| too_slow(path.display(), PROMPT_READ))?;
        found.map_err(|error| error.to_string())
    }

    /// Reads a client's file, or the file DEFAULT if the client has no file.
    ///
    /// # Errors
    /// Fails if a file exists but cannot be read.
    pub fn find(directory: &Path, common_name: &str) -> io::Result<Option<Self>> {
        for name in [file_name(common_name), DEFAULT.to_owned()] {
            let path = directory.join(&name);
            let mut text = String::new();
            // The open of a pipe would wait for the other end.
            let open = |file: Metadata| match file.is_file() {
                true => File::open(&path),
                false => Err(io::Error::other("not a regular file")),
            };
            match std::fs::metadata(&path).and_then(open) {
                Ok(file) => {
                    let read = file.take(MAX_BYTES).read_to_string(&mut text);
                    read.map_err(|error| at(&path, &error))?;
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(at(&path, &error)),
            }
            return Ok(Some(Self::parse(&text, &path.display().to_string())));
        }
        Ok(None)
    }

    /// Parses the text of a file. As in the stock program, an invalid line does not affect other lines.
    pub fn parse(text: &str, name: &str) -> Self {
        let mut config = Self::default();
        let (directives, errors) = lexer::directives(text);
        for (line, problem) in errors {
            config.problems.push(format!("{name}:{line}: {problem}"));
        }
        for directive in &directives {
            if let Err(problem) = config.take(directive) {
                let (line, option) = (directive.line, &directive.name);
                config
                    .problems
                    .push(format!("{name}:{line}: {option}: {problem}"));
            }
        }
        config
    }

    fn take(&mut self, directive: &Directive) -> Result<(), String> {
        match directive.name.as_str() {
            "ifconfig-push" => {
                let second = match directive.argument(1) {
                    Some(_) => Some(address(directive, 1)?),
                    None => None,
                };
                self.address = Some((address(directive, 0)?, second));
            }
            "iroute" => {
                if self.iroutes.len() >= MAX_IROUTES {
                    return Err(format!("more than {MAX_IROUTES} iroutes"));
                }
                let mask = match directive.argument(1) {
                    Some(_) => address(directive, 1)?,
                    None => Ipv4Addr::BROADCAST,
                };
                let network = Ipv4Net::with_netmask(address(directive, 0)?, mask)
                    .map_err(|_| format!("{mask} is not a netmask"))?;
                self.iroutes.push(network.trunc());
            }
            "push" => self.push.push(PushChange::Add(words(directive)?)),
            "push-remove" => self.push.push(PushChange::Remove(words(directive)?)),
            "push-reset" => self.push.push(PushChange::Reset),
            "disable" => self.disabled = true,
            _ => {
                return Err(
                    "not an option of a client's file; expected one of ifconfig-push, iroute, push, push-reset, push-remove, disable".into(),
                );
            }
        }
        Ok(())
    }
}

/// Converts a common name into a file name that never leads to another directory.
fn file_name(common_name: &str) -> String {
    match common_name {
        "." | ".." => "_".repeat(common_name.len()),
        name => name.replace(['/', '\0'], "_"),
    }
}

fn at(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn address(directive: &Directive, index: usize) -> Result<Ipv4Addr, String> {
    let word = directive.argument(index).unwrap_or_default();
    word.parse()
        .map_err(|_| format!("{word:?} is not an IPv4 address"))
}

fn words(directive: &Directive) -> Result<String, String> {
    match directive.arguments.join(" ") {
        words if words.trim().is_empty() => Err("needs an option".into()),
        words => Ok(words),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn invalid_lines_do_not_affect_other_lines() {
        let text = "\
# the user cluster
iroute 172.25.0.0 255.255.0.0
iroute 10.240.16.0 255.255.240.0
iroute 10.254.0.0 255.255.0.0
iroute 10.9.9.9
ifconfig-push 10.20.0.42 10.20.0.41
push \"route 192.168.0.0 255.255.0.0\"
push-remove route
push-reset
iroute 1.2.3 255.0.0.0
iroute 1.2.3.4 255.0.255.0
up /bin/true
";
        let config = ClientConfig::parse(text, "f");
        let networks: Vec<_> = config.iroutes.iter().map(ToString::to_string).collect();
        assert_eq!(
            networks,
            [
                "172.25.0.0/16",
                "10.240.16.0/20",
                "10.254.0.0/16",
                "10.9.9.9/32"
            ]
        );
        let (own, second) = config.address.unwrap();
        assert_eq!(
            (own.to_string(), second.unwrap().to_string()),
            ("10.20.0.42".into(), "10.20.0.41".into())
        );
        assert_eq!(
            config.push,
            [
                PushChange::Add("route 192.168.0.0 255.255.0.0".into()),
                PushChange::Remove("route".into()),
                PushChange::Reset
            ]
        );
        let lines: Vec<_> = config
            .problems
            .iter()
            .map(|p| p.split(": ").next().unwrap())
            .collect();
        assert_eq!(lines, ["f:10", "f:11", "f:12"], "{:?}", config.problems);
    }

    #[test]
    fn name_selects_its_file_or_default_inside_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let find = |name: &str| ClientConfig::find(dir.path(), name).unwrap();
        assert_eq!(find("a"), None);
        write("a", "disable\n");
        assert!(find("a").unwrap().disabled);
        assert_eq!(find("b"), None);
        write("DEFAULT", "iroute 10.0.0.0 255.0.0.0\n");
        assert_eq!(find("b").unwrap().iroutes.len(), 1);
        write("_", "disable\n");
        for name in ["../a", "..", "/etc/passwd", "."] {
            assert!(!file_name(name).contains('/'), "{name}");
        }
        assert!(find(".").unwrap().disabled);
        std::fs::create_dir(dir.path().join("folder")).unwrap();
        let pipe = std::process::Command::new("mkfifo")
            .arg(dir.path().join("pipe"))
            .status();
        assert!(pipe.unwrap().success());
        for name in ["folder", "pipe"] {
            let error = ClientConfig::find(dir.path(), name)
                .unwrap_err()
                .to_string();
            assert!(
                error.ends_with(&format!("/{name}: not a regular file")),
                "{error}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn file_that_cannot_be_read_in_time_is_named() {
        // An earlier read hangs.
        let turn = Arc::new(Semaphore::new(0));
        let error = ClientConfig::read(Path::new("/ccd"), "a/b", &turn)
            .await
            .unwrap_err();
        assert!(
            error.starts_with("reading /ccd/a_b takes more than 10 s; "),
            "{error}"
        );
    }
}
