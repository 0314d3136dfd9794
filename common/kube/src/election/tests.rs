#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod simulation;

use k8s_openapi::jiff::Timestamp;

use super::*;

/// Converts seconds since 1970 to the time to write.
fn wall(seconds: i64) -> MicroTime {
    MicroTime(Timestamp::from_second(seconds).unwrap())
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn candidate(identity: &str, now: Instant) -> Election {
    Election::new("lb-updater", identity, Times::default(), now)
}

/// Creates a lease as returned by the API.
fn lease(holder: &str, renewed: i64, version: &str) -> Lease {
    let mut lease = Lease::default();
    lease.metadata.resource_version = Some(version.to_owned());
    let spec = lease.spec.get_or_insert_default();
    spec.holder_identity = Some(holder.to_owned());
    spec.lease_duration_seconds = Some(15);
    spec.lease_transitions = Some(3);
    spec.acquire_time = Some(wall(1));
    spec.renew_time = Some(wall(renewed));
    lease
}

/// Returns the lease that the candidate writes next.
fn writes(election: &mut Election, now: Instant) -> Lease {
    match election.next(now, &wall(100)) {
        Action::Write(lease) => *lease,
        other => panic!("{other:?}"),
    }
}

/// Lets the candidate read the lease, and checks that it then waits.
fn sees(election: &mut Election, now: Instant, lease: &Lease) {
    assert_eq!(election.next(now, &wall(0)), Action::Read);
    election.read(now, Some(lease.clone()));
    let waits = Action::Wait(now + seconds(2));
    assert_eq!(election.next(now, &wall(0)), waits);
    assert_eq!(election.leads_until(), None);
}

/// Creates a candidate that leads since `now`.
fn leader(now: Instant) -> Election {
    let mut election = candidate("me", now);
    election.read(now, None);
    let mut lease = writes(&mut election, now);
    lease.metadata.resource_version = Some("1".to_owned());
    election.written(now, now, lease);
    election
}

#[test]
fn missing_lease_is_created() {
    let start = Instant::now();
    let mut election = candidate("me", start);
    assert_eq!(election.next(start, &wall(0)), Action::Read);
    election.read(start, None);
    let written = writes(&mut election, start);
    assert_eq!(written.metadata.name.as_deref(), Some("lb-updater"));
    assert_eq!(written.metadata.resource_version, None);
    let spec = written.spec.clone().unwrap();
    assert_eq!(spec.holder_identity.as_deref(), Some("me"));
    assert_eq!(
        (spec.lease_duration_seconds, spec.lease_transitions),
        (Some(15), Some(0))
    );
    assert_eq!(
        (spec.acquire_time, spec.renew_time),
        (Some(wall(100)), Some(wall(100)))
    );
    // Leadership begins with the answer and ends a fixed time after the request was sent.
    assert_eq!(election.leads_until(), None);
    let (sent, now) = (start, start + seconds(4));
    election.written(sent, now, written);
    assert_eq!(election.leads_until(), Some(sent + seconds(10)));
    assert_eq!(
        election.next(now, &wall(0)),
        Action::Wait(now + seconds(2)),
        "the next renewal"
    );
}

#[test]
fn silent_holder_expires_by_the_local_clock() {
    // Far in the past and in the future: the holder's clock does not matter.
    for renewed in [0, 10_000_000_000] {
        let start = Instant::now();
        let mut election = candidate("me", start);
        for look in 0..7 {
            sees(
                &mut election,
                start + seconds(2 * look),
                &lease("other", renewed, "5"),
            );
        }
        // First read at 0 s. At 14 s, the eighth read, the lease is still valid; at 16 s it has expired.
        sees(
            &mut election,
            start + seconds(14),
            &lease("other", renewed, "5"),
        );
        let now = start + seconds(16);
        assert_eq!(election.next(now, &wall(0)), Action::Read);
        election.read(now, Some(lease("other", renewed, "5")));
        let written = writes(&mut election, now);
        assert_eq!(written.metadata.resource_version.as_deref(), Some("5"));
        let spec = written.spec.unwrap();
        assert_eq!(spec.holder_identity.as_deref(), Some("me"));
        assert_eq!(spec.lease_transitions, Some(4));
        assert_eq!(spec.acquire_time, Some(wall(100)));
    }
}

#[test]
fn only_a_renewal_extends_the_wait() {
    let start = Instant::now();
    let mut election = candidate("me", start);
    sees(&mut election, start, &lease("other", 1, "5"));
    // A renewal between two reads counts from the second read.
    sees(&mut election, start + seconds(8), &lease("other", 2, "6"));
    let mut labelled = lease("other", 2, "7");
    labelled.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
    sees(&mut election, start + seconds(22), &labelled);
    let now = start + seconds(24);
    assert_eq!(election.next(now, &wall(0)), Action::Read);
    election.read(now, Some(labelled.clone()));
    let written = writes(&mut election, now);
    assert_eq!(written.metadata.labels, labelled.metadata.labels);
    assert_eq!(written.metadata.resource_version.as_deref(), Some("7"));
}

#[test]
fn lease_is_valid_for_the_duration_in_it() {
    for (named, free_after) in [(Some(3), 3), (Some(60), 60), (None, 15), (Some(-1), 15)] {
        let start = Instant::now();
        let mut election = candidate("me", start);
        let mut other = lease("other", 1, "5");
        other.spec.as_mut().unwrap().lease_duration_seconds = named;
        election.read(start, Some(other.clone()));
        for (at, taken) in [(free_after - 1, true), (free_after, false)] {
            election.read(start + seconds(at), Some(other.clone()));
            assert_eq!(election.is_taken(start + seconds(at)), taken, "{named:?}");
        }
    }
}

#[test]
fn lease_without_a_holder_is_acquired_at_once() {
    let now = Instant::now();
    for empty in [Some(String::new()), None] {
        let mut election = candidate("me", now);
        let mut given_back = lease("", 1, "5");
        given_back.spec.as_mut().unwrap().holder_identity = empty;
        election.read(now, Some(given_back));
        let spec = writes(&mut election, now).spec.unwrap();
        assert_eq!(spec.lease_transitions, Some(4));
    }
    let mut election = candidate("me", now);
    election.read(now, Some(Lease::default()));
    assert!(writes(&mut election, now).spec.is_some());
}

#[test]
fn renewal_keeps_unrelated_fields() {
    let start = Instant::now();
    let mut election = leader(start);
    let now = start + seconds(2);
    let mut renewed = writes(&mut election, now);
    let spec = renewed.spec.as_mut().unwrap();
    assert_eq!(spec.lease_transitions, Some(0));
    assert_eq!(spec.acquire_time, Some(wall(100)));
    // A field from a newer version of the API.
    spec.preferred_holder = Some("another".to_owned());
    renewed.metadata.resource_version = Some("2".to_owned());
    election.written(now, now, renewed);
    assert_eq!(election.leads_until(), Some(start + seconds(12)));
    let again = writes(&mut election, start + seconds(4));
    assert_eq!(again.metadata.resource_version.as_deref(), Some("2"));
    assert_eq!(
        again.spec.unwrap().preferred_holder.as_deref(),
        Some("another")
    );
}

#[test]
fn leadership_ends_without_renewals_and_resumes_with_the_api() {
    let start = Instant::now();
    let mut election = leader(start);
    let mut now = start + seconds(2);
    writes(&mut election, now);
    let until = election.leads_until();
    while until.is_some_and(|until| now < until) {
        election.failed(now, false);
        assert_eq!(election.next(now, &wall(0)), Action::Wait(now + seconds(2)));
        now += seconds(2);
        assert_eq!(election.next(now, &wall(0)), Action::Read);
        assert_eq!(election.leads_until(), until, "no failure prolongs it");
    }
    assert_eq!(until, Some(start + seconds(10)));
    // No other candidate has acquired the lease: it still contains our identity.
    election.read(now, Some(lease("me", 1, "9")));
    let spec = writes(&mut election, now).spec.unwrap();
    assert_eq!(spec.lease_transitions, Some(3));
    election.written(now, now, lease("me", 2, "10"));
    assert_eq!(election.leads_until(), Some(now + seconds(10)));
}

#[test]
fn replaced_leader_stops_at_once() {
    let start = Instant::now();
    let mut election = leader(start);
    let now = start + seconds(2);
    writes(&mut election, now);
    election.failed(now, true);
    // No pause: the candidate reads the new holder at once.
    sees(&mut election, now, &lease("other", 1, "9"));
    assert!(!election.may_hold());
}

#[test]
fn repeated_conflicts_cause_a_pause() {
    let start = Instant::now();
    let mut election = leader(start);
    let now = start + seconds(2);
    writes(&mut election, now);
    election.failed(now, true);
    assert_eq!(election.next(now, &wall(0)), Action::Read);
    election.read(now, Some(lease("me", 1, "9")));
    writes(&mut election, now);
    election.failed(now, true);
    assert_eq!(election.next(now, &wall(0)), Action::Wait(now + seconds(2)));
}

#[test]
fn deleted_lease_ends_the_leadership() {
    let start = Instant::now();
    let mut election = leader(start);
    let now = start + seconds(2);
    writes(&mut election, now);
    election.failed(now, false);
    let now = start + seconds(4);
    assert_eq!(election.next(now, &wall(0)), Action::Read);
    election.read(now, None);
    assert_eq!(election.leads_until(), None);
    let created = writes(&mut election, now);
    assert_eq!(created.metadata.resource_version, None);
}

#[test]
fn only_the_holder_releases_the_lease() {
    let now = Instant::now();
    let mut election = leader(now);
    assert!(election.may_hold());
    let released = election.release(&wall(200)).unwrap();
    assert_eq!(released.metadata.resource_version.as_deref(), Some("1"));
    let spec = released.spec.clone().unwrap();
    assert_eq!(spec.holder_identity.as_deref(), Some(""));
    assert_eq!(spec.lease_duration_seconds, Some(1));
    assert_eq!(election.leads_until(), None);
    let mut next = candidate("next", now);
    next.read(now, Some(released.clone()));
    writes(&mut next, now);
    // The released lease exists, so its former holder must not create it.
    let later = now + Times::default().retry_period;
    assert_eq!(election.next(later, &wall(202)), Action::Read);
    election.read(later, Some(released));
    let claimed = writes(&mut election, later);
    assert_eq!(claimed.metadata.resource_version.as_deref(), Some("1"));

    let mut election = candidate("me", now);
    assert!(!election.may_hold());
    election.read(now, Some(lease("other", 1, "5")));
    assert_eq!(election.release(&wall(200)), None);
}

#[test]
fn write_without_an_answer_may_have_acquired_the_lease() {
    let now = Instant::now();
    let mut election = candidate("me", now);
    election.read(now, None);
    writes(&mut election, now);
    assert!(election.may_hold());
    assert_eq!(election.leads_until(), None);
    election.read(now, Some(lease("me", 1, "1")));
    assert!(election.release(&wall(200)).is_some());
}

#[test]
fn lease_duration_is_rounded_up_to_seconds() {
    let now = Instant::now();
    let times = Times {
        lease_duration: Duration::from_millis(2500),
        ..Times::default()
    };
    let mut election = Election::new("lb-updater", "me", times, now);
    election.read(now, None);
    let spec = writes(&mut election, now).spec.unwrap();
    assert_eq!(spec.lease_duration_seconds, Some(3));
}
