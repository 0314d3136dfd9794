//! The ports in the JSON form of a Service (`spec.ports`). A remaining port keeps its unknown fields, such as
//! `appProtocol`.

use serde_json::{Map, Value, json};

use super::BalancerPort;

const TCP: &str = "TCP";
const UDP: &str = "UDP";

/// Parses the TCP and UDP ports of a Service. Ports of other protocols are left out, so the next write removes them.
pub(crate) fn read_ports(ports: &[Value]) -> Vec<BalancerPort> {
    let read = |port: &Value| {
        let is_udp = match protocol(port) {
            TCP => false,
            UDP => true,
            _ => return None,
        };
        Some(BalancerPort {
            name: name(port).to_owned(),
            is_udp,
            port: number(port, "port"),
            target_port: number(port, "targetPort"),
            node_port: number(port, "nodePort"),
        })
    };
    ports.iter().filter_map(read).collect()
}

/// Returns the ports to write so that the Service has exactly the `wanted` ports (sorted by name). `None` if
/// the Service already has these ports, in any order.
pub(crate) fn changed_ports(ports: &[Value], wanted: &[BalancerPort]) -> Option<Vec<Value>> {
    let mut present = ports.to_vec();
    present.sort_by(|a, b| name(a).cmp(name(b)));
    let written = |wanted: &BalancerPort| {
        let is = if wanted.is_udp { UDP } else { TCP };
        let known = |port: &&Value| name(port) == wanted.name && protocol(port) == is;
        let known = present.iter().find(known).and_then(Value::as_object);
        let mut port = known.cloned().unwrap_or_else(Map::new);
        port.insert("name".into(), json!(wanted.name));
        port.insert("protocol".into(), json!(is));
        port.insert("port".into(), json!(wanted.port));
        port.insert("targetPort".into(), json!(wanted.target_port));
        if wanted.node_port != 0 {
            port.insert("nodePort".into(), json!(wanted.node_port));
        }
        Value::Object(port)
    };
    let written: Vec<Value> = wanted.iter().map(written).collect();
    (written != present).then_some(written)
}

fn name(port: &Value) -> &str {
    let name = port.get("name").and_then(Value::as_str);
    name.unwrap_or_default()
}

fn protocol(port: &Value) -> &str {
    let protocol = port.get("protocol").and_then(Value::as_str);
    // The API's default.
    protocol.unwrap_or(TCP)
}

fn number(port: &Value, field: &str) -> u16 {
    let number = port.get(field).and_then(Value::as_u64);
    number
        .and_then(|number| number.try_into().ok())
        .unwrap_or(0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn port(name: &str, port: u16, node_port: u16) -> BalancerPort {
        BalancerPort {
            name: name.to_owned(),
            is_udp: false,
            port,
            target_port: port,
            node_port,
        }
    }

    fn array(value: Value) -> Vec<Value> {
        value.as_array().unwrap().clone()
    }

    #[test]
    fn equal_ports_in_any_order_are_not_written() {
        let present = array(json!([
            {"name": "b", "protocol": "TCP", "port": 2, "targetPort": 2, "nodePort": 30002},
            {"name": "a", "protocol": "TCP", "port": 1, "targetPort": 1},
        ]));
        let known = read_ports(&present);
        assert_eq!(known, [port("b", 2, 30002), port("a", 1, 0)]);
        assert_eq!(
            changed_ports(&present, &[port("a", 1, 0), port("b", 2, 30002)]),
            None
        );
        assert_eq!(changed_ports(&[], &[]), None);
    }

    #[test]
    fn unknown_fields_are_kept_and_wrong_values_replaced() {
        let present = array(json!([
            {"name": "gone", "protocol": "TCP", "port": 9, "targetPort": 9},
            {"name": "b", "protocol": "TCP", "port": 3, "targetPort": "web", "nodePort": 30002, "appProtocol": "https"},
            {"name": "a", "protocol": "UDP", "port": 1, "targetPort": 1, "nodePort": 30001},
        ]));
        // The node port of the UDP port is not kept: another Service may have the same number for TCP.
        let known = read_ports(&present);
        assert_eq!(known.iter().filter(|port| port.is_udp).count(), 1);
        let wanted = [port("a", 1, 0), port("b", 2, 30002)];
        let changed = changed_ports(&present, &wanted).unwrap();
        let expected = array(json!([
            {"name": "a", "protocol": "TCP", "port": 1, "targetPort": 1},
            {"name": "b", "protocol": "TCP", "port": 2, "targetPort": 2, "nodePort": 30002, "appProtocol": "https"},
        ]));
        assert_eq!(changed, expected);
        assert_eq!(changed_ports(&changed, &wanted), None);
    }

    #[test]
    fn tcp_and_udp_ports_may_have_the_same_number() {
        let udp = BalancerPort {
            is_udp: true,
            ..port("sni-quic-listener", 6443, 0)
        };
        let wanted = [port("sni-listener", 6443, 30001), udp];
        let present = changed_ports(&[], &wanted).unwrap();
        let protocols: Vec<&str> = present.iter().map(protocol).collect();
        assert_eq!(protocols, [TCP, UDP]);
        assert_eq!(read_ports(&present), wanted);
        assert_eq!(changed_ports(&present, &wanted), None);
    }
}
