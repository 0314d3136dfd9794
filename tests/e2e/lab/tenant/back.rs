//! The ways back of a plan's steps.

use serde_json::{Value, json};

use super::{Exposed, NAMESPACE, Step, Tenant};

/// Secrets that a change of the expose strategy replaces.
const SECRETS: [&str; 3] = [
    "apiserver-tls",
    "konnectivityproxy-tls",
    "konnectivity-kubeconfig",
];

/// Way back of the step that replaces the nodes.
const NODES: &str = "replace the nodes again after the way back";

/// The state that an operator keeps for the way back.
struct Old {
    exposed: Exposed,
    secrets: Vec<Value>,
}

impl Tenant {
    /// Carries out the steps of a plan up to the first removal, and goes back step by step. `check` is called after each
    /// step of the plan, and `check_back` after the way back of each step. Afterwards the tunnel works as before.
    pub(crate) async fn there_and_back(
        &mut self,
        from: &str,
        to: &str,
        mut check: impl AsyncFnMut(&Self, &Step),
        mut check_back: impl AsyncFnMut(&Self, &Step),
    ) {
        let old = Old {
            exposed: self.exposed.clone(),
            secrets: self.secrets().await,
        };
        let plan = self.plan(from, to).await;
        let mut taken = Vec::new();
        for step in plan.steps.iter().take_while(|step| !step.is_final()) {
            println!("{from} to {to}: {}", step.title);
            self.take(step).await;
            check(self, step).await;
            taken.push(step);
        }
        let replaces_nodes = plan.steps.iter().any(|step| step.back == NODES);
        for step in taken.into_iter().rev() {
            println!("back from {to} to {from}: {}", step.title);
            self.go_back(step, &old).await;
            // After a change of the address, the tunnel has no agents before the nodes are replaced.
            if !replaces_nodes {
                self.works().await;
            }
            check_back(self, step).await;
        }
        if replaces_nodes {
            let url = self.exposed.url();
            let worker = self.worker.as_mut().expect("a node");
            worker.connect_to(&url, &self.authorities.cluster);
        }
        self.has_no_saved_objects();
        self.works().await;
    }

    async fn go_back(&mut self, step: &Step, old: &Old) {
        let back = step.back.as_str();
        if back == "nothing to undo" || back == NODES {
            return;
        }
        if back.starts_with("kubectl ") || back.starts_with("culvert ") {
            self.must(step, back).await;
        } else if back == "put the old Secrets back" {
            self.put_back(&old.secrets).await;
            self.answers().await;
        } else if let Some(rest) = back.strip_prefix("put the old Secrets back, then run this step")
        {
            let (_, first) = rest
                .split_once("; its first command is then: ")
                .expect("a command");
            self.put_back(&old.secrets).await;
            self.exposed = old.exposed.clone();
            self.write_cluster_file();
            let mut commands = step.commands.clone();
            first.clone_into(&mut commands[0]);
            self.carry_out(&step.title, &commands).await;
            self.write_user();
            self.answers().await;
        } else if back.starts_with("apply the part agent of the cluster file of ") {
            let file = self.folder.join("cluster.yaml");
            std::fs::write(file, old.exposed.file()).expect("a file");
            let apply = step.commands.iter().find(|it| it.contains("--part=agent"));
            self.must(step, apply.expect("a command")).await;
        } else {
            panic!("unknown way back of {:?}: {back}", step.title);
        }
    }

    async fn must(&self, step: &Step, command: &str) {
        let ran = self.shell(command).await;
        ran.unwrap_or_else(|why| panic!("back from {:?}: {why}", step.title));
    }

    /// Returns the Secrets as an operator saves them.
    async fn secrets(&self) -> Vec<Value> {
        let mut found = Vec::new();
        for name in SECRETS {
            // Some tunnels lack some of them.
            let Ok(secret) = self.seed.get(&["secret", "-n", NAMESPACE, name]).await else {
                continue;
            };
            found.push(json!({
                "apiVersion": "v1", "kind": "Secret", "type": secret["type"], "data": secret["data"],
                "metadata": {"name": name, "namespace": NAMESPACE},
            }));
        }
        found
    }

    async fn put_back(&self, secrets: &[Value]) {
        for secret in secrets {
            self.seed.apply(&secret.to_string()).await;
        }
    }
}
