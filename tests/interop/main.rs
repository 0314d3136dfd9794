//! The four pairings of our programs and the stock ones behind each front end, and upstream's own
//! suite against our agent.
//!
//! | module | what it holds |
//! |---|---|
//! | [`case`] | one pairing behind one front end, and the driver that speaks to it |
//! | [`held`] | a connection that stays open while things happen around it |
//! | [`traffic`] | bytes, many connections, services that speak first, half closes |
//! | [`failures`] | dials that fail, and dials that are given up |
//! | [`lives`] | programs that are killed, restarted and drained |
//! | [`many`] | several servers, several agents of one name |
//! | [`stalls`] | connections that stand still beside one that does not |
//! | [`agent_suite`] | upstream's suite |
//!
//! Pairings are named server first: `ours_stock` is our server with the stock agent. The pairing
//! `stock_stock` judges the tests themselves.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod agent_suite;
mod case;
mod failures;
mod held;
mod lives;
mod many;
mod stalls;
mod traffic;

/// One test for each subject of one pairing behind one front end; some have subjects of their own.
macro_rules! front_end {
    ($name:ident = $front:ident, $server:ident, $agent:ident: $($own:ident::$subject:ident),*) => {
        mod $name {
            use crate::case::{Case, Front, Make};

            const CASE: Case = Case {
                server: Make::$server,
                agent: Make::$agent,
                front: Front::$front,
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
            front_end!(grpc_uds = GrpcUds, $server, $agent: $($own::$subject),*);
            // The packet protocol has no half close.
            front_end!(connect_uds = ConnectUds, $server, $agent:
                traffic::half_close $(, $own::$subject)*);
            front_end!(connect_tcp = ConnectTcp, $server, $agent:
                traffic::half_close $(, $own::$subject)*);
        }
    };
}

pairing!(ours_ours = Ours, Ours: traffic::endpoint_first, many::namesakes_at_once);
pairing!(ours_stock = Ours, Stock: traffic::endpoint_first, many::namesakes_at_once);
// Of two agents with one id, a stock server uses the first alone, even while that one drains.
pairing!(stock_ours = Stock, Ours: traffic::endpoint_first);
// And between two stock programs, what an endpoint says first may be lost.
pairing!(stock_stock = Stock, Stock:);
