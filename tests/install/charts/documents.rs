//! Commands and files in the documents: charts render with them.

use std::process::Command;

use culvert_tests::charts::{CHARTS, Tools, deploy, root, run};
use tempfile::TempDir;

use super::rendered::objects;

/// Returns the text of docs/install.md.
fn install_page() -> String {
    std::fs::read_to_string(root().join("docs/install.md")).unwrap()
}

/// Returns the commands in indented blocks that begin with `start`. A backslash continues a line.
fn commands(text: &str, start: &str) -> Vec<String> {
    let joined = text.replace("\\\n", " ");
    let lines = joined.lines().filter(|line| line.starts_with("    "));
    let commands = lines.map(str::trim).filter(|line| line.starts_with(start));
    commands.map(str::to_owned).collect()
}

#[test]
fn charts_render_with_the_commands_of_the_documents() {
    let Some(tools) = Tools::get() else { return };
    let mut pages = vec![install_page()];
    for (chart, _) in CHARTS {
        let page = deploy("helm").join(chart).join("README.md");
        pages.push(std::fs::read_to_string(page).unwrap());
    }
    let all: Vec<String> = pages
        .iter()
        .flat_map(|page| commands(page, "helm install "))
        .collect();
    assert!(all.len() >= 7, "{all:?}");
    for command in all {
        let path = std::env::var("PATH").unwrap();
        let path = format!("{}:{path}", tools.path("").display());
        let mut shell = Command::new("bash");
        shell.args(["-c", &command.replacen("helm install", "helm template", 1)]);
        shell.current_dir(root()).env("PATH", path);
        let text = run(&mut shell).unwrap_or_else(|error| panic!("{command}: {error}"));
        assert!(!objects(&text).is_empty(), "{command}");
    }
}

#[test]
fn kustomization_of_the_page_keeps_stock_objects() {
    let Some(tools) = Tools::get() else { return };
    let page = install_page();
    let mut blocks = page.split("\n```yaml\n").skip(1);
    let block = blocks.find(|block| block.contains("nameSuffix")).unwrap();
    let folder = TempDir::new().unwrap();
    let (text, _) = block.split_once("\n```").unwrap();
    std::fs::write(folder.path().join("kustomization.yaml"), text).unwrap();
    std::fs::copy(
        deploy("manifests/agent.yaml"),
        folder.path().join("agent.yaml"),
    )
    .unwrap();
    let mut kustomize = tools.program("kustomize");
    let text = run(kustomize.arg("build").arg(folder.path())).unwrap();
    let all = objects(&text);
    let kinds: Vec<&str> = all.iter().map(|it| it["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["Deployment", "NetworkPolicy"]);
    for object in &all {
        assert_eq!(object["metadata"]["name"], "konnectivity-agent-culvert");
    }
    let account = &all[0]["spec"]["template"]["spec"]["serviceAccountName"];
    assert_eq!(account, "system-konnectivity-agent");
    assert!(text.contains("--proxy-server-host=konnectivity-server.def456.seed.example.com"));
}
