//! The command-line parser: runs a clap command the way pflag and cobra would.
//!
//! Flag structs are plain `#[derive(clap::Parser)]` structs. The parser adds pflag's behaviour to every flag:
//! - A `bool` field accepts `--flag`, `--flag=true`, `--flag=F` and so on, and never consumes the next
//!   argument.
//! - Any other flag accepts `--flag=value` and `--flag value`; the value may begin with `-`.
//! - The last use of a flag wins; lists ([`StringSlice`](super::StringSlice)) append.
//! - Stray positional arguments are ignored, and returned so that the caller can log them.
//! - Flag names cannot be abbreviated, and an underscore does not match a dash.

use std::ffi::OsString;
use std::io::Write as _;
use std::process::ExitCode;

use clap::builder::ValueParser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, Command, Parser};

use super::values::go_bool;

/// Id of the argument that collects stray positional arguments.
const STRAYS: &str = "stray-positionals";

/// A parsed command line.
#[derive(Debug)]
pub struct Parsed<T> {
    /// The flags.
    pub flags: T,
    /// Stray positional arguments. They have no effect.
    pub strays: Vec<String>,
}

/// Reason to exit instead of running the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Exit code of the process: 0 for help and version, 1 for errors.
    pub code: u8,
    /// Text for stdout (code 0) or stderr (code 1), including the trailing newline.
    pub text: String,
}

/// Rewrites a long flag with one dash to two dashes. Go's own `flag` package, unlike pflag, accepts both
/// forms. Other arguments stay as they are, including `-v` and `-v3`.
pub fn with_two_dashes(arg: &str) -> String {
    let name = arg.strip_prefix('-').unwrap_or_default();
    let name = name.split('=').next().unwrap_or_default();
    let is_digit = |c: char| c.is_ascii_digit();
    let is_verbosity = name
        .strip_prefix('v')
        .is_some_and(|n| n.chars().all(is_digit));
    match name.starts_with('-') || name.starts_with(is_digit) || name.len() < 2 || is_verbosity {
        true => arg.to_owned(),
        false => format!("-{arg}"),
    }
}

/// Parses a command line. The first argument is the program name.
///
/// # Errors
/// Returns an [`Exit`] for `--help`, `--version` and every argument that pflag refuses.
pub fn parse<T, I, A>(args: I) -> Result<Parsed<T>, Exit>
where
    T: Parser,
    I: IntoIterator<Item = A>,
    A: Into<OsString> + Clone,
{
    let mut command = pflag_like(T::command());
    let exit = |error: clap::Error, command: &mut Command| Exit::from_clap(&error, command);
    let mut matches = command
        .try_get_matches_from_mut(args)
        .map_err(|error| exit(error, &mut command))?;
    let strays = matches
        .remove_many::<String>(STRAYS)
        .map(Iterator::collect)
        .unwrap_or_default();
    let flags = T::from_arg_matches(&matches).map_err(|error| exit(error, &mut command))?;
    Ok(Parsed { flags, strays })
}

fn pflag_like(command: Command) -> Command {
    command
        .args_override_self(true)
        .disable_help_subcommand(true)
        .mut_args(pflag_like_arg)
        .arg(
            Arg::new(STRAYS)
                .num_args(0..)
                .action(ArgAction::Append)
                .value_parser(ValueParser::string())
                .hide(true),
        )
}

fn pflag_like_arg(arg: Arg) -> Arg {
    match arg.get_action() {
        ArgAction::SetTrue => {
            let has_default = !arg.get_default_values().is_empty();
            let arg = arg
                .action(ArgAction::Set)
                .value_name("BOOL")
                .num_args(0..=1)
                .require_equals(true)
                .default_missing_value("true")
                .value_parser(go_bool);
            if has_default {
                arg
            } else {
                arg.default_value("false")
            }
        }
        ArgAction::Set | ArgAction::Append => {
            // Hide `[default: ""]`, which is of no use in the help text.
            let is_empty = arg
                .get_default_values()
                .iter()
                .all(|value| value.is_empty());
            arg.allow_hyphen_values(true).hide_default_value(is_empty)
        }
        _ => arg,
    }
}

// === impl Exit ===

impl Exit {
    /// Creates an [`Exit`] with code 1 for a command line that parses but is invalid. The text has one line
    /// per problem, and a last line that refers to `--help`.
    pub fn problems(program: &str, problems: &[String]) -> Self {
        let mut text: String = problems
            .iter()
            .map(|problem| format!("Error: {problem}\n"))
            .collect();
        text.push_str(&format!("Run '{program} --help' for all flags.\n"));
        Self { code: 1, text }
    }

    /// Writes the text to stdout or stderr and returns the exit code for `main`.
    pub fn report(&self) -> ExitCode {
        // A write error on a closed stdout or stderr cannot be reported anywhere.
        let _ = if self.code == 0 {
            std::io::stdout().write_all(self.text.as_bytes())
        } else {
            std::io::stderr().write_all(self.text.as_bytes())
        };
        ExitCode::from(self.code)
    }

    fn from_clap(error: &clap::Error, command: &mut Command) -> Self {
        if matches!(
            error.kind(),
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
        ) {
            return Self {
                code: 0,
                text: error.to_string(),
            };
        }
        let text = match pflag_text(error) {
            Some(text) => format!(
                "Error: {text}\n\n{}\n\nRun '{} --help' for all flags.\n",
                command.render_usage(),
                command.get_name()
            ),
            None => error.to_string(),
        };
        Self { code: 1, text }
    }
}

/// Returns pflag's text for a clap error; `None` if pflag has no text for the error.
fn pflag_text(error: &clap::Error) -> Option<String> {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    let flag = context(ContextKind::InvalidArg)?;
    // clap formats the flag as "--name <VALUE>", or as "--name[=<VALUE>]" for bools.
    let name = flag.split([' ', '[', '=']).next().unwrap_or(&flag);
    match error.kind() {
        ErrorKind::UnknownArgument => Some(match name.strip_prefix("--") {
            Some(_) => format!("unknown flag: {name}"),
            None => format!("unknown shorthand flag: {name}"),
        }),
        ErrorKind::ValueValidation | ErrorKind::InvalidValue => {
            let value = context(ContextKind::InvalidValue)?;
            if value.is_empty() && error.kind() == ErrorKind::InvalidValue {
                return Some(format!("flag needs an argument: {name}"));
            }
            let cause = std::error::Error::source(error)
                .map_or_else(|| "invalid syntax".to_owned(), ToString::to_string);
            Some(format!(
                "invalid argument {value:?} for {name:?} flag: {cause}"
            ))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests;
