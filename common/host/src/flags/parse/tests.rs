#![allow(clippy::unwrap_used)]

use clap::Parser;

use super::{Exit, Parsed, parse, with_two_dashes};
use crate::flags::values::go_int;
use crate::flags::{GoDuration, KlogFlags, StringSlice};

/// Flags of an example program.
#[derive(Parser, Debug)]
#[command(name = "program", version = "1.2.3")]
struct Flags {
    /// Off by default
    #[arg(long)]
    off: bool,
    /// On by default
    #[arg(long, default_value = "true")]
    on: bool,
    /// A port
    #[arg(long, default_value = "8090", value_parser = go_int)]
    server_port: i64,
    /// A text
    #[arg(long, default_value = "")]
    text: String,
    /// A time
    #[arg(long, default_value = "1h")]
    time: GoDuration,
    /// A list
    #[arg(long)]
    list: Vec<StringSlice>,
    #[command(flatten)]
    klog: KlogFlags,
}

fn run(line: &[&str]) -> Result<Parsed<Flags>, Exit> {
    parse(std::iter::once("program").chain(line.iter().copied()))
}

fn refused(line: &[&str]) -> String {
    let exit = run(line).unwrap_err();
    assert_eq!(exit.code, 1, "{line:?}: {}", exit.text);
    assert!(
        exit.text.contains("Usage: program [OPTIONS]"),
        "{}",
        exit.text
    );
    exit.text.lines().next().unwrap_or_default().to_owned()
}

#[test]
fn unset_flags_have_their_defaults() {
    let flags = run(&[]).unwrap().flags;
    assert!(!flags.off);
    assert!(flags.on);
    assert_eq!(flags.server_port, 8090);
    assert_eq!(flags.text, "");
    assert_eq!(flags.time.to_string(), "1h0m0s");
    assert!(flags.list.is_empty());
    assert_eq!(flags.klog.log_config().verbosity, 4);
}

#[test]
fn bools_accept_gos_spellings() {
    let cases: [(&[&str], bool); 8] = [
        (&["--off"], true),
        (&["--off=true"], true),
        (&["--off=T"], true),
        (&["--off=1"], true),
        (&["--off=f"], false),
        (&["--off", "--off=FALSE"], false),
        (&["--off=false", "--off"], true),
        (&["--off=0"], false),
    ];
    for (line, expected) in cases {
        assert_eq!(run(line).unwrap().flags.off, expected, "{line:?}");
    }
    assert!(!run(&["--on=false"]).unwrap().flags.on);
}

#[test]
fn a_bare_bool_leaves_the_next_argument_alone() {
    let parsed = run(&["--off", "false", "--server-port", "1"]).unwrap();
    assert!(parsed.flags.off);
    assert_eq!(parsed.flags.server_port, 1);
    assert_eq!(parsed.strays, ["false"]);
}

#[test]
fn values_follow_an_equals_sign_or_a_space() {
    for line in [&["--server-port=17"][..], &["--server-port", "17"]] {
        assert_eq!(run(line).unwrap().flags.server_port, 17, "{line:?}");
    }
    let cases: [(&[&str], &str); 6] = [
        (&["--text", "-x"], "-x"),
        (&["--text=-x"], "-x"),
        (&["--text", "--server-port"], "--server-port"),
        (&["--text", "--"], "--"),
        (&["--text="], ""),
        (&["--text=a=b"], "a=b"),
    ];
    for (line, expected) in cases {
        assert_eq!(run(line).unwrap().flags.text, expected, "{line:?}");
    }
    assert_eq!(run(&["--server-port=-1"]).unwrap().flags.server_port, -1);
    assert_eq!(
        run(&["--time", "-1s"]).unwrap().flags.time.nanos(),
        -1_000_000_000
    );
}

#[test]
fn the_last_use_wins_and_lists_append() {
    let flags = run(&[
        "--text=a",
        "--server-port=1",
        "--text",
        "b",
        "--server-port=2",
    ])
    .unwrap()
    .flags;
    assert_eq!((flags.text.as_str(), flags.server_port), ("b", 2));
    let flags = run(&["--list=a,b", "--list", "c", "--list="])
        .unwrap()
        .flags;
    assert_eq!(StringSlice::concat(&flags.list), ["a", "b", "c"]);
}

#[test]
fn verbosity_in_every_spelling() {
    let cases: [&[&str]; 5] = [&["-v=3"], &["-v3"], &["-v", "3"], &["--v=3"], &["--v", "3"]];
    for line in cases {
        let config = run(line).unwrap().flags.klog.log_config();
        assert_eq!(config.verbosity, 3, "{line:?}");
    }
    assert_eq!(
        run(&["-v", "-1"])
            .unwrap()
            .flags
            .klog
            .log_config()
            .verbosity,
        -1
    );
}

#[test]
fn stray_arguments_are_returned() {
    let parsed = run(&["a", "--off", "b", "-", "--", "--text", "c"]).unwrap();
    assert_eq!(parsed.strays, ["a", "b", "-", "--text", "c"]);
    assert!(parsed.flags.off);
}

#[test]
fn refused_arguments_have_pflags_texts() {
    let cases: [(&[&str], &str); 13] = [
        (&["--bogus"], "Error: unknown flag: --bogus"),
        (&["--bogus=1"], "Error: unknown flag: --bogus"),
        (&["--server_port=1"], "Error: unknown flag: --server_port"),
        (&["--server"], "Error: unknown flag: --server"),
        (&["--no-off"], "Error: unknown flag: --no-off"),
        (&["-x"], "Error: unknown shorthand flag: -x"),
        (&["-server-port=5"], "Error: unknown shorthand flag: -s"),
        (
            &["--server-port=x"],
            "Error: invalid argument \"x\" for \"--server-port\" flag: strconv.ParseInt: parsing \"x\": invalid syntax",
        ),
        (
            &["--server-port="],
            "Error: invalid argument \"\" for \"--server-port\" flag: strconv.ParseInt: parsing \"\": invalid syntax",
        ),
        (
            &["--off=yes"],
            "Error: invalid argument \"yes\" for \"--off\" flag: strconv.ParseBool: parsing \"yes\": invalid syntax",
        ),
        (
            &["--off="],
            "Error: invalid argument \"\" for \"--off\" flag: strconv.ParseBool: parsing \"\": invalid syntax",
        ),
        (
            &["--time=5"],
            "Error: invalid argument \"5\" for \"--time\" flag: time: missing unit in duration \"5\"",
        ),
        (&["--text"], "Error: flag needs an argument: --text"),
    ];
    for (line, expected) in cases {
        assert_eq!(refused(line), expected, "{line:?}");
    }
}

#[test]
fn help_and_version_exit_with_code_0() {
    for line in [["--help"], ["-h"]] {
        let exit = run(&line).unwrap_err();
        assert_eq!(exit.code, 0);
        assert!(
            exit.text.contains("Usage: program [OPTIONS]\n"),
            "{}",
            exit.text
        );
        assert!(exit.text.contains("[default: 8090]"), "{}", exit.text);
    }
    let exit = run(&["--version"]).unwrap_err();
    assert_eq!(
        exit,
        Exit {
            code: 0,
            text: "program 1.2.3\n".to_owned()
        }
    );
}

#[test]
fn exit_lists_all_problems() {
    let exit = Exit::problems("program", &["one".to_owned(), "two".to_owned()]);
    assert_eq!(exit.code, 1);
    assert_eq!(
        exit.text,
        "Error: one\nError: two\nRun 'program --help' for all flags.\n"
    );
}

#[test]
fn single_dash_is_doubled_only_before_a_long_name() {
    for (arg, read) in [
        ("-if", "--if"),
        ("-addr=10.0.0.1", "--addr=10.0.0.1"),
        ("-vmodule=a=1", "--vmodule=a=1"),
    ] {
        assert_eq!(with_two_dashes(arg), read);
    }
    for arg in [
        "--if", "-v", "-v=4", "-v4", "-5s", "-", "--", "", "x-y", "é",
    ] {
        assert_eq!(with_two_dashes(arg), arg);
    }
}
