//! The introduction of an agent to a server, as metadata; both dialects and both links have the same.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use culvert_host::file_follower::read_until;
use culvert_konnectivity::message::{
    AGENT_ID_HEADER, AGENT_IDENTIFIERS_HEADER, HALF_CLOSE_HEADER, SERVER_COUNT_HEADER,
    SERVER_ID_HEADER,
};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};

use crate::config::Config;

/// Reason why the agent cannot introduce itself.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IntroductionError {
    /// The token file cannot be used.
    #[error("cannot use the token of --service-account-token-path {0}: {1}")]
    Token(String, String),
    /// A value of the configuration cannot be sent.
    #[error("not a valid header value: {0:?}")]
    Value(String),
}

/// Returns the metadata that introduces the agent. Reads the token each time, because tokens rotate, and gives up at the
/// deadline.
pub(crate) async fn metadata(
    config: &Config,
    deadline: Instant,
) -> Result<MetadataMap, IntroductionError> {
    let mut metadata = MetadataMap::new();
    let header = |value: &str| {
        MetadataValue::try_from(value).map_err(|_| IntroductionError::Value(value.to_owned()))
    };
    metadata.insert(AGENT_ID_HEADER, header(&config.agent_id)?);
    metadata.insert(AGENT_IDENTIFIERS_HEADER, header(&config.agent_identifiers)?);
    metadata.insert(HALF_CLOSE_HEADER, MetadataValue::from_static("1"));
    if let Some(path) = &config.token_path {
        metadata.insert("authorization", bearer(path, deadline).await?);
    }
    Ok(metadata)
}

async fn bearer(path: &Path, deadline: Instant) -> Result<MetadataValue<Ascii>, IntroductionError> {
    let unusable = |why: String| IntroductionError::Token(path.display().to_string(), why);
    let file = path.to_owned();
    let token = read_until(deadline, &TURN, move || read(&file))
        .await
        .ok_or_else(|| unusable("the file could not be read in time; check its volume".into()))?
        .map_err(|error| unusable(error.to_string()))?;
    let token = token.trim();
    if token.is_empty() {
        return Err(unusable(
            "the file is empty; write a token of the agent's service account".into(),
        ));
    }
    MetadataValue::try_from(format!("Bearer {token}"))
        .map_err(|_| unusable("the token has invalid characters".into()))
}

/// Largest size of a token file, in bytes. A gRPC header has room for less.
const MAX_TOKEN: u64 = 64 << 10;

/// Permit to read the token file.
static TURN: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(1)));

fn read(path: &Path) -> std::io::Result<String> {
    let mut token = String::new();
    File::open(path)?
        .take(MAX_TOKEN + 1)
        .read_to_string(&mut token)?;
    if token.len() as u64 > MAX_TOKEN {
        let problem = format!("the file has more than {MAX_TOKEN} bytes");
        return Err(std::io::Error::other(problem));
    }
    Ok(token)
}

/// Reads the server's id and server count from its metadata. The error texts for missing or repeated values
/// are upstream's.
pub(crate) fn server_of(metadata: &MetadataMap) -> Result<(String, i64), String> {
    let values = |key: &'static str| -> Vec<&str> {
        let all = metadata.get_all(key).iter();
        all.filter_map(|value| value.to_str().ok()).collect()
    };
    let ids = values(SERVER_ID_HEADER);
    let [id] = ids.as_slice() else {
        return Err(format!(
            "expected one server ID in the context, got [{}]",
            ids.join(" ")
        ));
    };
    let counts = values(SERVER_COUNT_HEADER);
    let [count] = counts.as_slice() else {
        return Err(format!("expected one server count, got {}", counts.len()));
    };
    let count = count
        .parse()
        .map_err(|_| format!("the server count {count:?} is not a number"))?;
    Ok(((*id).to_owned(), count))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Duration;

    use tokio::task::spawn_blocking;
    use tokio::time::timeout;

    use super::*;

    #[test]
    fn token_that_cannot_be_read_in_time_is_unusable_and_keeps_one_thread() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        // An open of a pipe waits for the other end.
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().max_blocking_threads(2).build();
        let runtime = runtime.unwrap();
        let is_free = runtime.block_on(async {
            for _ in 0..3 {
                let deadline = Instant::now() + Duration::from_millis(10);
                let error = bearer(&path, deadline).await.unwrap_err().to_string();
                assert!(error.contains("could not be read in time"), "{error}");
            }
            let other = spawn_blocking(|| ());
            timeout(Duration::from_secs(10), other).await.is_ok()
        });
        // Ends the read. A pipe that is opened for both needs no other end.
        let mut pipe = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path);
        std::io::Write::write_all(pipe.as_mut().unwrap(), b"token").unwrap();
        drop(pipe);
        runtime.shutdown_background();
        assert!(is_free, "the reads keep all threads");
    }

    #[tokio::test]
    async fn token_of_an_empty_file_is_unusable() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, "\n").unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        let error = bearer(&path, deadline).await.unwrap_err().to_string();
        assert!(error.contains("/token: the file is empty; "), "{error}");
    }

    #[tokio::test]
    async fn large_file_is_no_token() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let file = File::create(&path).unwrap();
        file.set_len(1 << 40).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        let error = bearer(&path, deadline).await.unwrap_err().to_string();
        assert!(error.contains("has more than 65536 bytes"), "{error}");
    }

    fn server(pairs: &[(&'static str, &str)]) -> Result<(String, i64), String> {
        let mut metadata = MetadataMap::new();
        for (key, value) in pairs {
            metadata.append(*key, value.parse().unwrap());
        }
        server_of(&metadata)
    }

    #[test]
    fn server_must_send_one_id_and_one_count() {
        let both = [("serverid", "a"), ("servercount", "3")];
        assert_eq!(server(&both), Ok(("a".into(), 3)));
        assert_eq!(
            server(&[("servercount", "3")]).unwrap_err(),
            "expected one server ID in the context, got []"
        );
        assert_eq!(
            server(&[("serverid", "a")]).unwrap_err(),
            "expected one server count, got 0"
        );
    }
}
