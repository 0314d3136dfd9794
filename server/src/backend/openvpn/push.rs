//! The options pushed to one client: the common options with the changes from the client's file.

use std::time::Duration;

use culvert_openvpn::control::push;
use culvert_openvpn::options::Transport;
use ipnet::Ipv4Net;

use super::ccd::{ClientConfig, PushChange};
use super::settings::Settings;

/// Returns the options for one client, without its address.
pub(super) fn for_client(
    settings: &Settings,
    client: &ClientConfig,
    transport: Transport,
) -> Vec<String> {
    let mut options = settings.server.push.clone();
    for change in &client.push {
        match change {
            PushChange::Add(option) => options.push(option.clone()),
            PushChange::Reset => options.clear(),
            PushChange::Remove(start) => options.retain(|option| !option.starts_with(start)),
        }
    }
    // A client must not route its own networks into the tunnel.
    options.retain(|option| route(option).is_none_or(|net| !client.iroutes.contains(&net)));
    let has = |options: &[String], name: &str| {
        let mut names = options.iter().filter_map(|o| o.split_whitespace().next());
        names.any(|known| known == name)
    };
    // Over TCP, a client detects a dead path only through ping-restart.
    let times = [
        ("ping", settings.ping),
        ("ping-restart", settings.ping_restart),
    ];
    for (name, time) in times {
        if let Some(time) = time.filter(|_| !has(&options, name)) {
            options.push(format!("{name} {}", time.as_secs()));
        }
    }
    if transport == Transport::Tcp && !has(&options, "socket-flags") {
        // OpenVPN clients before 2.8 leave Nagle's algorithm on, which delays every short answer by 40
        // ms.
        options.push("socket-flags TCP_NODELAY".to_owned());
    }
    options
}

/// Returns the ping interval from a client's pushed options; `None` if the client sends no pings.
pub(super) fn ping(options: &[String]) -> Option<Duration> {
    push::ping(options).filter(|ping| !ping.is_zero())
}

/// Returns the network of a pushed `route`.
fn route(option: &str) -> Option<Ipv4Net> {
    let mut words = option.split_whitespace();
    if words.next() != Some("route") {
        return None;
    }
    let address = words.next()?.parse().ok()?;
    match words.next() {
        None | Some("default") => Ipv4Net::new(address, 32).ok(),
        Some(mask) => Ipv4Net::with_netmask(address, mask.parse().ok()?).ok(),
    }
    .map(|network| network.trunc())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use super::super::clients::tests::settings;
    use super::*;

    fn all() -> Settings {
        let mut settings = settings();
        settings.server.push = [
            "route 172.25.0.0 255.255.0.0",
            "route 10.240.16.0 255.255.240.0",
            "route 10.254.0.0 255.255.0.0",
        ]
        .map(str::to_owned)
        .to_vec();
        settings.ping_restart = Some(Duration::from_secs(30));
        settings
    }

    #[test]
    fn routes_to_the_clients_own_networks_are_not_pushed() {
        let text = "iroute 172.25.0.0 255.255.0.0\niroute 10.240.16.0 255.255.240.0\n";
        let user_cluster = ClientConfig::parse(text, "ccd");
        assert_eq!(
            for_client(&all(), &user_cluster, Transport::Tcp),
            [
                "route 10.254.0.0 255.255.0.0",
                "ping 5",
                "ping-restart 30",
                "socket-flags TCP_NODELAY",
            ]
        );
        let internal = for_client(&all(), &ClientConfig::default(), Transport::Udp);
        assert_eq!(internal[..3], all().server.push[..]);
        assert!(!internal.iter().any(|o| o.starts_with("socket-flags")));
    }

    #[test]
    fn times_are_pushed_unless_an_option_sets_them() {
        let mut settings = settings();
        let client = ClientConfig::default();
        (settings.ping, settings.ping_restart) = (None, None);
        let none = for_client(&settings, &client, Transport::Udp);
        assert_eq!(none, Vec::<String>::new());
        let times = [60, 180].map(|seconds| Some(Duration::from_secs(seconds)));
        [settings.ping, settings.ping_restart] = times;
        let both = for_client(&settings, &client, Transport::Udp);
        assert_eq!(both, ["ping 60", "ping-restart 180"]);
        settings.server.push.push("ping 20".to_owned());
        let explicit = for_client(&settings, &client, Transport::Udp);
        assert_eq!(explicit, ["ping 20", "ping-restart 180"]);
    }

    #[test]
    fn client_file_changes_the_pushed_options() {
        let options = |text: &str| {
            let client = ClientConfig::parse(text, "ccd");
            for_client(&all(), &client, Transport::Udp)
        };
        let reset = options("push-reset\npush \"ping 9\"\n");
        assert_eq!(reset[..2], ["ping 9", "ping-restart 30"]);
        let removed = options("push-remove \"route 10.24\"\n");
        assert_eq!(
            removed[..2],
            [
                "route 172.25.0.0 255.255.0.0",
                "route 10.254.0.0 255.255.0.0"
            ]
        );
    }
}
