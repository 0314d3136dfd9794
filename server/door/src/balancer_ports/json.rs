//! The ports as a Service has them (`spec.ports`). What this program does not know of a port that
//! stays is kept, such as `appProtocol`.

use serde_json::{Map, Value, json};

use super::BalancerPort;

/// The ports of a Service. Those that do not speak TCP are none of the balancer's: left out, they
/// are replaced.
pub fn read_ports(ports: &[Value]) -> Vec<BalancerPort> {
    let tcp = ports.iter().filter(|port| is_tcp(port));
    tcp.map(|port| BalancerPort {
        name: name(port).to_owned(),
        port: number(port, "port"),
        target_port: number(port, "targetPort"),
        node_port: number(port, "nodePort"),
    })
    .collect()
}

/// The ports to write so that the Service has the `wanted` ones, which are sorted by name; `None` if
/// it has them already, in any order.
pub fn changed_ports(ports: &[Value], wanted: &[BalancerPort]) -> Option<Vec<Value>> {
    let mut present = ports.to_vec();
    present.sort_by(|a, b| name(a).cmp(name(b)));
    let written = |wanted: &BalancerPort| {
        let known = |port: &&Value| name(port) == wanted.name && is_tcp(port);
        let known = present.iter().find(known).and_then(Value::as_object);
        let mut port = known.cloned().unwrap_or_else(Map::new);
        port.insert("name".into(), json!(wanted.name));
        port.insert("protocol".into(), json!("TCP"));
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

fn is_tcp(port: &Value) -> bool {
    let protocol = port.get("protocol").and_then(Value::as_str);
    // The API's default.
    protocol.is_none_or(|protocol| protocol == "TCP")
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
    fn what_else_a_port_has_is_kept_and_what_is_wrong_is_not() {
        let present = array(json!([
            {"name": "gone", "protocol": "TCP", "port": 9, "targetPort": 9},
            {"name": "b", "protocol": "TCP", "port": 3, "targetPort": "web", "nodePort": 30002, "appProtocol": "https"},
            {"name": "a", "protocol": "UDP", "port": 1, "targetPort": 1, "nodePort": 30001},
        ]));
        // A node port of UDP may be another's of TCP.
        assert_eq!(read_ports(&present).len(), 2);
        let wanted = [port("a", 1, 0), port("b", 2, 30002)];
        let changed = changed_ports(&present, &wanted).unwrap();
        let expected = array(json!([
            {"name": "a", "protocol": "TCP", "port": 1, "targetPort": 1},
            {"name": "b", "protocol": "TCP", "port": 2, "targetPort": 2, "nodePort": 30002, "appProtocol": "https"},
        ]));
        assert_eq!(changed, expected);
        assert_eq!(changed_ports(&changed, &wanted), None);
    }
}
