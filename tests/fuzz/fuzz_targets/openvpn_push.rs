//! Pushed options: all pushable lines of the input, split over several texts, arrive as if a single text had
//! contained all of them.
#![no_main]

use culvert_openvpn::control::push::{Assembler, PushOptions, build};
use culvert_openvpn::control::{MAX_TEXT_LEN, Message};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &str| {
    let _ = PushOptions::parse(input);
    // `build` adds its own continuation marks between the texts, so lines that look like a mark are skipped.
    let pushable = |line: &&str| build([line]).is_ok() && !line.starts_with("push-continuation");
    let lines: Vec<_> = input.lines().filter(pushable).collect();
    let texts = build(&lines).expect("each can be pushed");

    let mut assembler = Assembler::new();
    let mut arrived = None;
    for text in &texts {
        assert!(text.len() < MAX_TEXT_LEN);
        assert!(arrived.is_none(), "complete before the last text");
        let Message::PushReply(reply) = Message::parse(text) else {
            panic!("not a reply: {text}")
        };
        arrived = assembler.push(reply).transpose();
    }
    let joined = lines.join(",");
    if joined.len() < 60_000 {
        assert_eq!(arrived, Some(PushOptions::parse(&joined)));
    }
});
