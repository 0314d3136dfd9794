#![allow(clippy::unwrap_used)]

use std::time::Duration;

use culvert_host::net::destinations::Destinations;
use culvert_konnectivity::excess::OverflowBudget;
use metrics::Gauge;

use culvert_native::control::Control;

use super::*;
use crate::agent::Limits;
use crate::metrics::AgentMetrics;

/// Returns the servers of an agent that is connected to the native server `id`, which did not push its number.
fn connected_to(id: &str) -> Arc<Servers> {
    let limits = Limits {
        connection_bytes: 1,
        stall: Duration::from_secs(1),
        excess: OverflowBudget::new(1, Gauge::noop(), Gauge::noop()),
    };
    let (metrics, stop) = (AgentMetrics::new().unwrap(), CancellationToken::new());
    let destinations = Destinations::of_agent();
    let agent = Agent::new(Arc::new(metrics), stop, limits, destinations);
    let servers = Servers::new(agent);
    connect(&servers, id);
    servers
}

/// Connects a native server, which did not push its number.
fn connect(servers: &Servers, id: &str) {
    let (agent, stop) = (servers.agent.clone(), CancellationToken::new());
    let server = Server {
        stream: Stream::Native(NativeServer::new(agent, Arc::default(), stop)),
        count: 1,
        pushes: false,
        session: None,
        answered: Arc::default(),
        socket: None,
        via: None,
    };
    servers.table.lock().insert(id.to_owned(), server);
}

#[test]
fn number_of_a_server_that_begins_to_push_follows_the_servers() {
    let (servers, count) = (connected_to("a"), ServerCount::of_announcements());
    assert!(!servers.view(&count).follows);
    servers.duplicate("a", 2, true);
    let expected = View {
        connected: 1,
        announced: 2,
        follows: true,
    };
    assert_eq!(servers.view(&count), expected);
}

#[test]
fn pushed_message_decides_if_the_number_follows_the_servers() {
    let (servers, count) = (connected_to("a"), ServerCount::of_announcements());
    servers.duplicate("a", 2, true);
    let push = |follows| {
        let table = servers.table.lock();
        let Some(Stream::Native(server)) = table.get("a").map(|server| server.stream.clone())
        else {
            panic!("no native server");
        };
        server.on_control(Control::Follows(follows));
    };
    for follows in [false, true] {
        push(follows);
        let view = servers.view(&count);
        assert_eq!((view.announced, view.follows), (2, follows));
    }
}

#[test]
fn number_of_leases_follows_the_servers_unless_a_server_has_no_lease() {
    let (servers, count) = (connected_to("a"), ServerCount::of_leases());
    for (announced, pushes, leases, follows) in [
        (1, false, Some(1), true),
        (2, false, Some(1), false),
        (2, true, Some(1), false),
        (2, false, Some(2), true),
        (2, false, None, false),
        (2, true, None, true),
    ] {
        servers.duplicate("a", announced, pushes);
        count.leases(leases);
        let view = servers.view(&count);
        assert_eq!(view.follows, follows, "{announced} {pushes} {leases:?}");
    }
    // More servers than announced have leases, or are connected.
    servers.duplicate("a", 1, false);
    connect(&servers, "b");
    for (leases, follows) in [(3, true), (2, true), (1, false)] {
        count.leases(Some(leases));
        let expected = View {
            connected: 2,
            announced: leases,
            follows,
        };
        assert_eq!(servers.view(&count), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn cuts_of_servers_that_are_gone_are_forgotten() {
    let (servers, hour) = (connected_to("a"), Duration::from_secs(3600));
    for id in 0..9 {
        servers.was_cut(&id.to_string());
        tokio::time::advance(hour).await;
    }
    assert_eq!(servers.cuts.lock().len(), 1);
}

#[test]
fn answer_of_a_connected_server_ends_no_outage_of_another() {
    let view = |connected| View {
        connected,
        announced: 3,
        follows: false,
    };
    assert!(!is_over(Outcome::Duplicate, view(2)));
    assert!(is_over(Outcome::Duplicate, view(3)));
    assert!(is_over(Outcome::Added, view(2)));
    assert!(!is_over(Outcome::Failed, view(3)));
}

#[test]
fn attempts_to_resume_learn_of_the_servers_and_of_the_answers_to_the_search() {
    let servers = connected_to("a");
    let known = |id| {
        let known = servers.known(id);
        (known.ids.len(), known.count, known.has_other)
    };
    assert_eq!(known("a"), (1, 1, false));
    servers.duplicate("a", 3, true);
    assert_eq!(known("a"), (1, 3, false));
    connect(&servers, "b");
    assert_eq!(known("a"), (2, 3, true));
    let link = servers.table.lock().get("a").map(|a| a.answered.clone());
    let link = link.unwrap();
    let mut answered = std::pin::pin!(link.notified());
    assert!(!answered.as_mut().enable());
    servers.duplicate("b", 3, true);
    assert!(!answered.as_mut().enable());
    servers.duplicate("a", 3, true);
    assert!(answered.enable());
}
