//! Services, EndpointSlices, Nodes and servers' Leases in the form that a cluster creates.

use serde_json::{Value, json};

/// Builds a Service, initially of type ClusterIP.
#[derive(Debug, Clone)]
pub struct ServiceBuilder(Value);

/// Builds an EndpointSlice, initially for IPv4 and without endpoints.
#[derive(Debug, Clone)]
pub struct SliceBuilder(Value);

/// Starts a Service without ports. Its selector is the label `app` with the Service's own name.
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

/// Starts the first slice of a Service, named `<service>-slice`.
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

/// Returns a Node with these addresses. Each address is preceded by its type, for example `InternalIP`.
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

/// Returns the Lease of a server in `kube-system`, with upstream's default label. `renewed` is an RFC 3339 time with
/// microseconds, by the clock of the server.
pub fn server_lease(name: &str, renewed: &str) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "namespace": "kube-system",
            "name": name,
            "labels": {"k8s-app": "konnectivity-server"},
        },
        "spec": {
            "holderIdentity": name,
            "leaseDurationSeconds": 30,
            "renewTime": renewed,
        },
    })
}

// === impl ServiceBuilder ===

impl ServiceBuilder {
    /// Adds a TCP port with an equal target port. In a Service with a single port, `name` may be empty.
    #[must_use]
    pub fn port(mut self, name: &str, port: u16) -> Self {
        let mut object = json!({"protocol": "TCP", "port": port, "targetPort": port});
        if !name.is_empty() {
            object["name"] = json!(name);
        }
        push(&mut self.0["spec"]["ports"], object);
        self
    }

    /// Adds a TCP port that is also open on every node. A ClusterIP Service becomes a NodePort Service.
    #[must_use]
    pub fn node_port(mut self, name: &str, port: u16, node_port: u16) -> Self {
        self = self.port(name, port);
        self.last_port()["nodePort"] = json!(node_port);
        if self.0["spec"]["type"] == "ClusterIP" {
            self = self.of_type("NodePort");
        }
        self
    }

    /// Sets the protocol of the last port: `TCP`, `UDP` or `SCTP`.
    ///
    /// # Panics
    /// If the Service has no ports.
    #[must_use]
    pub fn protocol(mut self, protocol: &str) -> Self {
        self.last_port()["protocol"] = json!(protocol);
        self
    }

    /// Sets the type: `ClusterIP`, `NodePort`, `LoadBalancer` or `ExternalName`.
    #[must_use]
    pub fn of_type(mut self, service_type: &str) -> Self {
        let spec = &mut self.0["spec"];
        spec["type"] = json!(service_type);
        if matches!(service_type, "NodePort" | "LoadBalancer") {
            spec["externalTrafficPolicy"] = json!("Cluster");
        }
        self
    }

    /// Sets the address in the cluster; the text `None` makes the Service headless.
    #[must_use]
    pub fn cluster_ip(mut self, address: &str) -> Self {
        self.0["spec"]["clusterIP"] = json!(address);
        self.0["spec"]["clusterIPs"] = json!([address]);
        self
    }

    /// Adds an annotation.
    #[must_use]
    pub fn annotation(mut self, name: &str, value: &str) -> Self {
        self.0["metadata"]["annotations"][name] = json!(value);
        self
    }

    /// Adds a label.
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
    /// Changes the name: every further slice of a Service needs a different name.
    #[must_use]
    pub fn name(mut self, name: &str) -> Self {
        self.0["metadata"]["name"] = json!(name);
        self
    }

    /// Adds a TCP port to all endpoints. `name` is the name of the Service's port.
    #[must_use]
    pub fn port(mut self, name: &str, port: u16) -> Self {
        let object = json!({"name": name, "protocol": "TCP", "port": port});
        push(&mut self.0["ports"], object);
        self
    }

    /// Adds an endpoint that accepts connections.
    #[must_use]
    pub fn ready(self, address: &str) -> Self {
        let conditions = json!({"ready": true, "serving": true, "terminating": false});
        self.endpoint(address, conditions)
    }

    /// Adds an endpoint that does not accept connections.
    #[must_use]
    pub fn not_ready(self, address: &str) -> Self {
        let conditions = json!({"ready": false, "serving": false, "terminating": false});
        self.endpoint(address, conditions)
    }

    /// Adds an endpoint that still accepts connections but terminates soon, and is therefore not ready.
    #[must_use]
    pub fn terminating(self, address: &str) -> Self {
        let conditions = json!({"ready": false, "serving": true, "terminating": true});
        self.endpoint(address, conditions)
    }

    /// Adds an endpoint with these conditions; without conditions, an endpoint counts as ready. An IPv6
    /// address makes the whole slice an IPv6 slice.
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
