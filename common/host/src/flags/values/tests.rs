#![allow(clippy::unwrap_used)]

use std::time::Duration;

use proptest::prelude::{prop_assert_eq, proptest};

use crate::flags::labels::{check_selector, parse_labels};

use super::{GoDuration, StringSlice, go_bool, go_int};

#[test]
fn bools_parse_as_in_go() {
    for word in ["1", "t", "T", "true", "TRUE", "True"] {
        assert_eq!(go_bool(word), Ok(true), "{word}");
    }
    for word in ["0", "f", "F", "false", "FALSE", "False"] {
        assert_eq!(go_bool(word), Ok(false), "{word}");
    }
    for word in ["", "yes", "tRUE", "on", "2"] {
        let text = go_bool(word).unwrap_err().to_string();
        assert_eq!(
            text,
            format!("strconv.ParseBool: parsing {word:?}: invalid syntax")
        );
    }
}

#[test]
fn integers_parse_in_every_base() {
    let cases = [
        ("0", 0),
        ("00", 0),
        ("-0", 0),
        ("8090", 8090),
        ("+5", 5),
        ("-1", -1),
        ("0x1F", 31),
        ("0X_1f", 31),
        ("0b101", 5),
        ("0o17", 15),
        ("017", 15),
        ("0_17", 15),
        ("1_000", 1000),
        ("9223372036854775807", i64::MAX),
        ("-9223372036854775808", i64::MIN),
    ];
    for (text, value) in cases {
        assert_eq!(go_int(text), Ok(value), "{text}");
    }
}

#[test]
fn refused_integers_have_gos_texts() {
    for text in [
        "", "-", "+", "x", "0x", "0x0x1", "08", "1.5", "_1", "1_", "1__0", "--1", "+-1", "1 ",
    ] {
        let shown = go_int(text).unwrap_err().to_string();
        assert_eq!(
            shown,
            format!("strconv.ParseInt: parsing {text:?}: invalid syntax")
        );
    }
    let shown = go_int("9223372036854775808").unwrap_err().to_string();
    assert_eq!(
        shown,
        "strconv.ParseInt: parsing \"9223372036854775808\": value out of range"
    );
}

#[test]
fn durations_parse_and_print_as_in_go() {
    let cases = [
        ("0", 0, "0s"),
        ("-0", 0, "0s"),
        ("0s", 0, "0s"),
        ("1ns", 1, "1ns"),
        ("1us", 1_000, "1µs"),
        ("1.5\u{b5}s", 1_500, "1.5µs"),
        ("2\u{3bc}s", 2_000, "2µs"),
        ("100ms", 100_000_000, "100ms"),
        ("1s", 1_000_000_000, "1s"),
        (".5s", 500_000_000, "500ms"),
        ("1.s", 1_000_000_000, "1s"),
        ("30s", 30_000_000_000, "30s"),
        ("1m0.25s", 60_250_000_000, "1m0.25s"),
        ("1h", 3_600_000_000_000, "1h0m0s"),
        ("1h0m0s", 3_600_000_000_000, "1h0m0s"),
        ("1.5h", 5_400_000_000_000, "1h30m0s"),
        ("1h15m30.918s", 4_530_918_000_000, "1h15m30.918s"),
        ("-1.5h", -5_400_000_000_000, "-1h30m0s"),
        ("+5s", 5_000_000_000, "5s"),
        ("0.3333333333333333333h", 1_200_000_000_000, "20m0s"),
    ];
    for (text, nanos, shown) in cases {
        let read: GoDuration = text.parse().unwrap();
        // Go rounds fractions down too.
        assert!(
            (read.nanos() - nanos).abs() <= 1,
            "{text} is {}",
            read.nanos()
        );
        if read.nanos() == nanos {
            assert_eq!(read.to_string(), shown, "{text}");
        }
    }
}

#[test]
fn refused_durations_have_gos_texts() {
    let cases = [
        ("5", "time: missing unit in duration \"5\""),
        ("1h5", "time: missing unit in duration \"1h5\""),
        ("", "time: invalid duration \"\""),
        ("-", "time: invalid duration \"-\""),
        (".s", "time: invalid duration \".s\""),
        ("s", "time: invalid duration \"s\""),
        ("1 s", "time: unknown unit \" s\" in duration \"1 s\""),
        ("3d", "time: unknown unit \"d\" in duration \"3d\""),
        ("300000000h", "time: invalid duration \"300000000h\""),
        (
            "99999999999999999999s",
            "time: invalid duration \"99999999999999999999s\"",
        ),
        (
            "2000000h2000000h",
            "time: invalid duration \"2000000h2000000h\"",
        ),
    ];
    for (text, shown) in cases {
        let error = text.parse::<GoDuration>().unwrap_err();
        assert_eq!(error.to_string(), shown);
    }
}

#[test]
fn durations_convert_without_wrapping() {
    let negative: GoDuration = "-5s".parse().unwrap();
    assert_eq!(negative.saturating(), Duration::ZERO);
    assert_eq!(GoDuration::from(Duration::MAX).nanos(), i64::MAX);
    assert_eq!(
        GoDuration::from(Duration::from_millis(1500)).to_string(),
        "1.5s"
    );
}

#[test]
fn string_slices_parse_as_in_pflag() {
    let cases: [(&str, &[&str]); 9] = [
        ("", &[]),
        ("a", &["a"]),
        ("a,b", &["a", "b"]),
        ("a,,b,", &["a", "", "b", ""]),
        (" a, b", &[" a", " b"]),
        ("[]", &["[]"]),
        ("\"a,b\",c", &["a,b", "c"]),
        ("\"say \"\"x\"\"\"", &["say \"x\""]),
        ("\"\"", &[""]),
    ];
    for (text, values) in cases {
        let read: StringSlice = text.parse().unwrap();
        assert_eq!(StringSlice::concat(&[read]), values, "{text}");
    }
    for text in ["\"a", "a\"b", "\"a\"b", "\""] {
        assert!(text.parse::<StringSlice>().is_err(), "{text}");
    }
    let twice: Vec<StringSlice> = ["a,b", "c"]
        .iter()
        .map(|text| text.parse().unwrap())
        .collect();
    assert_eq!(StringSlice::concat(&twice), ["a", "b", "c"]);
}

proptest! {
    #[test]
    fn printed_durations_parse_back(nanos in -i64::MAX..=i64::MAX) {
        let shown = GoDuration(nanos).to_string();
        prop_assert_eq!(shown.parse(), Ok(GoDuration(nanos)));
    }

    #[test]
    fn no_input_panics(text in "\\PC*", numeric in "[-+0-9._a-fox\u{b5}mhns\",]{0,24}") {
        for text in [text, numeric] {
            let _ = (go_int(&text), go_bool(&text));
            let _ = (text.parse::<GoDuration>(), text.parse::<StringSlice>());
            let _ = (parse_labels(&text), check_selector(&text));
        }
    }

    #[test]
    fn decimal_integers_parse_back(value: i64) {
        prop_assert_eq!(go_int(&value.to_string()), Ok(value));
    }
}
