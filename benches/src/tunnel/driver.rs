//! The load on a gRPC front end: the client library of kube-apiserver, in the Go driver.
//!
//! The driver hashes the data it transfers, and so does the endpoint of uploads. The hashing slows every
//! contender equally on a machine with few cores, and is not part of the contender's processor time.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use culvert_tests::interop::Interop;
use futures_util::future::try_join_all;
use serde_json::Value;

use crate::harness::harness;
use crate::load::{Done, ECHO_BYTES, Job, Work};

/// Runs a job through the front end at `socket`, with the raw service at `target` as the endpoint.
pub(super) async fn run(
    driver: &Interop,
    socket: &Path,
    target: SocketAddr,
    job: Job,
) -> anyhow::Result<Done> {
    let command = |name: &str, more: &[String]| {
        let mut args = vec![
            name.to_owned(),
            "--front=grpc-uds".to_owned(),
            format!("--uds={}", socket.display()),
            format!("--target={target}"),
        ];
        args.extend_from_slice(more);
        args
    };
    let bytes = format!("--bytes={}", job.amount);
    match job.work {
        // A driver has only one bulk connection.
        Work::Download => bulk(driver, command("download", &[bytes]), job).await,
        Work::Fetch => bail!("the driver cannot close a download first"),
        Work::Upload => bulk(driver, command("upload", &[bytes]), job).await,
        Work::Echo => {
            let more = [
                format!("--connections={}", job.connections),
                format!("--rounds={}", job.amount),
                format!("--size={ECHO_BYTES}"),
            ];
            done(&result(driver, &command("echo", &more)).await?)
        }
        Work::Dials => {
            let more = [
                format!("--concurrency={}", job.connections),
                format!("--count={}", job.total()),
            ];
            done(&result(driver, &command("dials", &more)).await?)
        }
    }
}

/// Runs one driver per connection, all at the same time. The slowest driver counts.
async fn bulk(driver: &Interop, args: Vec<String>, job: Job) -> anyhow::Result<Done> {
    let runs = (0..job.connections).map(|_| result(driver, &args));
    let mut elapsed = Duration::ZERO;
    for result in try_join_all(runs).await? {
        let bytes = result.get("bytes").and_then(Value::as_u64);
        if bytes != Some(job.amount) {
            bail!("{bytes:?} bytes instead of {}", job.amount);
        }
        elapsed = elapsed.max(milliseconds(&result, "elapsed_ms")?);
    }
    Ok(Done {
        elapsed,
        p50_us: 0.0,
        p99_us: 0.0,
    })
}

/// Runs the driver once.
async fn result(driver: &Interop, args: &[String]) -> anyhow::Result<Value> {
    let result = harness(driver.run(args)).await?;
    if result.get("ok").and_then(Value::as_bool) != Some(true) {
        bail!("driver: {result}");
    }
    Ok(result)
}

fn done(result: &Value) -> anyhow::Result<Done> {
    Ok(Done {
        elapsed: milliseconds(result, "elapsed_ms")?,
        p50_us: number(result, "p50_us")?,
        p99_us: number(result, "p99_us")?,
    })
}

fn milliseconds(result: &Value, key: &str) -> anyhow::Result<Duration> {
    let milliseconds = number(result, key)?;
    Duration::try_from_secs_f64(milliseconds / 1000.0)
        .context("driver reported an invalid duration")
}

fn number(result: &Value, key: &str) -> anyhow::Result<f64> {
    let value = result.get(key).and_then(Value::as_f64);
    value.with_context(|| format!("driver result lacks {key}: {result}"))
}
