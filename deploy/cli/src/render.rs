//! The command `culvert render`: from a cluster file to the objects of one user cluster.
//!
//! | module | contents |
//! |---|---|
//! | `input` | the two formats of the cluster file |
//! | `spec`, `facts` | KKP's fields, and values that KKP's specification does not have |
//! | `kkp` | differences between versions of KKP |
//! | `cluster` | the cluster with KKP's defaults |
//! | `rules` | KKP's rules for new and changed clusters, and further warnings |
//! | `finding` | errors and warnings with path, value and reason |
//! | `reference` | the grammar of references of images |
//! | `target` | the names, addresses and images of one cluster |
//! | `apiserver` | the running Deployment of kube-apiserver |
//! | `tokens` | issuers and audiences of service account tokens |
//! | `arguments`, `objects` | command lines, and the objects around them |
//! | `output` | YAML on the standard output, or in files |
//! | `plan` | the steps from one tunnel or expose strategy to another |

mod apiserver;
mod arguments;
mod cluster;
mod facts;
mod finding;
mod flags;
mod input;
mod kkp;
mod objects;
mod output;
mod plan;
mod reference;
mod rules;
mod spec;
mod target;
#[cfg(test)]
mod tests;
mod tokens;

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, bail};

use self::apiserver::Apiserver;
use self::cluster::Cluster;
use self::finding::Findings;
use self::input::Input;
use self::objects::Part;
use self::plan::Plan;
use self::target::Target;

pub use self::flags::Options;

/// Exit code for a file that cannot be read or written.
const UNUSABLE: u8 = 1;

/// Exit code for a cluster with errors, and for a wrong command line; the same as clap's.
const INVALID: u8 = 2;

/// Outcome of the command.
enum Outcome {
    Done,
    /// The cluster has errors; they are printed already.
    Invalid,
}

/// Runs the command and returns its exit code: 0 if the objects are printed, 1 if a file cannot be read or written, 2 for
/// all other errors.
pub fn run(options: &Options) -> ExitCode {
    match render(options) {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::Invalid) => ExitCode::from(INVALID),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "Error: {error:#}");
            ExitCode::from(code(&error))
        }
    }
}

fn code(error: &anyhow::Error) -> u8 {
    match error.root_cause().is::<std::io::Error>() {
        true => UNUSABLE,
        false => INVALID,
    }
}

fn render(options: &Options) -> anyhow::Result<Outcome> {
    options.check_standard_input()?;
    let mut input = read(options)?;
    if let (Some(from), Some(to)) = (options.diff_from, options.to) {
        if from.is_tunnel() && to.is_tunnel() {
            // The steps render the objects of both tunnels, so the file needs the values of both.
            let mut before = input.clone();
            plan::apply(from, &mut before);
            let mut findings = Findings::default();
            let before = Cluster::new(before, true, &mut findings);
            rules::check(&before, None, &mut findings);
            Target::new(&before, &mut findings);
            findings.warnings.clear();
            if !findings.problems.is_empty() {
                report(&findings);
                return Ok(Outcome::Invalid);
            }
        }
        let strategy = &input.spec.expose_strategy;
        anyhow::ensure!(
            to.is_tunnel() || strategy == to.name(),
            "spec.exposeStrategy is {strategy:?}, but --to is {:?}: the commands of the plan read the cluster file again; \
             give a copy of the file with the values after the migration",
            to.name()
        );
        plan::apply(to, &mut input);
        return plan(options, from, to, input);
    }
    let old = options.old.as_deref();
    let old = old.map(|path| parse(path, &text(path)?)).transpose()?;
    let old = old.map(Cluster::stored);
    let mut findings = Findings::default();
    let cluster = Cluster::new(input, old.is_none(), &mut findings);
    rules::check(&cluster, old.as_ref(), &mut findings);
    let target = Target::new(&cluster, &mut findings);
    let path = options.apiserver.as_deref();
    let path = path.filter(|_| findings.problems.is_empty());
    let running = path.map(|path| running(path, &target)).transpose()?;
    if let Some(running) = &running {
        tokens::check(&target, running, &mut findings);
    }
    report(&findings);
    if !findings.problems.is_empty() {
        return Ok(Outcome::Invalid);
    }
    for (part, is_rendered, strategy) in [
        (Part::Door, cluster.is_load_balancer(), "LoadBalancer"),
        (Part::NodeTunnel, cluster.is_tunneling(), "Tunneling"),
    ] {
        anyhow::ensure!(
            is_rendered || !options.part.contains(&part),
            "--part={}: only a cluster with the strategy {strategy} has these objects, and the strategy of this cluster is {}",
            output::name(part),
            cluster.spec.expose_strategy
        );
    }
    let mut objects = objects::all(&target, running.as_ref());
    objects.retain(|object| options.part.is_empty() || options.part.contains(&object.part));
    match &options.output_dir {
        Some(folder) => {
            if let Some(other) = output::other_cluster(folder, &target.namespace) {
                bail!(
                    "{}: the folder has the objects of {other}, and this cluster is {}; choose a folder for each user \
                     cluster",
                    folder.display(),
                    target.namespace
                );
            }
            for path in output::stale(folder, &objects, &options.part) {
                let path = path.display();
                let reason =
                    "an earlier run wrote the file, and the cluster has no such objects; delete it";
                let _ = writeln!(std::io::stderr(), "Warning: {path}: {reason}");
            }
            output::write(folder, &target.namespace, &objects)?;
        }
        None => say!("{}", output::stream(&objects)?.trim_end()),
    }
    Ok(Outcome::Done)
}

/// Prints a migration plan.
fn plan(
    options: &Options,
    from: plan::Side,
    to: plan::Side,
    input: Input,
) -> anyhow::Result<Outcome> {
    let mut findings = Findings::default();
    let cluster = Cluster::new(input, true, &mut findings);
    rules::check(&cluster, None, &mut findings);
    let target = Target::new(&cluster, &mut findings);
    report(&findings);
    if !findings.problems.is_empty() {
        return Ok(Outcome::Invalid);
    }
    let plan = Plan::new(from, to, &target, &options.input_arguments()?)?;
    say!("{}", plan.to_string().trim_end());
    Ok(Outcome::Done)
}

/// Reads the cluster file and the file of facts. Flags come first, then the cluster file, then the facts.
fn read(options: &Options) -> anyhow::Result<Input> {
    let mut input = parse(&options.file, &text(&options.file)?)?;
    let mut more = facts::Facts::default();
    if let Some(path) = &options.facts {
        let named = || format!("{}", path.display());
        more = input::parse_facts(&text(path)?).with_context(named)?;
    }
    let facts = std::mem::take(&mut input.facts);
    input.facts = options.facts().or(facts).or(more);
    Ok(input)
}

fn parse(path: &Path, text: &str) -> anyhow::Result<Input> {
    input::parse(text).with_context(|| format!("{}", path.display()))
}

/// Reads the Deployment of kube-apiserver.
fn running(path: &Path, target: &Target<'_>) -> anyhow::Result<Apiserver> {
    let named = || format!("--apiserver {}", path.display());
    Apiserver::parse(&text(path)?, &target.namespace).with_context(named)
}

/// Reads a file; `-` is the standard input.
fn text(path: &Path) -> anyhow::Result<String> {
    if path == Path::new("-") {
        let mut text = String::new();
        std::io::stdin()
            .read_to_string(&mut text)
            .context("cannot read the standard input")?;
        return Ok(text);
    }
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Prints all errors and warnings.
fn report(findings: &Findings) {
    let mut output = std::io::stderr().lock();
    for problem in &findings.problems {
        let _ = writeln!(output, "Error: {problem}");
    }
    for warning in &findings.warnings {
        let _ = writeln!(output, "Warning: {warning}");
    }
}
