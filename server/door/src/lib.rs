//! The nodeport-proxy: accepts connections from outside and forwards them to the Services of a seed cluster.
//!
//! | module | contents |
//! |---|---|
//! | `routes` | a snapshot of everything exposed |
//! | [`annotations`], `exposure` | compute routes from Services and EndpointSlices |
//! | `balancer_ports` | computes the ports of the load balancer's Service |
//! | `balancer` | writes these ports while this replica leads |
//! | `discovery` | watches Services and EndpointSlices |
//! | [`mod@file`] | reads routes from a YAML file and follows changes of the file |
//! | [`table`] | the routes in force; a change touches only the difference |
//! | `upstream` | the endpoints of one Service port |
//! | [`client_hello`] | parses the server name of a TLS connection, without I/O |
//! | `front` | forwards connections unchanged: TLS by server name, node ports |
//! | [`quic`] | forwards QUIC connections by server name and by connection id |
//! | `relay` | moves bytes between two sockets, inside the kernel for bulk data |
//! | `connect` | CONNECT over HTTP/1.1 and HTTP/2 |
//! | `watch` | ends idle connections, and connections with a dead peer |
//! | `ports` | opens and closes node ports as Services come and go |
//! | `pages` | pages for health, metrics and administration |
//! | [`metrics`] | the proxy's own metrics, and metrics with Envoy's names |
//! | [`config`], [`cli`], [`app`] | flags, program, wiring |

pub mod annotations;
pub mod app;
mod balancer;
mod balancer_ports;
pub mod cli;
pub mod client_hello;
pub mod config;
mod connect;
mod discovery;
mod exposure;
pub mod file;
pub mod files;
mod front;
pub mod metrics;
mod pages;
mod ports;
pub mod quic;
mod relay;
mod routes;
pub mod table;
mod upstream;
mod watch;
