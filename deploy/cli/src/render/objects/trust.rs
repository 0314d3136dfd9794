//! The requests of all certificates, as configuration files of OpenSSL.

use std::fmt::Write as _;
use std::net::IpAddr;

use serde_json::{Map, Value, json};

use crate::render::cluster::Tunnel;
use crate::render::target::Target;
use crate::render::tokens::AUDIENCE;

use super::{Object, Part, Place};

/// A certificate to issue.
struct Request {
    /// Secret with the certificate.
    secret: &'static str,
    common_name: &'static str,
    usage: &'static str,
    names: Vec<String>,
    addresses: Vec<String>,
}

pub(super) fn objects(target: &Target<'_>) -> Vec<Object> {
    let files: Map<String, Value> = requests(target)
        .into_iter()
        .map(|request| (format!("{}.cnf", request.secret), json!(request.file())))
        .collect();
    let value = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "tunnel-certificate-requests", "namespace": target.namespace},
        "data": files,
    });
    vec![Object::new(Part::Certificates, Place::Seed, value)]
}

fn requests(target: &Target<'_>) -> Vec<Request> {
    let client = |secret, common_name| Request {
        secret,
        common_name,
        usage: "clientAuth",
        names: Vec::new(),
        addresses: Vec::new(),
    };
    let mut addresses: Vec<String> = target
        .first_service_ip()
        .iter()
        .map(ToString::to_string)
        .collect();
    addresses.push("127.0.0.1".to_owned());
    if !target.cluster.is_tunneling() {
        addresses.extend(target.address_ip.clone());
    }
    let name = &target.external_name;
    let names = match target.external_address() {
        Some(address) => {
            let is_listed = |it: &String| it.parse::<IpAddr>() == Ok(address);
            if !addresses.iter().any(is_listed) {
                addresses.push(address.to_string());
            }
            Vec::new()
        }
        None => vec![name.clone(), format!("konnectivity-server.{name}")],
    };
    let mut requests = vec![
        Request {
            secret: "konnectivityproxy-tls",
            common_name: "konnectivity-proxy",
            usage: "serverAuth",
            names,
            addresses,
        },
        client("konnectivity-kubeconfig", AUDIENCE),
    ];
    if target.cluster.tunnel == Tunnel::Openvpn {
        let service = format!("culvert-front-end.{}.svc", target.namespace);
        requests.extend([
            Request {
                secret: "culvert-front-end",
                common_name: "culvert-front-end",
                usage: "serverAuth",
                names: vec![service.clone(), format!("{service}.cluster.local")],
                addresses: Vec::new(),
            },
            client("culvert-front-end-client", "kube-apiserver"),
            Request {
                usage: "serverAuth",
                ..client("openvpn-server-certificates", "openvpn-server")
            },
            client("openvpn-client-certificates", "user-cluster-client"),
        ]);
    }
    requests
}

impl Request {
    fn file(&self) -> String {
        let Self {
            common_name, usage, ..
        } = self;
        let mut text = format!(
            "[req]\ndistinguished_name = name\nreq_extensions = extensions\nprompt = no\n\
             [name]\nCN = {common_name}\n\
             [extensions]\nkeyUsage = critical, digitalSignature, keyEncipherment\n\
             extendedKeyUsage = {usage}\n"
        );
        let names = self.names.iter().map(|name| format!("DNS:{name}"));
        let addresses = self.addresses.iter().map(|ip| format!("IP:{ip}"));
        let all: Vec<String> = names.chain(addresses).collect();
        if !all.is_empty() {
            let _ = writeln!(text, "subjectAltName = {}", all.join(", "));
        }
        text
    }
}
