#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

fn list(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

fn policy(program: Program, allow: &[&str], deny: &[&str]) -> Destinations {
    let (policy, problems) = Destinations::parse(program, &list(allow), &list(deny));
    assert_eq!(problems, Vec::<String>::new());
    policy
}

/// Returns the rule that denies `address`, or `None`.
fn rule(policy: &Destinations, address: &str) -> Option<Rule> {
    let checked = policy.check(address.parse().unwrap());
    checked.err().map(|denial| denial.rule)
}

#[test]
fn deny_wins_over_allow_and_an_empty_allow_list_allows_everything_else() {
    let both = policy(
        Program::Server,
        &["10.0.0.0/8:443", "[fd00::/8]:1-1024", "192.0.2.7"],
        &["10.9.0.0/16", "*:22"],
    );
    for (address, expected) in [
        ("10.1.2.3:443", None),
        ("10.1.2.3:80", Some(Rule::NotListed)),
        ("10.9.2.3:443", Some(Rule::Listed)),
        ("[fd00::1]:1024", None),
        ("[fd00::1]:1025", Some(Rule::NotListed)),
        ("[fd00::1]:22", Some(Rule::Listed)),
        ("192.0.2.7:65535", None),
        ("192.0.2.7:22", Some(Rule::Listed)),
        ("192.0.2.8:443", Some(Rule::NotListed)),
    ] {
        assert_eq!(rule(&both, address), expected, "{address}");
    }
    let deny = policy(Program::Server, &[], &["127.0.0.0/8"]);
    assert_eq!(rule(&deny, "127.9.9.9:1"), Some(Rule::Listed));
    assert_eq!(rule(&deny, "128.0.0.1:1"), None);
    assert_eq!(rule(&Destinations::default(), "169.254.169.254:80"), None);
}

#[test]
fn mapped_and_unspecified_addresses_are_checked_as_the_addresses_that_they_reach() {
    for deny in ["127.0.0.1", "::ffff:127.0.0.1", "[::ffff:127.0.0.0/104]"] {
        let policy = policy(Program::Server, &[], &[deny]);
        for address in ["127.0.0.1:1", "[::ffff:127.0.0.1]:1", "0.0.0.0:1"] {
            assert_eq!(rule(&policy, address), Some(Rule::Listed), "{deny}");
        }
        assert_eq!(rule(&policy, "[::1]:1"), None);
    }
    let policy = policy(Program::Server, &["::1"], &[]);
    assert_eq!(rule(&policy, "[::]:1"), None);
    assert_eq!(rule(&policy, "0.0.0.0:1"), Some(Rule::NotListed));
}

#[test]
fn agents_deny_metadata_services_unless_an_entry_names_them() {
    let metadata = [
        "169.254.169.254:80",
        "[::ffff:169.254.169.254]:80",
        "[fe80::1]:80",
        "[fd00:ec2::254]:80",
        "[fd20:ce::254]:80",
    ];
    let lists: [&[&str]; 4] = [&[], &["*"], &["0.0.0.0/0", "::/0"], &["fd00::/8", "*"]];
    for allow in lists {
        let agent = policy(Program::Agent, allow, &[]);
        for address in metadata {
            assert_eq!(rule(&agent, address), Some(Rule::Metadata), "{allow:?}");
        }
        assert_eq!(rule(&agent, "10.0.0.1:80"), None);
        assert_eq!(rule(&agent, "[fd00:ec2::253]:80"), None);
    }
    let named = policy(Program::Agent, &["*", "169.254.20.10:53", "fe80::/10"], &[]);
    assert_eq!(rule(&named, "169.254.20.10:53"), None);
    assert_eq!(rule(&named, "169.254.20.10:80"), Some(Rule::Metadata));
    assert_eq!(rule(&named, "169.254.169.254:53"), Some(Rule::Metadata));
    assert_eq!(rule(&named, "[fe80::1]:80"), None);
    let denied = policy(Program::Agent, &["169.254.0.0/16"], &["169.254.169.254"]);
    assert_eq!(rule(&denied, metadata.first().unwrap()), Some(Rule::Listed));
}

#[test]
fn allow_list_of_link_local_addresses_alone_causes_a_warning() {
    let warns = |allow: &[&str]| policy(Program::Agent, allow, &[]).warning().is_some();
    assert!(warns(&["169.254.20.10"]));
    assert!(!warns(&["*", "169.254.20.10"]) && !warns(&[]));
}

#[test]
fn denial_names_the_program_and_the_flag() {
    let text = |policy: &Destinations, address: &str| {
        let checked = policy.check(address.parse().unwrap());
        checked.unwrap_err().to_string()
    };
    let server = policy(Program::Server, &["10.0.0.0/8"], &["10.0.0.1"]);
    assert_eq!(
        text(&server, "10.0.0.1:1"),
        "denied by the server: the destination is in --deny-destinations"
    );
    assert_eq!(
        text(&server, "11.0.0.1:1"),
        "denied by the server: the destination is not in --allow-destinations"
    );
    let text = text(&Destinations::of_agent(), "169.254.169.254:80");
    assert!(text.starts_with("denied by the agent: the destination is link-local"));
    // Servers classify failed dials by such words.
    for word in ["timeout", "connection refused", "too many open files"] {
        assert!(!text.contains(word));
    }
}

#[test]
fn unusable_entries_are_reported_with_their_flag() {
    let bad = [
        "",
        "example.com",
        "10.0.0.0/33",
        "10.0.0.0/8:",
        "10.0.0.0/8:0",
        "10.0.0.0/8:+1",
        "10.0.0.0/8:65536",
        "10.0.0.0/8:2-1",
        "10.0.0.0/8:1-",
        ":22",
        "[fd00::/8",
        "[fd00::/8]22",
        "[fd00::]/8",
        "*:*",
    ];
    for text in bad {
        let (_, problems) =
            Destinations::parse(Program::Agent, &list(&["*", text]), &list(&[text]));
        let [allow, deny] = problems.as_slice() else {
            panic!("{text:?}: {problems:?}");
        };
        let start = |flag| format!("--{flag}-destinations: {text:?} is not a destination");
        assert!(allow.starts_with(&start("allow")), "{allow}");
        assert!(deny.starts_with(&start("deny")), "{deny}");
    }
}

#[test]
fn lists_are_described_as_flags_accept_them() {
    let texts = [
        "*",
        "*:22",
        "10.1.2.3/8:1-1024",
        "[fd00::1/8]:443",
        " fe80::/10",
        "192.0.2.7",
    ];
    let policy = policy(Program::Agent, &texts, &[]);
    let [allow, deny] = policy.describe();
    assert_eq!(
        allow,
        "allow-destinations=*,*:22,10.0.0.0/8:1-1024,[fd00::/8]:443,fe80::/10,192.0.2.7/32"
    );
    assert_eq!(deny, "deny-destinations=");
}

fn entry() -> impl Strategy<Value = Entry> {
    let v4 = (any::<[u8; 4]>(), 0..=32_u8);
    let v4 = v4.prop_map(|(ip, length)| IpNet::new(Ipv4Addr::from(ip).into(), length));
    let v6 = (any::<[u8; 16]>(), 0..=128_u8);
    let v6 = v6.prop_map(|(ip, length)| IpNet::new(Ipv6Addr::from(ip).into(), length));
    let network = prop_oneof![v4, v6].prop_map(|network| Some(network.unwrap().trunc()));
    let ports = (1..=u16::MAX, 1..=u16::MAX).prop_map(|(a, b)| a.min(b)..=a.max(b));
    let ports = prop_oneof![Just(ALL_PORTS), ports];
    (prop_oneof![Just(None), network], ports).prop_map(|(network, ports)| Entry { network, ports })
}

proptest! {
    #[test]
    fn written_entry_parses_back(entry in entry()) {
        prop_assert_eq!(Entry::parse(&entry.to_string()), Some(entry));
    }

    #[test]
    fn parser_never_panics(text in "[0-9a-f:./*\\[\\]-]{0,24}") {
        let _ = Entry::parse(&text);
    }
}
