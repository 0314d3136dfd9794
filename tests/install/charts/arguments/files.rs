//! The files of a container: the programs check at start that their files exist.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use super::texts;

/// Configuration of an OpenVPN client, without directives that have no effect.
const OPENVPN_CLIENT: &str = "client
proto tcp
remote openvpn.seed.example.com 31194
ca 'ROOT/etc/openvpn/certs/ca.crt'
cert 'ROOT/etc/openvpn/certs/client.crt'
key 'ROOT/etc/openvpn/certs/client.key'
remote-cert-tls server
";

/// The volumes that a container mounts, as folders below a temporary folder.
pub(super) struct Files {
    root: TempDir,
    /// Names of the files by mount path; `None` if the pod does not list them.
    mounts: BTreeMap<String, Option<Vec<String>>>,
}

impl Files {
    /// Creates the folders of a container. `objects` has the ConfigMaps.
    ///
    /// # Panics
    /// If a mount has no volume.
    pub(super) fn mounted(pod: &Value, container: &Value, objects: &[Value]) -> Self {
        let root = TempDir::new().unwrap();
        let volumes = pod["volumes"].as_array().into_iter().flatten();
        let volumes: Vec<&Value> = volumes.collect();
        let mut mounts = BTreeMap::new();
        for mount in container["volumeMounts"].as_array().into_iter().flatten() {
            let volume = volumes.iter().find(|it| it["name"] == mount["name"]);
            let volume = volume.unwrap_or_else(|| panic!("no volume for {mount}"));
            let path = mount["mountPath"].as_str().unwrap().trim_end_matches('/');
            std::fs::create_dir_all(root.path().join(&path[1..])).unwrap();
            mounts.insert(path.to_owned(), names(volume, objects));
        }
        Self { root, mounts }
    }

    /// Returns the arguments of a container, with all paths below the temporary folder. Creates the files that the
    /// arguments name.
    ///
    /// # Panics
    /// If no volume has a file.
    pub(super) fn arguments(&self, container: &Value) -> Vec<String> {
        let args = texts(&container["args"]).into_iter();
        args.map(|arg| match arg.split_once("=/") {
            Some((flag, path)) => {
                let path = self.create(flag, &format!("/{path}"));
                format!("{flag}={}", path.display())
            }
            None => arg,
        })
        .collect()
    }

    fn create(&self, flag: &str, path: &str) -> PathBuf {
        let real = self.root.path().join(&path[1..]);
        if self.mounts.contains_key(path) {
            return real;
        }
        let (folder, name) = path.rsplit_once('/').unwrap();
        let listed = self.mounts.get(folder);
        let listed = listed.unwrap_or_else(|| panic!("{flag}: no volume at {folder}"));
        if let Some(listed) = listed {
            assert!(
                listed.iter().any(|it| it == name),
                "{flag}: {folder} has only {listed:?}"
            );
        }
        // The program creates these files.
        if !["--admin-uds", "--tunnel-state-file", "--uds-name"].contains(&flag) {
            self.write(flag, &real);
        }
        real
    }

    fn write(&self, flag: &str, file: &Path) {
        let root = self.root.path();
        let text = match flag {
            "--openvpn-config" => {
                for name in ["ca.crt", "client.crt", "client.key"] {
                    std::fs::write(root.join("etc/openvpn/certs").join(name), "").unwrap();
                }
                OPENVPN_CLIENT.replace("ROOT", root.to_str().unwrap())
            }
            "--tunnel-mode-file" => "prefer-konnectivity".to_owned(),
            _ => String::new(),
        };
        std::fs::write(file, text).unwrap();
    }
}

/// Returns the names of the files of a volume, if the pod or a ConfigMap lists them.
fn names(volume: &Value, objects: &[Value]) -> Option<Vec<String>> {
    if let Some(projected) = volume.get("projected") {
        let sources = projected["sources"].as_array().unwrap().iter();
        let listed: Option<Vec<Vec<String>>> = sources.map(|it| source(it, objects)).collect();
        return listed.map(|all| all.concat());
    }
    source(volume, objects)
}

/// Returns the names of the files of one source.
fn source(source: &Value, objects: &[Value]) -> Option<Vec<String>> {
    if let Some(token) = source.get("serviceAccountToken") {
        return Some(vec![token["path"].as_str().unwrap().to_owned()]);
    }
    let given = source.get("secret").or_else(|| source.get("configMap"))?;
    if let Some(items) = given["items"].as_array() {
        let paths = items.iter().map(|item| item["path"].as_str().unwrap());
        return Some(paths.map(str::to_owned).collect());
    }
    let config = source.get("configMap")?;
    let is_config =
        |it: &&Value| it["kind"] == "ConfigMap" && it["metadata"]["name"] == config["name"];
    let data = objects.iter().find(is_config)?["data"].as_object()?;
    Some(data.keys().cloned().collect())
}
