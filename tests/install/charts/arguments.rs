//! The arguments of every rendered container, read by the parser of the real program: unknown flags, bad values, flags
//! without effect and files that no volume has are errors. With `compat`, the stock program must accept the arguments
//! as well.

mod files;

use std::process::Command;

use culvert_tests::charts::{Tools, deploy, run};
use culvert_tests::interop::Interop;
use serde_json::Value;

use self::files::Files;
use super::rendered;

/// Returns the texts of a list.
pub(super) fn texts(list: &Value) -> Vec<String> {
    let list = list.as_array().unwrap().iter();
    list.map(|it| it.as_str().unwrap().to_owned()).collect()
}

/// Returns the pods with their containers of the programs, without the pod of `helm test`.
fn containers(objects: &[Value]) -> Vec<(&Value, &Value)> {
    let objects = objects.iter().filter(|object| object["kind"] != "Pod");
    let pods = objects.filter_map(rendered::pod);
    pods.flat_map(|pod| {
        let containers = pod["containers"].as_array().unwrap().iter();
        containers.map(move |container| (pod, container))
    })
    .collect()
}

/// Returns the warnings of a program about its arguments.
fn warnings(chart: &str, args: &[String]) -> Result<Vec<String>, String> {
    let line = std::iter::once("program".to_owned()).chain(args.iter().cloned());
    let line: Vec<String> = line.collect();
    match chart {
        "culvert-agent" => culvert_agent::config::Config::from_args(line)
            .map(|config| config.warnings)
            .map_err(|exit| format!("{exit:?}")),
        "culvert-server" => culvert_server::config::Config::from_args(line)
            .map(|config| config.warnings)
            .map_err(|exit| format!("{exit:?}")),
        "culvert-door" => culvert_door::config::Config::from_args(line)
            .map(|config| config.warnings)
            .map_err(|exit| format!("{exit:?}")),
        "culvert-node-tunnel" => culvert_node_tunnel::config::Config::from_args(line)
            .map(|config| config.warnings)
            .map_err(|exit| format!("{exit:?}")),
        _ => panic!("no program for {chart}"),
    }
}

#[test]
fn programs_accept_their_arguments_without_a_warning() {
    let Some(tools) = Tools::get() else { return };
    let mut count = 0;
    for render in rendered(tools) {
        for (pod, container) in containers(&render.objects) {
            let files = Files::mounted(pod, container, &render.objects);
            let args = files.arguments(container);
            let found = warnings(render.chart, &args);
            assert_eq!(found, Ok(Vec::new()), "{}: {args:#?}", render.name);
            count += 1;
        }
    }
    assert!(count > 20, "{count} containers");
}

#[test]
fn server_beside_kube_apiserver_accepts_its_arguments_without_a_warning() {
    let Some(tools) = Tools::get() else { return };
    let mut kustomize = tools.program("kustomize");
    let text = run(kustomize.arg("build").arg(deploy("kustomize/example"))).unwrap();
    let objects = rendered::objects(&text);
    let is_server = |(_, it): &(&Value, &Value)| it["name"] == "konnectivity-server";
    let (pod, container) = containers(&objects).into_iter().find(is_server).unwrap();
    let files = Files::mounted(pod, container, &objects);
    let found = warnings("culvert-server", &files.arguments(container));
    assert_eq!(found, Ok(Vec::new()));
}

#[test]
fn wrong_arguments_are_found() {
    let found = warnings("culvert-agent", &["--no-such-flag=1".to_owned()]);
    assert!(found.unwrap_err().contains("no-such-flag"));
}

/// Returns the tested release of the stock programs that is next to those of a version of KKP: v0.31.0 in 2.28 and
/// 2.29, v0.34.0 in 2.30, v0.35.0 in 2.31.
fn release(kkp: &str) -> &'static str {
    match kkp {
        "2.28" | "2.29" => "v0.31.4",
        _ => "v0.34.0",
    }
}

#[test]
fn stock_programs_accept_the_arguments_with_compat() {
    let Some(tools) = Tools::get() else { return };
    let mut count = 0;
    for render in rendered(tools) {
        let Some((_, version)) = render.name.split_once(" with kkp-") else {
            continue;
        };
        let Some(stock) = (render.chart != "culvert-door")
            .then(|| Interop::release(release(version)))
            .flatten()
        else {
            continue;
        };
        let program = match render.chart {
            "culvert-agent" => &stock.proxy_agent,
            "culvert-server" => &stock.proxy_server,
            _ => continue,
        };
        for (_, container) in containers(&render.objects) {
            let args = texts(&container["args"]);
            // Flags are read before the request for help is served.
            let result = run(Command::new(program).args(&args).arg("--help"));
            result.unwrap_or_else(|error| panic!("{}: {error}", render.name));
            count += 1;
        }
        let refused = run(Command::new(program).args(["--drain-timeout=25s", "--help"]));
        assert!(refused.is_err(), "{} accepts every flag", program.display());
    }
    // Without Go, no tool would have been built either.
    assert_eq!(count, 9);
}
