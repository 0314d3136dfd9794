//! The Kubernetes API as Culvert uses it.
//!
//! | module | contents |
//! |---|---|
//! | [`calls`] | metrics of the calls to an API |
//! | [`mod@client`] | credentials and timeouts of one API |
//! | [`object_cache`] | objects of one kind, kept current by a list and watches |
//! | [`mod@request`] | one request about one object, with errors that name the remedy |
//! | [`election`] | leader election by a Lease |
//! | [`leases`] | the leases of servers, and their number |
//! | [`tokens`] | TokenReviews of agents' service account tokens |
//! | [`pace`] | a limit of requests per time |
//! | `turns` | a fair order of reviews |

pub mod calls;
pub mod client;
pub mod election;
pub mod leases;
pub mod object_cache;
pub mod pace;
pub mod request;
pub mod tokens;
mod turns;
