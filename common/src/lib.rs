//! What both ends of the tunnel share.
//!
//! | module | what it holds |
//! |---|---|
//! | [`wire`] | the packet dialect's codec-level parts: ids, half-close marker, the `:authority` rewriter |
//! | [`tunnel`] | close reasons, byte-bounded queues, the pump between two halves |
//! | [`native`] | the transport between our own two ends: one HTTP/2 stream per connection |
//! | [`net`] | listeners, dialing with Go-shaped errors, the CONNECT request head, outbound proxies |
//! | [`openvpn`] | the OpenVPN mode: sockets and tasks around its endpoint, configuration files, key material |
//! | [`tls`] | identities, trust, cipher suites |
//! | [`flags`] | pflag-compatible value parsers and the klog flags |
//! | [`telemetry`] | logging and the metrics registry |
//! | [`admin`] | the plain HTTP listener for health, metrics and admin paths |
//! | [`runtime`] | task tracking, shutdown, signals |

pub mod admin;
pub mod flags;
pub mod native;
pub mod net;
pub mod openvpn;
pub mod runtime;
pub mod telemetry;
pub mod tls;
pub mod tunnel;
pub mod wire;
