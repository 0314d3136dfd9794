//! The supported subset of OpenVPN's own configuration syntax, for clients and servers.
//!
//! Files that worked with the stock program are accepted. An option without a purpose in this process is
//! reported in [`Read::notes`]. An option with a necessary but unsupported effect is refused. All problems
//! are reported together, each with its line. Flags of the programs override the values. This module does not
//! read files.

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

/// OpenVPN's standard port.
pub const DEFAULT_PORT: u16 = 1194;

/// Largest number of bytes of an option's name. The lines of a static key are longer.
const LONGEST_NAME: usize = 30;

/// Size limit of a configuration, in bytes. Inline keys and certificates need some KiB each.
pub const MAX_BYTES: usize = 1 << 20;

/// Key material: the path of a file, or its text.
#[derive(Clone, PartialEq, Eq)]
pub enum Material {
    /// A file that is read on use.
    File(PathBuf),
    /// An inline block of the configuration.
    Inline {
        /// Description for messages, such as `<ca> in client.conf`.
        origin: String,
        /// The text that the file would contain.
        text: String,
    },
}

/// Prints the origin of the material, never its content, which may be a key.
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

/// A configuration, and notes for the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read<T> {
    /// The parsed configuration.
    pub config: T,
    /// Accepted options without effect, with their lines and the reasons.
    pub notes: Vec<String>,
}

/// Parses a client's configuration. `name` is the file name for messages.
///
/// # Errors
/// Returns a list of all problems. Each text starts with `name:line: `, or with `name: ` if the problem has no
/// line.
pub fn client(text: &str, name: &str) -> Result<Read<Client>, Vec<String>> {
    read(text, name, Client::default())
}

/// Parses a server's configuration. `name` is the file name for messages.
///
/// # Errors
/// Returns a list of all problems. Each text starts with `name:line: `, or with `name: ` if the problem has no
/// line.
pub fn server(text: &str, name: &str) -> Result<Read<Server>, Vec<String>> {
    read(text, name, Server::default())
}

/// Result of applying one directive.
enum Taken {
    Yes,
    /// Accepted, with a note for the operator.
    Note(String),
    /// Unknown to this role.
    No,
}

type Outcome = Result<Taken, String>;

/// Accepts a directive with a note.
fn note(text: impl Into<String>) -> Outcome {
    Ok(Taken::Note(text.into()))
}

trait Options {
    /// Applies a directive of this role. Returns `Taken::No` for all other directives.
    fn take(&mut self, context: &Context<'_>, directive: &Directive) -> Outcome;
    /// Checks combinations of options after the last line.
    fn finish(&mut self) -> Vec<String>;
}

/// Properties of the file that directives depend on.
struct Context<'a> {
    /// File name for messages.
    name: &'a str,
    /// Base directory of relative paths.
    directory: PathBuf,
    /// Arguments of `ignore-unknown-option`.
    optional: Vec<String>,
}

impl Context<'_> {
    fn path(&self, path: &str) -> PathBuf {
        self.directory.join(path)
    }

    /// Returns the file or the inline block of a directive, or `None` for `[inline]`, which announces a
    /// block.
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
    let (directives, mut problems) = lexer::directives(text);
    let mut notes = Vec::new();
    // These directives apply to the whole file, at any position.
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
        // `setenv opt NAME ...` marks an option that some OpenVPN versions do not support.
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
                problems.push((line, unknown(&directive.name)));
            }
            Err(problem) => problems.push((line, format!("{}: {problem}", directive.name))),
        }
    }
    problems.sort_by_key(|(line, _)| *line);
    let lines = problems.into_iter();
    let lines = lines.map(|(line, text)| format!("{name}:{line}: {text}"));
    let whole = config.finish().into_iter();
    let problems: Vec<String> = lines
        .chain(whole.map(|text| format!("{name}: {text}")))
        .collect();
    match problems.is_empty() {
        true => Ok(Read { config, notes }),
        false => Err(problems),
    }
}

/// Returns the problem of an unknown option. The name is shown only if it looks like one, because the word may
/// be a line of a key outside of its block.
fn unknown(name: &str) -> String {
    let ordinary = |byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_');
    match name.len() <= LONGEST_NAME && name.bytes().all(ordinary) {
        true => format!(
            "{name}: not an option that is known here; remove it, or name it in ignore-unknown-option"
        ),
        false => {
            "not an option, or wrongly spelled (the word is not shown, because it may be a part of a key); \
             a key or certificate must be between tags, such as <key> and </key>"
                .to_owned()
        }
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
    let taken = config.take(context, directive)?;
    if !matches!(taken, Taken::No) {
        return Ok(taken);
    }
    if let Some(reason) = table::not_needed(name) {
        return note(format!("not needed: {reason}"));
    }
    if let Some(reason) = table::refused(name) {
        return Err(format!("not supported: {reason}"));
    }
    if optional || context.optional.iter().any(|known| known == name) {
        return note("ignored: unknown option that is marked as optional");
    }
    Ok(Taken::No)
}

/// Returns the argument at `index`.
fn word<'a>(directive: &'a Directive, index: usize, what: &str) -> Result<&'a str, String> {
    let word = directive.argument(index);
    word.ok_or_else(|| format!("needs {what}"))
}

/// Parses the argument at `index`.
fn value<T: FromStr>(directive: &Directive, index: usize, what: &str) -> Result<T, String> {
    let word = word(directive, index, what)?;
    let parsed = word.parse();
    parsed.map_err(|_| format!("{word:?} is not {what}"))
}

fn seconds(directive: &Directive, index: usize) -> Result<Duration, String> {
    value::<u32>(directive, index, "a number of seconds")
        .map(|seconds| Duration::from_secs(seconds.into()))
}

fn port(directive: &Directive, index: usize) -> Result<u16, String> {
    let port: u16 = value(directive, index, "a port")?;
    match port {
        0 => Err("0 is not a port".into()),
        port => Ok(port),
    }
}

/// Parses the address at `index` and the netmask after the address. Without a netmask, the network is a
/// single address.
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

/// Parses a protocol such as `udp`, `tcp4` or `tcp-client`. `role` is the suffix of this role.
fn proto(word: &str, role: &str) -> Result<Transport, String> {
    // The family is at the end, as in `tcp4`, or before the role, as in `tcp4-client`.
    let plain = match word
        .strip_prefix("tcp")
        .and_then(|rest| rest.strip_prefix(['4', '6']))
    {
        Some(rest) => format!("tcp{rest}"),
        None => word.strip_suffix(['4', '6']).unwrap_or(word).to_owned(),
    };
    match plain.as_str() {
        "udp" => Ok(Transport::Udp),
        "tcp" => Ok(Transport::Tcp),
        _ if plain.strip_prefix("tcp-") == Some(role) => Ok(Transport::Tcp),
        "tcp-client" | "tcp-server" => Err(format!("{word} belongs to the other role")),
        _ => Err(format!(
            "{word:?} is not a protocol: udp, tcp or tcp-{role}"
        )),
    }
}

/// Parses a colon-separated list of ciphers into supported and unsupported ciphers. A leading `?` marks an
/// optional cipher, and `DEFAULT` stands for OpenVPN's own list.
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
