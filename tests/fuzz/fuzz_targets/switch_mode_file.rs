//! The file of the tunnel mode: a word, YAML or JSON. A mode that is found is known by its name, too; what is
//! wrong is said in one line.
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
