//! The ways back of a plan's steps.

use super::{Exposed, Step, Tenant};

/// Way back of the step that replaces the nodes.
const NODES: &str = "replace the nodes again after the way back";

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
        let old = self.exposed.clone();
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

    /// Takes the way back of a step. `old` is the cluster file of the operator.
    async fn go_back(&mut self, step: &Step, old: &Exposed) {
        let back = step.back.as_str();
        if back == "nothing to undo" || back == NODES {
            return;
        }
        if let Some((secrets, rest)) = back.split_once("  # then run this step with ") {
            let (_, first) = rest
                .split_once("; its first command is then: ")
                .expect("a command");
            self.must(step, secrets).await;
            self.exposed = old.clone();
            self.write_cluster_file();
            let mut commands = step.commands.clone();
            first.clone_into(&mut commands[0]);
            self.carry_out(&step.title, &commands).await;
            self.write_user();
            self.answers().await;
        } else if back.starts_with("kubectl ") || back.starts_with("culvert ") {
            self.must(step, back).await;
            self.answers().await;
        } else if back.starts_with("apply the part agent of the cluster file of ") {
            let file = self.folder.join("cluster.yaml");
            std::fs::write(file, old.file()).expect("a file");
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
}
