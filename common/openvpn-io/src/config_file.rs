//! The subset of OpenVPN's own configuration syntax that a client or a server is made from here.
//!
//! Files that worked with the stock program are accepted: what has nothing to do in this process is
//! reported ([`Read::notes`]), what would be needed and is not there is refused, every problem with its
//! line and all of them at once. Flags of the programs override the values; nothing here reads a file.

mod client;
mod common;
pub mod lexer;
mod server;
mod table;
#[cfg(test)]
mod tests;

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use culvert_openvpn::cipher::Cipher;
use culvert_openvpn::options::Transport;
use ipnet::Ipv4Net;

pub use client::{Client, Remote};
pub use common::{Common, TlsAuth};
pub use server::Server;

use lexer::Directive;

/// OpenVPN's port.
pub const DEFAULT_PORT: u16 = 1194;

/// The largest configuration that is read. Keys and certificates in it take some KiB each.
pub const MAX_BYTES: usize = 1 << 20;

/// A file, or its text.
#[derive(Clone, PartialEq, Eq)]
pub enum Material {
    /// Read when it is used.
    File(PathBuf),
    /// A block of the configuration.
    Inline {
        /// For messages, as `<ca> in client.conf`.
        origin: String,
        /// What the file would hold.
        text: String,
    },
}

/// Where it comes from. Never what is in it: it may be a key.
impl std::fmt::Display for Material {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Inline { origin, .. } => f.write_str(origin),
        }
    }
}

impl std::fmt::Debug for Material {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Material({self})")
    }
}

/// A configuration, and what the operator should be told about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read<T> {
    /// The values.
    pub config: T,
    /// Options that were accepted and have no effect, with their lines and the reasons.
    pub notes: Vec<String>,
}

/// Reads a client's configuration; `name` stands in messages.
///
/// # Errors
/// Everything that is wrong, one text each, beginning with `name:line: `.
pub fn client(text: &str, name: &str) -> Result<Read<Client>, Vec<String>> {
    read(text, name, Client::default())
}

/// Reads a server's configuration; `name` stands in messages.
///
/// # Errors
/// Everything that is wrong, one text each, beginning with `name:line: `.
pub fn server(text: &str, name: &str) -> Result<Read<Server>, Vec<String>> {
    read(text, name, Server::default())
}

/// What became of one directive.
enum Taken {
    Yes,
    /// Accepted; the operator should know this.
    Note(String),
    /// Not one of ours.
    No,
}

type Outcome = Result<Taken, String>;

trait Options {
    /// Takes a directive of this role, `Taken::No` leaves it to others.
    fn take(&mut self, context: &Context<'_>, directive: &Directive) -> Outcome;
    /// After the last line: what belongs together.
    fn finish(&mut self) -> Vec<String>;
}

/// What directives need to know of their file.
struct Context<'a> {
    /// For messages.
    name: &'a str,
    /// What relative paths are relative to.
    directory: PathBuf,
    /// `ignore-unknown-option`.
    optional: Vec<String>,
}

impl Context<'_> {
    fn path(&self, path: &str) -> PathBuf {
        self.directory.join(path)
    }

    /// The file or the block of a directive; nothing for `[inline]`, which announces a block.
    fn material(&self, directive: &Directive) -> Result<Option<Material>, String> {
        if let Some(text) = &directive.block {
            return Ok(Some(Material::Inline {
                origin: format!("<{}> in {}", directive.name, self.name),
                text: text.clone(),
            }));
        }
        match word(directive, 0, "a file")? {
            "[inline]" => Ok(None),
            path => Ok(Some(Material::File(self.path(path)))),
        }
    }
}

fn read<T: Options>(text: &str, name: &str, mut config: T) -> Result<Read<T>, Vec<String>> {
    if text.len() > MAX_BYTES {
        let text = format!("{name}: larger than {MAX_BYTES} bytes; is it a configuration?");
        return Err(vec![text]);
    }
    let (directives, errors) = lexer::directives(text);
    let mut problems: Vec<(usize, String)> = errors
        .into_iter()
        .map(|error| (error.line, error.problem))
        .collect();
    let mut notes = Vec::new();
    // These count wherever they stand.
    let all = |name: &'static str| directives.iter().filter(move |d| d.name == name);
    let context = Context {
        name,
        directory: all("cd")
            .next_back()
            .and_then(|cd| cd.argument(0))
            .map_or_else(PathBuf::new, PathBuf::from),
        optional: all("ignore-unknown-option")
            .flat_map(|directive| directive.arguments.iter().cloned())
            .collect(),
    };
    for directive in &directives {
        let line = directive.line;
        // `setenv opt NAME ...` is for an option that not every version knows.
        let is_optional = directive.name == "setenv" && directive.argument(0) == Some("opt");
        let taken = if is_optional {
            let mut words = directive.arguments.iter().skip(1).cloned();
            let inner = Directive {
                line,
                name: words.next().unwrap_or_default(),
                arguments: words.collect(),
                block: None,
            };
            take(&mut config, &context, &inner, true)
        } else {
            take(&mut config, &context, directive, false)
        };
        match taken {
            Ok(Taken::Yes) => {}
            Ok(Taken::Note(note)) => {
                notes.push(format!("{name}:{line}: {}: {note}", directive.name));
            }
            Ok(Taken::No) => {
                let text = format!(
                    "{}: not an option that is known here; remove it, or name it in ignore-unknown-option",
                    directive.name
                );
                problems.push((line, text));
            }
            Err(problem) => problems.push((line, format!("{}: {problem}", directive.name))),
        }
    }
    let mut problems: Vec<String> = {
        problems.sort_by_key(|(line, _)| *line);
        let texts = problems.into_iter();
        texts
            .map(|(line, text)| format!("{name}:{line}: {text}"))
            .collect()
    };
    problems.extend(
        config
            .finish()
            .into_iter()
            .map(|text| format!("{name}: {text}")),
    );
    match problems.is_empty() {
        true => Ok(Read { config, notes }),
        false => Err(problems),
    }
}

fn take<T: Options>(
    config: &mut T,
    context: &Context<'_>,
    directive: &Directive,
    optional: bool,
) -> Outcome {
    let name = directive.name.as_str();
    if matches!(name, "cd" | "ignore-unknown-option") {
        return Ok(Taken::Yes);
    }
    match config.take(context, directive)? {
        Taken::No => {}
        taken => return Ok(taken),
    }
    if let Some(reason) = table::not_needed(name) {
        return Ok(Taken::Note(format!("not needed: {reason}")));
    }
    if let Some(reason) = table::refused(name) {
        return Err(format!("not supported: {reason}"));
    }
    if optional || context.optional.iter().any(|known| known == name) {
        return Ok(Taken::Note("not known here, and marked as optional".into()));
    }
    Ok(Taken::No)
}

/// The argument of that index.
fn word<'a>(directive: &'a Directive, index: usize, what: &str) -> Result<&'a str, String> {
    let word = directive.argument(index);
    word.ok_or_else(|| format!("needs {what}"))
}

/// The argument of that index as a value.
fn value<T: FromStr>(directive: &Directive, index: usize, what: &str) -> Result<T, String> {
    let word = word(directive, index, what)?;
    let parsed = word.parse();
    parsed.map_err(|_| format!("{word:?} is not {what}"))
}

fn seconds(directive: &Directive, index: usize) -> Result<Duration, String> {
    value::<u32>(directive, index, "a number of seconds")
        .map(|seconds| Duration::from_secs(seconds.into()))
}

/// A number of seconds of which 0 means never.
fn seconds_or_never(directive: &Directive, index: usize) -> Result<Option<Duration>, String> {
    seconds(directive, index).map(|time| Some(time).filter(|time| !time.is_zero()))
}

fn port(directive: &Directive, index: usize) -> Result<u16, String> {
    let port: u16 = value(directive, index, "a port")?;
    match port {
        0 => Err("0 is not a port".into()),
        port => Ok(port),
    }
}

/// An address and a netmask at `index` and behind it; one address without.
fn network(directive: &Directive, index: usize) -> Result<Ipv4Net, String> {
    let address: Ipv4Addr = value(directive, index, "an IPv4 address")?;
    let mask = match directive.argument(index + 1) {
        None | Some("default") => Ipv4Addr::BROADCAST,
        Some(_) => value(directive, index + 1, "a netmask")?,
    };
    let network =
        Ipv4Net::with_netmask(address, mask).map_err(|_| format!("{mask} is not a netmask"))?;
    match network.addr() == network.network() {
        true => Ok(network),
        false => Err(format!(
            "{address} is not the first address of a network with netmask {mask}"
        )),
    }
}

/// `udp`, `tcp4`, `tcp-client` and so on. `role` is the suffix of this role.
fn proto(word: &str, role: &str) -> Result<Transport, String> {
    let plain = word.trim_end_matches(['4', '6']);
    match plain {
        "udp" => Ok(Transport::Udp),
        "tcp" => Ok(Transport::Tcp),
        _ if plain.strip_prefix("tcp-") == Some(role) => Ok(Transport::Tcp),
        "tcp-client" | "tcp-server" => Err(format!("{word} belongs to the other role")),
        _ => Err(format!(
            "{word:?} is not a protocol: udp, tcp or tcp-{role}"
        )),
    }
}

/// A colon-separated list of ciphers, with those that are not supported. `?` marks optional ones,
/// `DEFAULT` stands for OpenVPN's own list.
pub fn ciphers(list: &str) -> (Vec<Cipher>, Vec<String>) {
    let (mut known, mut unknown) = (Vec::new(), Vec::new());
    let mut add = |cipher: Cipher| {
        if !known.contains(&cipher) {
            known.push(cipher);
        }
    };
    for name in list.split(':').filter(|name| !name.is_empty()) {
        let plain = name.strip_prefix('?').unwrap_or(name);
        match Cipher::from_name(plain) {
            Some(cipher) => add(cipher),
            None if plain == "DEFAULT" => Cipher::DEFAULT.into_iter().for_each(&mut add),
            None => unknown.push(plain.to_owned()),
        }
    }
    (known, unknown)
}
