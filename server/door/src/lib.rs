//! The nodeport-proxy: lets connections from outside in to the Services of a seed.
//!
//! | module | what it holds |
//! |---|---|
//! | [`routes`] | what is exposed at one moment |
//! | [`annotations`], [`exposure`] | from Services and EndpointSlices to routes |
//! | [`balancer_ports`] | the ports of the load balancer's Service |
//! | [`balancer`] | writes them, while this replica leads |
//! | [`discovery`] | Services and EndpointSlices, watched |
//! | [`mod@file`] | routes from a YAML file, followed as it changes |
//! | [`table`] | the routes in force; a change touches what differs |
//! | [`upstream`] | one Service port's endpoints |
//! | [`client_hello`] | the server name of a TLS connection, without I/O |
//! | [`front`] | connections that are passed on: TLS by server name, node ports |
//! | [`relay`] | bytes from socket to socket, in the kernel where there are many |
//! | [`tunnel`] | CONNECT over HTTP/1.1 and HTTP/2 |
//! | [`watch`] | the end of connections that stand still or have lost a side |
//! | [`socket`] | a socket to read, to write and to look at |
//! | [`ports`] | node ports, opened and closed as Services come and go |
//! | [`metrics`] | its series, and those under Envoy's names |
//! | [`config`], [`cli`], [`app`] | flags, program, wiring |

pub mod allowed;
pub mod annotations;
pub mod app;
pub mod balancer;
pub mod balancer_ports;
pub mod cli;
pub mod client_hello;
pub mod config;
pub mod discovery;
pub mod exposure;
pub mod file;
pub mod front;
pub mod metrics;
pub mod ports;
pub mod relay;
pub mod routes;
pub mod socket;
pub mod table;
pub mod tunnel;
pub mod upstream;
pub mod watch;
