//! The running Deployment of kube-apiserver, and the part of a patch that changes its arguments. A patch replaces a list
//! of arguments as a whole, so the patch has all of them.

use anyhow::Context as _;
use serde_json::{Map, Value, json};

use super::input;

/// Name of the Deployment.
const DEPLOYMENT: &str = "apiserver";
/// Name of the container in the Deployment.
pub(super) const CONTAINER: &str = "apiserver";

const PROBES: [&str; 3] = ["livenessProbe", "readinessProbe", "startupProbe"];

/// The container of kube-apiserver.
pub(super) struct Apiserver {
    args: Vec<String>,
    /// Fields of the probes by HTTP.
    probes: Vec<&'static str>,
}

impl Apiserver {
    /// Parses the Deployment of the kube-apiserver in a namespace, in YAML or JSON.
    ///
    /// # Errors
    /// Fails for another object, and without a container `apiserver` that has arguments.
    pub(super) fn parse(text: &str, namespace: &str) -> anyhow::Result<Self> {
        let object: Value = input::read(text)?;
        for (path, expected) in [
            ("/kind", "Deployment"),
            ("/metadata/name", DEPLOYMENT),
            ("/metadata/namespace", namespace),
        ] {
            let found = object.pointer(path).and_then(Value::as_str);
            anyhow::ensure!(
                found == Some(expected),
                "{} is {:?}, expected {expected:?}; save the file with kubectl -n {namespace} get deployment {DEPLOYMENT} \
                 -o yaml",
                path.trim_start_matches('/').replace('/', "."),
                found.unwrap_or_default()
            );
        }
        let containers = object.pointer("/spec/template/spec/containers");
        let mut containers = containers.and_then(Value::as_array).into_iter().flatten();
        let container = containers
            .find(|container| container.pointer("/name").and_then(Value::as_str) == Some(CONTAINER))
            .with_context(|| format!("no container {CONTAINER:?}"))?;
        let args = container.pointer("/args").and_then(Value::as_array);
        let args = args.into_iter().flatten().filter_map(Value::as_str);
        let args: Vec<String> = args.map(str::to_owned).collect();
        anyhow::ensure!(
            !args.is_empty(),
            "the container {CONTAINER:?} has no `args`; flags in `command` cannot be changed by a patch of the arguments"
        );
        let probe = |name: &&str| container.pointer(&format!("/{name}/httpGet")).is_some();
        Ok(Self {
            args,
            probes: PROBES.into_iter().filter(probe).collect(),
        })
    }

    /// Returns the fields of the container with `flags` in place of the flags of the same names, and `port` in the probes.
    pub(super) fn fields(&self, flags: &[String], port: u16) -> Map<String, Value> {
        let mut fields = Map::new();
        fields.insert("args".to_owned(), json!(self.merged(flags)));
        for probe in &self.probes {
            fields.insert((*probe).to_owned(), json!({"httpGet": {"port": port}}));
        }
        fields
    }

    /// Returns the values of a flag, which starts with `--`. Empty values are left out.
    pub(super) fn values(&self, name: &str) -> Vec<&str> {
        let values = self.flags().filter_map(|args| match args {
            [flag, value] if flag == name => Some(value.as_str()),
            [flag] => flag.strip_prefix(name)?.strip_prefix('='),
            _ => None,
        });
        values.filter(|value| !value.is_empty()).collect()
    }

    /// Returns the arguments of each flag. A value may be part of its argument, or the next argument.
    fn flags(&self) -> impl Iterator<Item = &[String]> {
        self.args.chunk_by(|flag, next| {
            flag.starts_with("--") && !flag.contains('=') && !next.starts_with("--")
        })
    }

    /// Returns the arguments, with `flags` in place of all flags of the same names.
    fn merged(&self, flags: &[String]) -> Vec<String> {
        let name = |flag: &str| flag.split('=').next().unwrap_or_default().to_owned();
        let replaced: Vec<String> = flags.iter().map(|flag| name(flag)).collect();
        let is_kept = |args: &&[String]| {
            let flag = args.first();
            flag.is_some_and(|flag| !replaced.contains(&name(flag)))
        };
        let kept = self.flags().filter(is_kept).flatten();
        kept.chain(flags).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const NAMESPACE: &str = "cluster-abc123";
    const RUNNING: &str = "
kind: Deployment
metadata: {name: apiserver, namespace: cluster-abc123}
spec:
  template:
    spec:
      containers:
      - name: openvpn-client
        args: [--secure-port=1]
      - name: apiserver
        args:
        - --etcd-servers
        - https://etcd-0:2379,https://etcd-1:2379
        - --secure-port
        - '31000'
        - --service-account-issuer=https://old:31000
        - --service-account-issuer=https://older:31000
        - --service-cluster-ip-range=10.0.0.0/16
        - --service-cluster-ip-range=fd00::/108
        - --enable-aggregator-routing
        - --profiling=false
        livenessProbe: {httpGet: {path: /livez, port: 31000, scheme: HTTPS}}
        readinessProbe: {exec: {command: [test]}}
";

    fn flags(list: &[&str]) -> Vec<String> {
        list.iter().map(|flag| (*flag).to_owned()).collect()
    }

    #[test]
    fn patch_keeps_all_other_arguments() {
        let apiserver = Apiserver::parse(RUNNING, NAMESPACE).unwrap();
        let new = flags(&[
            "--secure-port=6443",
            "--service-cluster-ip-range=10.1.0.0/16",
            "--egress-selector-config-file=/egress.yaml",
        ]);
        let fields = apiserver.fields(&new, 6443);
        let expected = json!({
            "args": [
                "--etcd-servers",
                "https://etcd-0:2379,https://etcd-1:2379",
                "--service-account-issuer=https://old:31000",
                "--service-account-issuer=https://older:31000",
                "--enable-aggregator-routing",
                "--profiling=false",
                "--secure-port=6443",
                "--service-cluster-ip-range=10.1.0.0/16",
                "--egress-selector-config-file=/egress.yaml",
            ],
            "livenessProbe": {"httpGet": {"port": 6443}},
        });
        assert_eq!(Value::Object(fields), expected);
    }

    #[test]
    fn replaced_switch_keeps_the_next_flag() {
        let text = RUNNING.replace("--enable-aggregator-routing", "--allow-privileged");
        let apiserver = Apiserver::parse(&text, NAMESPACE).unwrap();
        let merged = apiserver.merged(&flags(&["--allow-privileged=true"]));
        assert!(
            merged.contains(&"--profiling=false".to_owned()),
            "{merged:?}"
        );
        assert!(
            !merged.contains(&"--allow-privileged".to_owned()),
            "{merged:?}"
        );
    }

    #[test]
    fn values_of_a_flag_are_found_in_both_notations() {
        let apiserver = Apiserver::parse(RUNNING, NAMESPACE).unwrap();
        assert_eq!(apiserver.values("--secure-port"), ["31000"]);
        let issuers = ["https://old:31000", "https://older:31000"];
        assert_eq!(apiserver.values("--service-account-issuer"), issuers);
        for name in ["--enable-aggregator-routing", "--service", "31000"] {
            assert_eq!(apiserver.values(name), [""; 0]);
        }
    }

    #[test]
    fn other_objects_are_refused() {
        let refusal = |text: &str| {
            let apiserver = Apiserver::parse(text, NAMESPACE);
            apiserver.err().unwrap().to_string()
        };
        for (found, other, expected) in [
            (
                "kind: Deployment",
                "kind: StatefulSet",
                "kind is \"StatefulSet\", expected \"Deployment\"",
            ),
            (
                "name: apiserver,",
                "name: kas,",
                "metadata.name is \"kas\", expected \"apiserver\"",
            ),
            (
                "namespace: cluster-abc123",
                "namespace: cluster-other",
                "metadata.namespace is \"cluster-other\", expected \"cluster-abc123\"",
            ),
            (
                "- name: apiserver",
                "- name: kas",
                "no container \"apiserver\"",
            ),
        ] {
            let why = refusal(&RUNNING.replace(found, other));
            assert!(why.starts_with(expected), "{why}");
        }
        assert!(refusal("").starts_with("kind is \"\""));
        let text = RUNNING.replace("        args:\n", "        command:\n");
        assert!(refusal(&text).contains("has no `args`"));
    }
}
