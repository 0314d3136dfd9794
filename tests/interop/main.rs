//! The four pairings of our programs with the stock programs behind each front end, the pairings with older
//! releases behind one front end, and upstream's own suite against our programs.
//!
//! | module | contents |
//! |---|---|
//! | [`case`] | a pairing behind a front end, and the driver as the client |
//! | [`held`] | a connection kept open during other events |
//! | [`traffic`] | bulk transfers, many connections, services that send or close first, half closes |
//! | [`failures`] | failed dials, and dials cancelled by the client |
//! | [`frozen`] | an agent that stops answering |
//! | [`keepalive`] | idle links with a short `--keepalive-time` |
//! | [`leases`] | leases of servers, and their number |
//! | [`lives`] | killed, restarted and drained programs |
//! | [`many`] | several servers, and several agents with one id |
//! | [`migration`] | servers and agents of both kinds at the same time |
//! | [`rolling`] | rolling updates of all programs |
//! | [`strategies`] | the choice of the agent by its identifiers |
//! | [`stalls`] | stalled connections beside a working connection |
//! | [`agent_suite`] | upstream's suite against our agent |
//! | [`server_suite`] | upstream's suite against our server |
//! | [`suite`] | a run of upstream's suite |
//!
//! The name of a pairing has the server first: `ours_stock` is our server with the stock agent. The pairing
//! `stock_stock` checks the tests themselves.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod agent_suite;
mod case;
mod failures;
mod frozen;
mod held;
mod keepalive;
mod leases;
mod lives;
mod many;
mod migration;
mod rolling;
mod server_suite;
mod stalls;
mod strategies;
mod suite;
mod traffic;

/// Creates one test for each subject of one pairing behind one front end. Some pairings have additional
/// subjects.
macro_rules! front_end {
    ($name:ident = $front:ident, $server:ident, $agent:ident: $($own:ident::$subject:ident),*) => {
        mod $name {
            use crate::case::{Case, Front, Make};

            const CASE: Case = Case {
                server: Make::$server,
                agent: Make::$agent,
                front: Front::$front,
                client: None,
            };

            tests!(
                traffic::transfers_and_echoes,
                failures::dials_that_fail,
                lives::killed_agent,
                lives::restarted_agent,
                lives::restarted_server,
                lives::drained_agent,
                many::agents_of_one_name,
                many::servers_behind_a_balancer
                $(, $own::$subject)*
            );
        }
    };
}

macro_rules! tests {
    ($($module:ident::$subject:ident),+) => { $(
        #[tokio::test]
        async fn $subject() {
            crate::$module::$subject(CASE).await;
        }
    )+ };
}

macro_rules! pairing {
    ($name:ident = $server:ident, $agent:ident: $($own:ident::$subject:ident),*) => {
        mod $name {
            // The front end does not matter to these subjects.
            front_end!(grpc_uds = GrpcUds, $server, $agent:
                many::servers_that_join $(, $own::$subject)*);
            // The packet protocol has no half close.
            front_end!(connect_uds = ConnectUds, $server, $agent:
                traffic::half_close $(, $own::$subject)*);
            front_end!(connect_tcp = ConnectTcp, $server, $agent:
                traffic::half_close $(, $own::$subject)*);
        }
    };
}

pairing!(ours_ours = Ours, Ours: traffic::endpoint_first, traffic::endpoint_closes_at_once, many::namesakes_at_once);
pairing!(ours_stock = Ours, Stock: traffic::endpoint_first, traffic::endpoint_closes_at_once, traffic::echoes_beside_transfers, many::namesakes_at_once);
// Of two agents with one id, a stock server uses only the first agent, even while the first agent drains.
pairing!(stock_ours = Stock, Ours: traffic::endpoint_first, traffic::endpoint_closes_at_once, traffic::echoes_beside_transfers);
// Between two stock programs, the first bytes of an endpoint may be lost.
pairing!(stock_stock = Stock, Stock:);

/// Creates the tests of an older release: its agent with our server, and our agent with its server.
macro_rules! release {
    ($name:ident = $version:literal: $($own:ident::$subject:ident),*) => {
        mod $name {
            release!(ours_stock = Make::Ours, Make::Release($version); $($own::$subject),*);
            release!(stock_ours = Make::Release($version), Make::Ours; $($own::$subject),*);
        }
    };
    ($name:ident = $server:expr, $agent:expr; $($own:ident::$subject:ident),*) => {
        mod $name {
            use crate::case::{Case, Front, Make};

            const CASE: Case = Case {
                server: $server,
                agent: $agent,
                front: Front::GrpcUds,
                client: None,
            };

            tests!(
                traffic::transfers_and_echoes,
                failures::dials_that_fail,
                lives::killed_agent,
                lives::restarted_agent,
                lives::restarted_server,
                many::servers_behind_a_balancer
                $(, $own::$subject)*
            );
        }
    };
}

// Agents of these releases end on SIGTERM.
release!(v0_29_0 = "v0.29.0": traffic::echoes_beside_transfers);
release!(v0_30_3 = "v0.30.3":);
release!(v0_31_4 = "v0.31.4": lives::drained_agent);
release!(v0_34_0 = "v0.34.0": lives::drained_agent);

/// Creates the tests of older client libraries with our programs.
macro_rules! client {
    ($($name:ident = $version:literal),+) => { $(
        mod $name {
            use crate::case::{Case, Front, Make};

            const CASE: Case = Case {
                server: Make::Ours,
                agent: Make::Ours,
                front: Front::GrpcUds,
                client: Some($version),
            };

            tests!(
                traffic::transfers_and_echoes,
                failures::dials_that_fail,
                lives::killed_agent
            );
        }
    )+ };
}

client!(
    client_v0_29_0 = "v0.29.0",
    client_v0_30_3 = "v0.30.3",
    client_v0_31_0 = "v0.31.0",
    client_v0_31_4 = "v0.31.4",
    client_v0_32_1 = "v0.32.1",
    client_v0_33_1 = "v0.33.1",
    client_v0_34_0 = "v0.34.0",
    client_v0_35_0 = "v0.35.0"
);
