//! Parts that every program has and that know no protocol of the tunnel.
//!
//! | module | contents |
//! |---|---|
//! | [`flags`] | pflag-compatible value parsers and the klog flags |
//! | [`telemetry`] | logging and the metrics registry |
//! | [`admin`] | the plain HTTP listener for health, metrics and admin paths |
//! | [`tls`] | identities, trust, cipher suites |
//! | [`net`] | listeners, dialing with Go-shaped errors, the CONNECT request head, outbound proxies |
//! | [`file_follower`] | files that are read again when they change |
//! | [`reload`] | the reload of certificates and kubeconfigs, and its metrics |
//! | [`allocator`] | jemalloc and its settings |
//! | [`runtime`] | start-up, signals, threads |
//! | [`yaml`] | errors of the YAML library as operators see them |

pub mod admin;
pub mod allocator;
pub mod file_follower;
pub mod flags;
pub mod net;
pub mod reload;
pub mod runtime;
pub mod telemetry;
pub mod tls;
pub mod yaml;
