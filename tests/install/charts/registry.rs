//! Charts as OCI artifacts in a registry on loopback.

use std::time::Duration;

use culvert_tests::Program;
use culvert_tests::charts::{CHARTS, Tools, deploy, run, values_files};
use tempfile::TempDir;

use super::rendered::template;

/// Longest start of the registry.
const PATIENCE: Duration = Duration::from_secs(30);

#[tokio::test]
async fn charts_survive_a_registry() {
    let Some(tools) = Tools::get() else { return };
    let folder = TempDir::new().unwrap();
    let args = ["registry", "serve", "--address", "127.0.0.1:0"];
    let crane = Program::spawn(tools.path("crane"), args, &[]);
    let line = crane.wait_for_log("serving on port ", PATIENCE).await;
    let port = line.rsplit(' ').next().unwrap().trim();
    let charts = format!("oci://127.0.0.1:{port}/charts");
    for (chart, _) in CHARTS {
        let source = deploy("helm").join(chart);
        let [packed, pulled] = ["packed", "pulled"].map(|name| folder.path().join(name));
        let mut package = tools.helm();
        package.args(["package", "--destination"]).arg(&packed);
        run(package.arg(&source)).unwrap();
        let file = format!("{chart}-{}.tgz", env!("CARGO_PKG_VERSION"));
        let mut push = tools.helm();
        push.arg("push").arg(packed.join(&file)).arg(&charts);
        run(push.arg("--plain-http")).unwrap();

        std::fs::create_dir_all(&pulled).unwrap();
        let mut pull = tools.helm();
        pull.args(["pull", &format!("{charts}/{chart}"), "--plain-http"]);
        pull.args(["--version", env!("CARGO_PKG_VERSION"), "--destination"]);
        run(pull.arg(&pulled)).unwrap();
        let [sent, received] =
            [&packed, &pulled].map(|folder| std::fs::read(folder.join(&file)).unwrap());
        assert!(
            sent == received,
            "{chart}: the registry returned other bytes"
        );

        let values = &values_files(chart)[0];
        assert_eq!(
            template(tools, &pulled.join(&file), values),
            template(tools, &source, values),
            "{chart}"
        );
        let listing = std::process::Command::new("tar")
            .arg("-tzf")
            .arg(pulled.join(&file))
            .output()
            .unwrap();
        let listing = String::from_utf8(listing.stdout).unwrap();
        let is_test = |line: &str| line.contains("/ci/") || line.ends_with("_test.yaml");
        assert!(!listing.lines().any(is_test), "{listing}");
        assert!(listing.contains("/templates/tests/"), "{listing}");
    }
    crane.kill();
}
