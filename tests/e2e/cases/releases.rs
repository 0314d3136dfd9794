//! Releases of helm in the real API: installation beside stock objects, upgrade, way back, and permissions. No controller
//! runs, so Deployments have no pods.

use culvert_tests::charts::{Tools, deploy, run};

use crate::lab::Lab;

const NAMESPACE: &str = "kubermatic";

/// The stock agents, with the selector of upstream's manifests and of KKP.
const STOCK_AGENTS: &str = "{apiVersion: apps/v1, kind: Deployment,
  metadata: {name: konnectivity-agent, namespace: kube-system},
  spec: {selector: {matchLabels: {app: konnectivity-agent}}, template: {
    metadata: {labels: {app: konnectivity-agent}},
    spec: {containers: [{name: konnectivity-agent, image: 'localhost/proxy-agent:1'}]}}}}
";

/// helm with the identity of an administrator.
struct Helm<'a> {
    tools: &'static Tools,
    lab: &'a Lab,
}

impl<'a> Helm<'a> {
    async fn new(lab: &'a mut Lab) -> Self {
        lab.no_tunnel().await;
        let tools = Tools::get().expect("programs of tests/install/tools");
        let namespace =
            format!("{{apiVersion: v1, kind: Namespace, metadata: {{name: {NAMESPACE}}}}}");
        lab.kubectl.apply(&namespace).await;
        Self { tools, lab }
    }

    /// Runs helm. `chart` is empty for commands without a chart.
    fn run(&self, namespace: &str, words: &str, chart: &str) -> Result<String, String> {
        let mut helm = self.tools.helm();
        helm.args(words.split(' ')).args(["--namespace", namespace]);
        helm.arg("--kubeconfig").arg(&self.lab.kubectl.kubeconfig);
        if !chart.is_empty() {
            helm.arg(deploy("helm").join(chart));
            helm.args(["--set", "image.registry=registry.example.com"]);
        }
        run(&mut helm)
    }

    fn must(&self, namespace: &str, words: &str, chart: &str) -> String {
        let result = self.run(namespace, words, chart);
        result.unwrap_or_else(|error| panic!("helm {words}: {error}"))
    }

    /// Returns one field of an object.
    async fn field(&self, object: &str, namespace: &str, path: &str) -> Result<String, String> {
        let output = format!("-o=jsonpath={path}");
        let args = ["get", object, "-n", namespace, &output];
        self.lab.kubectl.run(&args).await
    }
}

/// Agents of the chart are installed beside stock agents, which stay. The release is changed, rolled back and removed.
pub(super) async fn agents_are_installed_beside_stock_agents(lab: &mut Lab) {
    let helm = Helm::new(lab).await;
    helm.lab.kubectl.apply(STOCK_AGENTS).await;
    let place = "kube-system";
    let server =
        "--set server.host=konnectivity-server.abc123.seed.example.com --set server.port=6443";
    // Neither helm nor the API replaces the stock Deployment by one with another selector.
    let same_name = format!("install konnectivity-agent {server}");
    let error = helm.run(place, &same_name, "culvert-agent").unwrap_err();
    assert!(
        error.contains("cannot be imported into the current release"),
        "{error}"
    );
    let owned = format!("{same_name} --take-ownership --force-conflicts");
    let error = helm.run(place, &owned, "culvert-agent").unwrap_err();
    assert!(error.contains("field is immutable"), "{error}");
    // The failed release owns the account of the stock agents, and its removal deletes the account.
    helm.must(place, "uninstall konnectivity-agent", "");
    let account = "serviceaccount/system-konnectivity-agent";
    let name = "{.metadata.name}";
    let deleted = helm.field(account, place, name).await;
    assert!(deleted.unwrap_err().contains("not found"));
    let stock = helm
        .field("deployment/konnectivity-agent", place, name)
        .await;
    assert_eq!(stock.unwrap(), "konnectivity-agent");
    let objects = include_str!("../objects/konnectivity.yaml");
    helm.lab.kubectl.apply(objects).await;

    let shared = "--set serviceAccount.create=false --set rbac.server.tokenReview=false";
    helm.must(
        place,
        &format!("install culvert-agent {server} {shared}"),
        "culvert-agent",
    );
    let replicas = "{.spec.replicas}";
    let count = async || {
        helm.field("deployment/culvert-agent", place, replicas)
            .await
    };
    assert_eq!(count().await.unwrap(), "2");
    let upgrade = format!("upgrade culvert-agent {server} {shared} --set replicas=3");
    helm.must(place, &upgrade, "culvert-agent");
    assert_eq!(count().await.unwrap(), "3");
    helm.must(place, "rollback culvert-agent 1", "");
    assert_eq!(count().await.unwrap(), "2");
    helm.must(place, "uninstall culvert-agent", "");
    assert!(count().await.unwrap_err().contains("not found"));
    let image = "{.spec.template.spec.containers[0].image}";
    let stock = helm
        .field("deployment/konnectivity-agent", place, image)
        .await;
    assert_eq!(stock.unwrap(), "localhost/proxy-agent:1");
    helm.field(account, place, name).await.unwrap();
    let delete = ["delete", "deployment", "konnectivity-agent", "-n", place];
    helm.lab.kubectl.must(&delete).await;
}

/// An upgrade and a rollback keep the ports that the updater has added to the Service of the front door.
pub(super) async fn upgrades_keep_the_ports_of_the_front_door(lab: &mut Lab) {
    let helm = Helm::new(lab).await;
    helm.must(NAMESPACE, "install nodeport-proxy-envoy", "culvert-door");
    let add = r#"[{"op": "add", "path": "/spec/ports/-", "value": {"name": "sni-listener", "port": 6443}}]"#;
    let patch = [
        "patch",
        "service",
        "nodeport-proxy",
        "-n",
        NAMESPACE,
        "--type=json",
        "-p",
        add,
    ];
    helm.lab.kubectl.must(&patch).await;
    for words in [
        "upgrade nodeport-proxy-envoy --set replicas=2",
        "rollback nodeport-proxy-envoy 1",
    ] {
        let chart = if words.starts_with("upgrade") {
            "culvert-door"
        } else {
            ""
        };
        helm.must(NAMESPACE, words, chart);
        let ports = helm
            .field("service/nodeport-proxy", NAMESPACE, "{.spec.ports[*].name}")
            .await;
        assert_eq!(ports.unwrap(), "healthz sni-listener", "{words}");
    }
    may(&helm).await;
    helm.must(NAMESPACE, "uninstall nodeport-proxy-envoy", "");
}

/// Checks the permissions of the front door: requests that it makes, and requests that it must not make.
async fn may(helm: &Helm<'_>) {
    let account = format!("--as=system:serviceaccount:{NAMESPACE}:nodeport-proxy");
    for (words, expected) in [
        ("list services --all-namespaces", true),
        (
            "watch endpointslices.discovery.k8s.io --all-namespaces",
            true,
        ),
        ("update services/nodeport-proxy -n kubermatic", true),
        ("create leases.coordination.k8s.io -n kubermatic", true),
        (
            "update leases.coordination.k8s.io/nodeport-proxy-updater -n kubermatic",
            true,
        ),
        ("update services/other -n kubermatic", false),
        (
            "update leases.coordination.k8s.io/other -n kubermatic",
            false,
        ),
        ("update services/nodeport-proxy -n kube-system", false),
        ("get secrets --all-namespaces", false),
        ("list pods --all-namespaces", false),
    ] {
        let mut args = vec!["auth", "can-i", &account];
        args.extend(words.split(' '));
        let answer = helm.lab.kubectl.run(&args).await;
        assert_eq!(answer.is_ok(), expected, "{words}: {answer:?}");
    }
}
