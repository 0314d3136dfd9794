//! The tunnel mode file: a word, YAML or JSON. The name of a mode found in the file parses to the same mode,
//! and an error is a single line.
#![no_main]

use culvert_server::switch::mode_file::parse;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &str| match parse(input) {
    Ok(mode) => {
        assert_eq!(parse(mode.as_str()), Ok(mode));
        assert_eq!(parse(&format!("tunnelMode: {mode}\n")), Ok(mode));
    }
    Err(why) => assert!(!why.is_empty() && !why.contains('\n'), "{why}"),
});
