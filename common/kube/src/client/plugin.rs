//! Credential plugins of a kubeconfig (`exec`), by the rules of client-go (`plugin/pkg/client/auth/exec/exec.go`).
//!
//! `kube` runs a plugin several times for one client, and for each request once a token has expired. While a plugin hangs,
//! each of these requests would leave a blocked thread and a process behind.

use std::process::{Command, Stdio};

use anyhow::Context as _;
use k8s_openapi::ByteString;
use k8s_openapi::jiff::fmt::temporal::Pieces;
use k8s_openapi::jiff::{self, Timestamp};
use kube::config::{AuthInfo, ExecAuthCluster, ExecConfig};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// Longest part of a plugin's error output in an error, in characters.
const MAX_ERROR: usize = 1000;

/// The part of an `ExecCredential` for the plugin.
#[derive(Serialize)]
struct Spec<'a> {
    interactive: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster: Option<&'a ExecAuthCluster>,
}

/// The output of a plugin.
#[derive(Deserialize)]
struct Output {
    status: Credentials,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Credentials {
    token: Option<String>,
    client_certificate_data: Option<String>,
    client_key_data: Option<String>,
    expiration_timestamp: Option<String>,
}

/// Removes the plugin from a user. `None` if the user has no plugin, or other credentials, which `kube` prefers.
pub(super) fn take(user: &mut AuthInfo) -> Option<ExecConfig> {
    let plugin = user.exec.take();
    let has_password = user.username.is_some() && user.password.is_some();
    let has_token = user.token.is_some() || user.token_file.is_some();
    plugin.filter(|_| !has_password && !has_token && user.auth_provider.is_none())
}

/// Runs a plugin, and adds its credentials to the user. Returns the end of their validity; `None` without a limit. Blocks until
/// the plugin ends.
///
/// # Errors
/// Fails if the plugin fails, or if its output has no credentials. The error does not contain the output.
pub(super) fn run(plugin: &ExecConfig, user: &mut AuthInfo) -> anyhow::Result<Option<Timestamp>> {
    let command = plugin.command.as_deref().unwrap_or_default();
    let named = || format!("the credential plugin {command:?}");
    let Credentials {
        token,
        client_certificate_data: cert,
        client_key_data: key,
        expiration_timestamp,
    } = output(plugin, command).with_context(named)?;
    let [token, cert, key] = [token, cert, key].map(|text| text.filter(|text| !text.is_empty()));
    anyhow::ensure!(
        cert.is_some() == key.is_some() && (cert.is_some() || token.is_some()),
        "{} printed neither a token, nor a certificate with its key",
        named()
    );
    let valid_until = expiration_timestamp.as_deref().map(timestamp);
    let valid_until = valid_until.transpose().with_context(named)?;
    user.token = token.map(Into::into);
    if let (Some(cert), Some(key)) = (cert, key) {
        user.client_certificate_data = Some(base64(cert)?);
        user.client_key_data = Some(base64(key)?.into());
    }
    Ok(valid_until)
}

/// Parses a time. The largest [`Timestamp`] stands for the last two days of the year 9999, which plugins without a limit
/// return.
fn timestamp(text: &str) -> Result<Timestamp, jiff::Error> {
    text.parse().or_else(|error| match Pieces::parse(text) {
        Ok(time) if time.date().year() == 9999 && time.offset().is_some() => Ok(Timestamp::MAX),
        _ => Err(error),
    })
}

fn output(plugin: &ExecConfig, command: &str) -> anyhow::Result<Credentials> {
    let spec = Spec {
        interactive: false,
        cluster: plugin.cluster.as_ref(),
    };
    let info = json!({"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec});
    let variables = plugin.env.iter().flatten();
    let variables = variables.filter_map(|pair| Some((pair.get("name")?, pair.get("value")?)));
    let ended = Command::new(command)
        .args(plugin.args.iter().flatten())
        .envs(variables)
        .env("KUBERNETES_EXEC_INFO", info.to_string())
        .stdin(Stdio::null())
        .output()
        .context("cannot run")?;
    let errors = String::from_utf8_lossy(&ended.stderr);
    let errors: String = errors.trim().chars().take(MAX_ERROR).collect();
    anyhow::ensure!(ended.status.success(), "{}: {errors}", ended.status);
    // The parser's error may show a token.
    let output: Option<Output> = serde_saphyr::from_slice(&ended.stdout).ok();
    let output = output.context("the output is no ExecCredential with a status")?;
    Ok(output.status)
}

/// Encodes PEM as in a kubeconfig.
fn base64(pem: String) -> anyhow::Result<String> {
    let encoded = serde_json::to_value(ByteString(pem.into_bytes()))?;
    Ok(serde_json::from_value(encoded)?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use secrecy::ExposeSecret as _;

    use super::*;

    fn of_script(script: &str) -> ExecConfig {
        let variable = [("name", "TOKEN"), ("value", "t")];
        let variable = variable.map(|(key, value)| (key.to_owned(), value.to_owned()));
        ExecConfig {
            api_version: Some("client.authentication.k8s.io/v1".to_owned()),
            command: Some("sh".to_owned()),
            args: Some(vec!["-c".to_owned(), script.to_owned()]),
            env: Some(vec![variable.into()]),
            ..ExecConfig::default()
        }
    }

    #[test]
    fn plugin_receives_its_variables_and_returns_a_token() {
        // YAML, as some plugins print it.
        let script = r#"test "$KUBERNETES_EXEC_INFO" = '{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","spec":{"interactive":false}}' \
            && printf "status:\n  token: $TOKEN\n  expirationTimestamp: '2001-01-01T00:00:10Z'\n""#;
        let mut user = AuthInfo {
            client_certificate_data: Some("own".to_owned()),
            ..AuthInfo::default()
        };
        let until = run(&of_script(script), &mut user).unwrap();
        assert_eq!(user.token.unwrap().expose_secret(), "t");
        assert_eq!(until.unwrap().as_second() % 60, 10);
        assert_eq!(user.client_certificate_data.as_deref(), Some("own"));
    }

    #[test]
    fn last_days_of_the_year_9999_are_a_valid_end() {
        for text in ["9999-12-31T23:59:59Z", "9999-12-31T23:59:59+01:00"] {
            assert_eq!(timestamp(text).unwrap(), Timestamp::MAX);
        }
        let second = timestamp("2001-01-01T00:00:10Z").unwrap();
        assert_eq!(second.as_second() % 60, 10);
        for text in ["9999-12-31T23:59:59", "9999-12-32T23:59:59Z", "never", ""] {
            assert!(timestamp(text).is_err(), "{text}");
        }
    }

    #[test]
    fn error_has_the_reason_without_the_output() {
        for (script, expected) in [
            (
                "echo secret; echo no login >&2; exit 3",
                "exit status: 3: no login",
            ),
            (
                "echo secret",
                "the output is no ExecCredential with a status",
            ),
            (
                "echo '{\"kind\": \"secret\"}'",
                "the output is no ExecCredential with a status",
            ),
            (
                "echo '{\"status\": {\"clientKeyData\": \"secret\"}}'",
                "printed neither a token, nor a certificate with its key",
            ),
        ] {
            let error = run(&of_script(script), &mut AuthInfo::default()).unwrap_err();
            let error = format!("{error:#}");
            assert!(error.starts_with("the credential plugin \"sh\""), "{error}");
            assert!(
                error.ends_with(expected) && !error.contains("secret"),
                "{error}"
            );
        }
        let missing = ExecConfig {
            command: Some("/no/such/plugin".to_owned()),
            ..ExecConfig::default()
        };
        let error = run(&missing, &mut AuthInfo::default()).unwrap_err();
        let expected = "the credential plugin \"/no/such/plugin\": cannot run: No such file";
        assert!(format!("{error:#}").starts_with(expected), "{error:#}");
    }
}
