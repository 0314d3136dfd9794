//! Runs a clap command the way pflag and cobra would.
//!
//! Flag structs are plain `#[derive(clap::Parser)]`; what makes them pflag-like is put on here, for all flags alike:
//! - A `bool` field takes `--flag`, `--flag=true`, `--flag=F` and so on, and never the next argument.
//! - Any other flag takes `--flag=value` and `--flag value`, where the value may begin with `-`.
//! - The last of several uses wins; lists ([`StringSlice`](super::StringSlice)) append.
//! - Stray positionals are ignored, and handed back so that they can be logged.
//! - Nothing is abbreviated, and underscores are not dashes.

use std::ffi::OsString;
use std::io::Write as _;
use std::process::ExitCode;

use clap::builder::ValueParser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, Command, Parser};

use super::values::go_bool;

/// The id of the argument that swallows stray positionals.
const STRAYS: &str = "stray-positionals";

/// A command line that was read.
#[derive(Debug)]
pub struct Parsed<T> {
    /// The flags.
    pub flags: T,
    /// Arguments that are no flags. They have no meaning.
    pub strays: Vec<String>,
}

/// Why there is nothing to run, ready to be shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    /// The process's exit code: 0 for help and version, 1 for everything that is wrong.
    pub code: u8,
    /// The text for stdout (code 0) or stderr, with its line end.
    pub text: String,
}

/// A long flag with one dash as one with two: Go's own flag package, unlike pflag, reads both alike.
/// Anything else stays as it is, `-v` and `-v3` too.
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

/// Reads a command line, program name first.
///
/// # Errors
/// [`Exit`] for `--help`, `--version` and for everything that pflag refuses.
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
            // `[default: ""]` tells nobody anything.
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
    /// A command line that reads well and is wrong: one line per problem, and where to read on.
    pub fn problems(program: &str, problems: &[String]) -> Self {
        let mut text: String = problems
            .iter()
            .map(|problem| format!("Error: {problem}\n"))
            .collect();
        text.push_str(&format!("Run '{program} --help' for all flags.\n"));
        Self { code: 1, text }
    }

    /// Writes the text to where it belongs and gives the code to return from `main`.
    pub fn report(&self) -> ExitCode {
        // Nothing is left to be done about a closed stdout or stderr.
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

/// pflag's text for what it has a text for.
fn pflag_text(error: &clap::Error) -> Option<String> {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    let flag = context(ContextKind::InvalidArg)?;
    // clap says "--name <VALUE>", or "--name[=<VALUE>]" for bools.
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
