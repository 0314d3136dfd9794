//! Names of programs, contenders and rows in more than one subcommand.

/// Our server.
pub(crate) const SERVER: &str = "culvert-server";
/// Our agent.
pub(crate) const AGENT: &str = "culvert-agent";
/// The front door, in the package `culvert-door`.
pub(crate) const PROXY: &str = "culvert-nodeport-proxy";
/// The node tunnel.
pub(crate) const NODE: &str = "culvert-node-tunnel";

/// Contender with our programs only.
pub(crate) const OURS: &str = "ours";
/// Contender with the stock programs only, the main reference.
pub(crate) const STOCK: &str = "stock";
/// Contender with our server and the stock agent or client.
pub(crate) const OURS_STOCK: &str = "ours+stock";
/// Contender with our programs and a QUIC link.
pub(crate) const QUIC: &str = "quic";
/// Contender with our programs, and with links that resume.
pub(crate) const RESUME: &str = "resume";
/// Contender without programs: the load goes straight to the endpoint.
pub(crate) const DIRECT: &str = "direct";

/// Rows by topic, for targets and pictures.
pub(crate) const BULK: &[&str] = &[
    "download, 1 connection",
    "download, 8 connections",
    "upload, 1 connection",
    "upload, 8 connections",
];
pub(crate) const DIALS: &[&str] = &["dial + 1 byte, 8 at a time"];
pub(crate) const ECHOES: &[&str] = &["64-byte echo, 1 connection", "64-byte echo, 8 connections"];
pub(crate) const ABORTED: &[&str] = &["8 aborted by clients", "8 aborted by endpoints"];
pub(crate) const IDLE: &[&str] = &["memory, 10,000 idle"];

/// Row of a contender that did not start. All rows of its front end or entry point are missing.
pub(crate) const START: &str = "start";

/// The last row: the memory of the long-running programs.
pub(crate) const MEMORY: &str = "memory";
