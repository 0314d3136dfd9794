#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use culvert_host::telemetry::metrics::Registry;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::task::spawn_blocking;
use tokio::time::advance;

use super::*;

const EXEC_API: &str = "client.authentication.k8s.io/v1";

const SECRET: &str = "c2VjcmV0LXNlY3JldC1zZWNyZXQ";

culvert_host::label_values! {
    enum Files("files") {
        Kubeconfig = "kubeconfig",
    }
}

/// Returns a client of a kubeconfig that does not change.
pub(crate) async fn client_of(kubeconfig: &Path) -> Client {
    let (mut reloader, _) = reloader();
    let client = client(Some(kubeconfig), &mut reloader, Files::Kubeconfig).await;
    client.unwrap()
}

fn reloader() -> (Reloader<Files>, Arc<Registry>) {
    let registry = Registry::new(&[]).unwrap();
    (Reloader::new(&registry), registry)
}

/// Returns a kubeconfig with the fields of a cluster and a user.
pub(crate) fn kubeconfig(cluster: &str, user: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\nclusters:\n- name: c\n  cluster: {cluster}\nusers:\n- name: u\n  user: {user}\n\
         contexts:\n- name: x\n  context:\n    cluster: c\n    user: u\ncurrent-context: x\n"
    )
}

/// Starts an API that answers each request with the request's `Authorization` header, and refuses the token `revoked`.
/// Returns the URL.
async fn echo_api() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    request.push(stream.read_u8().await?);
                }
                let request = String::from_utf8(request).unwrap();
                let header = |line: &str| line.strip_prefix("authorization: ").map(str::to_owned);
                let token = request.lines().find_map(header).unwrap_or_default();
                let code = match token.as_str() {
                    "Bearer revoked" => "401 Unauthorized",
                    _ => "200 OK",
                };
                let head = format!(
                    "HTTP/1.1 {code}\r\nconnection: close\r\ncontent-length: {}",
                    token.len()
                );
                let answer = format!("{head}\r\n\r\n{token}");
                stream.write_all(answer.as_bytes()).await
            });
        }
    });
    url
}

/// Returns the user of a kubeconfig whose plugin prints the file `credential` of a folder, and adds a line to the file `runs`.
fn plugin(dir: &Path) -> String {
    let script = format!("cd {} && echo run >> runs && cat credential", dir.display());
    let exec = format!(
        "{{apiVersion: {EXEC_API}, command: sh, args: [-c, '{script}'], interactiveMode: Never}}"
    );
    format!("{{exec: {exec}}}")
}

/// Returns true if the plugin of a folder has run once since the last call.
fn has_run(dir: &Path) -> bool {
    let runs = dir.join("runs");
    let Ok(text) = std::fs::read_to_string(&runs) else {
        return false;
    };
    std::fs::remove_file(runs).unwrap();
    assert_eq!(text, "run\n");
    true
}

/// Returns the output of a credential plugin.
fn credential(status: &serde_json::Value) -> String {
    json!({"apiVersion": EXEC_API, "kind": "ExecCredential", "status": status}).to_string()
}

async fn ask(client: &Client) -> String {
    let request = Request::get("/x").body(Vec::new()).unwrap();
    client.request_text(request).await.unwrap()
}

#[tokio::test]
async fn error_about_a_kubeconfig_does_not_show_its_secrets() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    let head = "apiVersion: v1\nkind: Config\nusers:\n- name: u\n  user:\n";
    let rest = "clusters:\n- name: c\n  cluster:\n    server: https://127.0.0.1:1\ncontexts:\n- name: x\n  \
        context:\n    cluster: c\n    user: u\ncurrent-context: x\n";
    for user in [
        format!("    token: {SECRET}\n   bad indentation"),
        format!("    token: [{SECRET}]"),
        format!("    token: \"{SECRET}"),
        format!("    client-certificate-data: {SECRET}\n    client-key-data: {SECRET}"),
        format!("    client-certificate-data: -{SECRET}\n    client-key-data: -{SECRET}"),
    ] {
        std::fs::write(&path, format!("{head}{user}\n{rest}")).unwrap();
        let (mut reloader, _) = reloader();
        let error = client(Some(&path), &mut reloader, Files::Kubeconfig).await;
        let error = error.err().map(|error| format!("{error:#}")).unwrap();
        assert!(
            error.contains("kubeconfig") || error.contains("account"),
            "{error}"
        );
        assert!(!error.contains(&SECRET[..8]), "{error}");
    }
}

#[tokio::test]
async fn error_about_a_kubeconfig_has_its_cause_once_and_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    let lacks_ca = "{server: https://127.0.0.1:1, certificate-authority: no-such.pem}";
    for (text, expected) in [
        (
            "some: file\n".to_owned(),
            ": no current-context is set; is the file a kubeconfig?",
        ),
        (
            kubeconfig(lacks_ca, "{token: t}"),
            "No such file or directory (os error 2)",
        ),
    ] {
        std::fs::write(&path, text).unwrap();
        let (mut reloader, _) = reloader();
        let error = client(Some(&path), &mut reloader, Files::Kubeconfig).await;
        let error = error.err().map(|error| format!("{error:#}")).unwrap();
        assert!(error.ends_with(expected), "{error}");
        assert_eq!(error.matches(expected).count(), 1, "{error}");
    }
}

#[tokio::test]
async fn error_of_an_unreachable_api_has_its_url() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    std::fs::write(
        &path,
        kubeconfig("{server: http://127.0.0.1:1}", "{token: t}"),
    )
    .unwrap();
    let request = Request::get("/x").body(Vec::new()).unwrap();
    let error = client_of(&path).await.request_text(request).await;
    let error = error.unwrap_err();
    let expected = "the Kubernetes API http://127.0.0.1:1/ of --kubeconfig";
    assert!(error.to_string().ends_with(expected), "{error}");
    assert!(root(&error).contains("refused"), "{}", root(&error));
}

#[tokio::test]
async fn next_request_after_a_change_uses_the_new_kubeconfig() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    let (api, other) = (echo_api().await, echo_api().await);
    let write = |server: &str, token: &str| {
        let text = kubeconfig(
            &format!("{{server: {server}}}"),
            &format!("{{token: {token}}}"),
        );
        std::fs::write(&path, text).unwrap();
    };
    write(&api, "one");
    let (mut reloader, registry) = reloader();
    let client = client(Some(&path), &mut reloader, Files::Kubeconfig)
        .await
        .unwrap();
    assert_eq!(ask(&client).await, "Bearer one");
    write(&other, "two");
    reloader.check();
    assert_eq!(ask(&client).await, "Bearer one");
    reloader.check();
    assert_eq!(ask(&client).await, "Bearer two");
    // A kubeconfig that cannot be used leaves the account as it was.
    let token = |token: &str| kubeconfig(&format!("{{server: {api}}}"), token);
    let control = token("{token: \"a\\nb\"}");
    let provider = |name: &str| {
        token(&format!(
            "{{auth-provider: {{name: {name}, config: {{id-token: \"a\\nb\"}}}}}}"
        ))
    };
    let (oidc, gcp) = (provider("oidc"), provider("gcp"));
    let without_scheme = kubeconfig("{server: '127.0.0.1:1'}", "{token: three}");
    for bad in [
        "clusters: [",
        "{}",
        "",
        &control,
        &oidc,
        &gcp,
        &without_scheme,
    ] {
        std::fs::write(&path, bad).unwrap();
        reloader.check();
        reloader.check();
        assert_eq!(ask(&client).await, "Bearer two", "{bad:?}");
        let page = registry.render();
        assert!(page.contains("culvert_last_reload_successful{files=\"kubeconfig\"} 0"));
    }
    std::fs::remove_file(&path).unwrap();
    reloader.check();
    write(&api, "three");
    reloader.check();
    reloader.check();
    assert_eq!(ask(&client).await, "Bearer three");
    let page = registry.render();
    assert!(page.contains("culvert_last_reload_successful{files=\"kubeconfig\"} 1"));
    assert!(page.contains("culvert_reloads_total{files=\"kubeconfig\",result=\"ok\"} 2"));
}

#[tokio::test]
async fn files_that_the_kubeconfig_names_are_followed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    let api = echo_api().await;
    let with_ca = |ca: &str, token: &str| {
        let cluster = format!("{{server: {api}, certificate-authority: {ca}}}");
        std::fs::write(&path, kubeconfig(&cluster, &format!("{{token: {token}}}"))).unwrap();
    };
    let (mut reloader, registry) = reloader();
    let failed = "culvert_reloads_total{files=\"kubeconfig\",result=\"failed\"}";
    let ca = rcgen::generate_simple_self_signed(["ca".to_owned()]).unwrap();
    let ca = ca.cert.pem();
    with_ca("ca.crt", "one");
    std::fs::write(dir.path().join("ca.crt"), &ca).unwrap();
    let client = client(Some(&path), &mut reloader, Files::Kubeconfig)
        .await
        .unwrap();
    // The bundle is malformed for a while.
    std::fs::write(
        dir.path().join("ca.crt"),
        "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n",
    )
    .unwrap();
    for _ in 0..4 {
        reloader.check();
    }
    assert!(registry.render().contains(&format!("{failed} 1")));
    std::fs::write(dir.path().join("ca.crt"), "no certificate").unwrap();
    for _ in 0..4 {
        reloader.check();
    }
    assert!(registry.render().contains(&format!("{failed} 2")));
    // A missing file does not hide a change of the kubeconfig.
    with_ca("missing.crt", "two");
    for _ in 0..4 {
        reloader.check();
    }
    assert!(registry.render().contains(&format!("{failed} 3")));
    assert_eq!(ask(&client).await, "Bearer one");
    std::fs::remove_file(dir.path().join("ca.crt")).unwrap();
    std::fs::write(dir.path().join("other.crt"), &ca).unwrap();
    with_ca("other.crt", "three");
    for _ in 0..4 {
        reloader.check();
    }
    assert_eq!(ask(&client).await, "Bearer three");
}

#[tokio::test]
async fn token_file_is_followed_and_wins_over_a_token() {
    let dir = tempfile::tempdir().unwrap();
    let (path, token) = (dir.path().join("kubeconfig"), dir.path().join("token"));
    let api = echo_api().await;
    let user = "{token: other, tokenFile: token, client-certificate: \"\", client-key-data: \"\"}";
    let cluster =
        format!("{{server: {api}, certificate-authority-data: \"\", certificate-authority: \"\"}}");
    std::fs::write(&path, kubeconfig(&cluster, user)).unwrap();
    std::fs::write(&token, "one\n").unwrap();
    let (mut reloader, registry) = reloader();
    let client = client(Some(&path), &mut reloader, Files::Kubeconfig)
        .await
        .unwrap();
    assert_eq!(ask(&client).await, "Bearer one");
    std::fs::write(&token, "second\n").unwrap();
    reloader.check();
    reloader.check();
    assert_eq!(ask(&client).await, "Bearer second");
    let last = "culvert_last_reload_successful{files=\"kubeconfig\"}";
    std::fs::write(&token, "\n").unwrap();
    reloader.check();
    reloader.check();
    assert_eq!(ask(&client).await, "Bearer second");
    assert!(registry.render().contains(&format!("{last} 0")));
    std::fs::write(&token, "third").unwrap();
    for _ in 0..4 {
        reloader.check();
    }
    assert_eq!(ask(&client).await, "Bearer third");
    std::fs::remove_file(&token).unwrap();
    reloader.check();
    assert_eq!(ask(&client).await, "Bearer third");
    assert!(registry.render().contains(&format!("{last} 0")));
}

#[tokio::test]
async fn watch_does_not_continue_a_list_of_another_api() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    let (api, other) = (echo_api().await, echo_api().await);
    let write = |server: &str| {
        let text = kubeconfig(&format!("{{server: {server}}}"), "{token: one}");
        std::fs::write(&path, text).unwrap();
    };
    write(&api);
    let (mut reloader, _) = reloader();
    let client = client(Some(&path), &mut reloader, Files::Kubeconfig).await;
    let client = client.unwrap();
    let get = async |uri: &str| {
        let request = Request::get(uri).body(Vec::new()).unwrap();
        client.request_text(request).await
    };
    let watch = "/x?limit=1&watch=true&resourceVersion=7";
    assert!(get(watch).await.is_ok());
    assert!(get("/x?limit=1").await.is_ok() && get(watch).await.is_ok());
    write(&other);
    reloader.check();
    reloader.check();
    let error = get(watch).await.unwrap_err();
    assert!(
        matches!(&error, kube::Error::Api(status) if status.code == 410),
        "{error}"
    );
    assert!(get("/x").await.is_ok() && get(watch).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn watches_that_end_at_once_are_started_once_per_second() {
    let service = service_fn(|_: Request<Body>| async {
        Ok::<_, std::convert::Infallible>(Response::new(Body::empty()))
    });
    let client = paced(Client::new(service, "n"));
    let send = async |path: &str| {
        let request = Request::get(path).body(Body::empty()).unwrap();
        client.send(request).await.unwrap();
    };
    let started = Instant::now();
    for _ in 0..5 {
        send("/api/v1/nodes?watch=true&resourceVersion=1").await;
    }
    assert_eq!(started.elapsed(), 4 * WATCH_GAP);
    // Other requests do not wait.
    send("/api/v1/nodes").await;
    send("/api/v1/pods?watch=true").await;
    assert_eq!(started.elapsed(), 4 * WATCH_GAP);
}

/// Sends a request. Returns the lifetime that the API has received; `None` without a lifetime.
async fn lifetime(client: &Client, queries: &Mutex<Vec<String>>, query: &str) -> Option<u32> {
    let request = Request::get(format!("/api/v1/nodes?{query}"));
    let sent = client.send(request.body(Body::empty()).unwrap()).await;
    sent.unwrap();
    let asked = queries.lock().pop().unwrap();
    let mut pairs = asked.split('&');
    pairs.find_map(|pair| pair.strip_prefix("timeoutSeconds=")?.parse().ok())
}

#[tokio::test(start_paused = true)]
async fn first_watches_after_lists_have_random_lifetimes() {
    let queries = Arc::new(Mutex::new(Vec::new()));
    let (received, codes) = (queries.clone(), Arc::new(Mutex::new(Vec::<u16>::new())));
    let refusals = codes.clone();
    let service = service_fn(move |request: Request<Body>| {
        received
            .lock()
            .push(request.uri().query().unwrap().to_owned());
        let code = refusals.lock().pop().unwrap_or(200);
        async move { Response::builder().status(code).body(Body::empty()) }
    });
    let client = paced(Client::new(service, "n"));
    let ask = async |query: &str| lifetime(&client, &queries, query).await;
    let watch = "watch=true&timeoutSeconds=30&resourceVersion=1";
    let mut firsts = Vec::new();
    for _ in 0..100 {
        assert_eq!(ask("limit=500").await, None);
        // A refused watch does not count.
        codes.lock().push(429);
        firsts.extend([ask(watch).await.unwrap(), ask(watch).await.unwrap()]);
        assert_eq!([ask(watch).await, ask(watch).await], [Some(30); 2]);
    }
    firsts.sort_unstable();
    assert!(
        firsts.iter().all(|first| (5..=30).contains(first)),
        "{firsts:?}"
    );
    firsts.dedup();
    assert!(firsts.len() > 10, "{firsts:?}");
}

#[tokio::test(start_paused = true)]
async fn credential_plugin_runs_again_before_its_certificate_expires() {
    let pair = rcgen::generate_simple_self_signed(["u".to_owned()]).unwrap();
    let credential = |valid: i64| {
        let expiry = Timestamp::now() + SignedDuration::from_secs(valid);
        credential(&json!({
            "clientCertificateData": pair.cert.pem(),
            "clientKeyData": pair.signing_key.serialize_pem(),
            "expirationTimestamp": expiry.to_string(),
        }))
    };
    let pause = Duration::from_secs(10);
    let proxy = ", proxy-url: 'http://127.0.0.1:1'";
    for (valid, proxy) in [(30, ""), (-30, ""), (30, proxy)] {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let cluster = format!("{{server: 'https://127.0.0.1:1'{proxy}}}");
        std::fs::write(
            path("kubeconfig"),
            kubeconfig(&cluster, &plugin(dir.path())),
        )
        .unwrap();
        std::fs::write(path("credential"), credential(valid)).unwrap();
        let (mut reloader, registry) = reloader();
        let kubeconfig = path("kubeconfig");
        client(Some(&kubeconfig), &mut reloader, Files::Kubeconfig)
            .await
            .unwrap();
        let has_run = || has_run(dir.path());
        let shows = |ok: u32, failed: u32, in_use: u32| {
            let page = registry.render();
            for line in [
                format!("culvert_reloads_total{{files=\"kubeconfig\",result=\"ok\"}} {ok}"),
                format!("culvert_reloads_total{{files=\"kubeconfig\",result=\"failed\"}} {failed}"),
                format!("culvert_last_reload_successful{{files=\"kubeconfig\"}} {in_use}"),
            ] {
                assert!(page.contains(&line), "{line} in {page}");
            }
        };
        assert!(has_run());
        // A plugin with short certificates runs only after a pause.
        reloader.check();
        assert!(!has_run());
        advance(pause).await;
        reloader.check();
        assert!(has_run());
        shows(1, 0, 1);
        std::fs::remove_file(path("credential")).unwrap();
        for _ in 0..2 {
            advance(pause).await;
            reloader.check();
            assert!(has_run());
            reloader.check();
            assert!(!has_run());
            shows(1, 1, 0);
        }
        std::fs::write(path("credential"), credential(3600)).unwrap();
        advance(pause).await;
        reloader.check();
        assert!(has_run());
        shows(2, 1, 1);
        advance(pause).await;
        reloader.check();
        assert!(!has_run());
    }
}

#[tokio::test(start_paused = true)]
async fn credential_plugin_runs_again_after_its_token_was_refused() {
    // A paused clock does not advance by itself while a blocking task runs.
    let (end, is_ended) = std::sync::mpsc::channel::<()>();
    let blocking = spawn_blocking(move || is_ended.recv());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    let cluster = format!("{{server: {}}}", echo_api().await);
    std::fs::write(&path, kubeconfig(&cluster, &plugin(dir.path()))).unwrap();
    let returns = |token: &str| {
        let text = credential(&json!({"token": token}));
        std::fs::write(dir.path().join("credential"), text).unwrap();
    };
    let has_run = || has_run(dir.path());
    let pause = Duration::from_secs(10);
    returns("revoked");
    let (mut reloader, _) = reloader();
    let client = client(Some(&path), &mut reloader, Files::Kubeconfig).await;
    let client = client.unwrap();
    let refused = async || {
        let request = Request::get("/x").body(Vec::new()).unwrap();
        let error = client.request_text(request).await.unwrap_err();
        assert!(
            matches!(&error, kube::Error::Api(status) if status.code == 401),
            "{error}"
        );
    };
    assert!(has_run());
    advance(pause).await;
    reloader.check();
    assert!(!has_run());
    for _ in 0..2 {
        refused().await;
        reloader.check();
        assert!(has_run());
        // A second refusal has no effect before the pause is over.
        refused().await;
        reloader.check();
        assert!(!has_run());
        advance(pause).await;
    }
    returns("good");
    reloader.check();
    assert!(has_run());
    assert_eq!(ask(&client).await, "Bearer good");
    advance(pause).await;
    reloader.check();
    assert!(!has_run());
    drop(end);
    assert!(blocking.await.unwrap().is_err());
}

#[tokio::test]
async fn requests_do_not_run_a_credential_plugin() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    let cluster = format!("{{server: {}}}", echo_api().await);
    std::fs::write(&path, kubeconfig(&cluster, &plugin(dir.path()))).unwrap();
    let expired = json!({"token": "expired", "expirationTimestamp": "2001-01-01T00:00:00Z"});
    std::fs::write(dir.path().join("credential"), credential(&expired)).unwrap();
    let client = client_of(&path).await;
    assert!(has_run(dir.path()));
    for _ in 0..3 {
        assert_eq!(ask(&client).await, "Bearer expired");
    }
    assert!(!has_run(dir.path()));
}
