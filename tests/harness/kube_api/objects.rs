//! Services, EndpointSlices and Nodes as a cluster makes them.

use serde_json::{Value, json};

/// Makes a Service, of type ClusterIP at first.
#[derive(Debug, Clone)]
pub struct ServiceBuilder(Value);

/// Makes an EndpointSlice, of IPv4 and without endpoints at first.
#[derive(Debug, Clone)]
pub struct SliceBuilder(Value);

/// A Service without ports, which selects pods by the label `app` with its own name.
pub fn service(namespace: &str, name: &str) -> ServiceBuilder {
    ServiceBuilder(json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "10.96.0.10",
            "clusterIPs": ["10.96.0.10"],
            "ipFamilies": ["IPv4"],
            "ipFamilyPolicy": "SingleStack",
            "internalTrafficPolicy": "Cluster",
            "sessionAffinity": "None",
            "selector": {"app": name},
            "ports": [],
        },
        "status": {"loadBalancer": {}},
    }))
}

/// The first slice of a Service, `<service>-slice`.
pub fn slice(namespace: &str, service: &str) -> SliceBuilder {
    SliceBuilder(json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "namespace": namespace,
            "name": format!("{service}-slice"),
            "labels": {
                "kubernetes.io/service-name": service,
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
            },
        },
        "addressType": "IPv4",
        "ports": [],
        "endpoints": [],
    }))
}

/// A Node with addresses, each with its type, such as `InternalIP`.
pub fn node(name: &str, addresses: &[(&str, &str)]) -> Value {
    let address = |(kind, address): &(&str, &str)| json!({"type": kind, "address": address});
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name},
        "spec": {},
        "status": {
            "addresses": addresses.iter().map(address).collect::<Vec<Value>>(),
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
        },
    })
}

// === impl ServiceBuilder ===

impl ServiceBuilder {
    /// A TCP port, with the same number at the pods. A Service with one port may leave its name empty.
    #[must_use]
    pub fn port(mut self, name: &str, port: u16) -> Self {
        let mut object = json!({"protocol": "TCP", "port": port, "targetPort": port});
        if !name.is_empty() {
            object["name"] = json!(name);
        }
        push(&mut self.0["spec"]["ports"], object);
        self
    }

    /// The same on a port of every node too. A ClusterIP Service becomes one of type NodePort.
    #[must_use]
    pub fn node_port(mut self, name: &str, port: u16, node_port: u16) -> Self {
        self = self.port(name, port);
        self.last_port()["nodePort"] = json!(node_port);
        if self.0["spec"]["type"] == "ClusterIP" {
            self = self.of_type("NodePort");
        }
        self
    }

    /// The protocol of the port added last: `TCP`, `UDP` or `SCTP`.
    ///
    /// # Panics
    /// When there is no port.
    #[must_use]
    pub fn protocol(mut self, protocol: &str) -> Self {
        self.last_port()["protocol"] = json!(protocol);
        self
    }

    /// The type: `ClusterIP`, `NodePort`, `LoadBalancer` or `ExternalName`.
    #[must_use]
    pub fn of_type(mut self, service_type: &str) -> Self {
        let spec = &mut self.0["spec"];
        spec["type"] = json!(service_type);
        if matches!(service_type, "NodePort" | "LoadBalancer") {
            spec["externalTrafficPolicy"] = json!("Cluster");
        }
        self
    }

    /// The address in the cluster; `None` for a headless Service.
    #[must_use]
    pub fn cluster_ip(mut self, address: &str) -> Self {
        self.0["spec"]["clusterIP"] = json!(address);
        self.0["spec"]["clusterIPs"] = json!([address]);
        self
    }

    /// An annotation.
    #[must_use]
    pub fn annotation(mut self, name: &str, value: &str) -> Self {
        self.0["metadata"]["annotations"][name] = json!(value);
        self
    }

    /// A label.
    #[must_use]
    pub fn label(mut self, name: &str, value: &str) -> Self {
        self.0["metadata"]["labels"][name] = json!(value);
        self
    }

    fn last_port(&mut self) -> &mut Value {
        let ports = self.0["spec"]["ports"].as_array_mut();
        let last = ports.and_then(|ports| ports.last_mut());
        last.expect("a Service with a port")
    }
}

impl From<ServiceBuilder> for Value {
    fn from(builder: ServiceBuilder) -> Self {
        builder.0
    }
}

// === impl SliceBuilder ===

impl SliceBuilder {
    /// Another name, as a Service with several slices needs.
    #[must_use]
    pub fn name(mut self, name: &str) -> Self {
        self.0["metadata"]["name"] = json!(name);
        self
    }

    /// A TCP port of all the endpoints, with the name of the Service's port.
    #[must_use]
    pub fn port(mut self, name: &str, port: u16) -> Self {
        let object = json!({"name": name, "protocol": "TCP", "port": port});
        push(&mut self.0["ports"], object);
        self
    }

    /// An endpoint that takes connections.
    #[must_use]
    pub fn ready(self, address: &str) -> Self {
        let conditions = json!({"ready": true, "serving": true, "terminating": false});
        self.endpoint(address, conditions)
    }

    /// An endpoint that does not take connections.
    #[must_use]
    pub fn not_ready(self, address: &str) -> Self {
        let conditions = json!({"ready": false, "serving": false, "terminating": false});
        self.endpoint(address, conditions)
    }

    /// An endpoint that still takes connections but ends soon, so that it is not ready.
    #[must_use]
    pub fn terminating(self, address: &str) -> Self {
        let conditions = json!({"ready": false, "serving": true, "terminating": true});
        self.endpoint(address, conditions)
    }

    /// An endpoint with these conditions; one that has none counts as ready. An IPv6 address makes
    /// the slice one of IPv6.
    #[must_use]
    pub fn endpoint(mut self, address: &str, conditions: Value) -> Self {
        if address.contains(':') {
            self.0["addressType"] = json!("IPv6");
        }
        let endpoint = json!({"addresses": [address], "conditions": conditions});
        push(&mut self.0["endpoints"], endpoint);
        self
    }
}

impl From<SliceBuilder> for Value {
    fn from(builder: SliceBuilder) -> Self {
        builder.0
    }
}

fn push(array: &mut Value, item: Value) {
    array.as_array_mut().expect("an array").push(item);
}
