//! Congestion controls of connections, as the kernel reports them.

use std::fs;
use std::process::Command;

use socket2::{Domain, Socket, Type};

use crate::process::outcome;
use crate::skip::{has_program, skip_for_kernel};
use crate::topology::PATIENCE;
use crate::wait::eventually;

/// Returns the name of a congestion control that this user may choose and that is not the kernel's default. Without such
/// a name, or without `ss`, reports that the test is skipped.
///
/// # Panics
/// If the kernel's default cannot be read, or if `ss` is missing and `CI=true`.
pub fn other_control() -> Option<&'static str> {
    if !has_program("ss") {
        return None;
    }
    let default = fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control");
    let default = default.expect("the default congestion control");
    let candidates: &[&str] = match default.trim() {
        // The node tunnel changes a connection within the host from `bbr` to `reno` without a flag.
        "bbr" => &["cubic"],
        _ => &["cubic", "reno"],
    };
    let other = candidates
        .iter()
        .copied()
        .find(|&name| name != default.trim() && is_permitted(name));
    if other.is_none() {
        skip_for_kernel("cubic");
    }
    other
}

fn is_permitted(name: &str) -> bool {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket.set_tcp_congestion(name.as_bytes()).is_ok()
}

/// Waits until connections match a filter of `ss`, such as `sport = :443`, and each of them uses a congestion control.
///
/// # Panics
/// If `ss` fails, or if [`PATIENCE`] passes first.
pub async fn is_used(control: &str, filter: &str) {
    let what = format!("connections with {filter} use {control}");
    eventually(&what, PATIENCE, async || {
        let mut ss = Command::new("ss");
        // One line for each connection, with the name of the congestion control as a word.
        ss.args(["-tinHO", "state", "established", filter]);
        let shown = outcome(&mut ss).unwrap_or_else(|why| panic!("ss: {why}"));
        let uses = |line: &str| line.split_whitespace().any(|word| word == control);
        let all_use = !shown.is_empty() && shown.lines().all(uses);
        all_use.then_some(()).ok_or(shown)
    })
    .await;
}
