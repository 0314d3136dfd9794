//! Tests which agents share a review, how long a review may take, and which reasons a failed review has. If the clock is
//! paused, a sleep ends once every task waits.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicUsize, Ordering};

use http::{Request, Response};
use http_body_util::BodyExt as _;
use kube::client::Body;
use rustls::pki_types::PrivatePkcs8KeyDer;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::*;
use crate::client::tests::{client_of, kubeconfig};

const MOMENT: Duration = Duration::from_millis(1);

const USER: &str = "system:serviceaccount:n:a";

/// Account of a token without a pod.
const ACCOUNT: Account = Account { pod: None };

/// Address of most agents.
const HOST: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

/// A review that waits for the test's answer.
struct Asked {
    token: String,
    answer: oneshot::Sender<Value>,
}

impl Asked {
    fn accept(self) {
        let status = json!({"authenticated": true, "audiences": ["x"], "user": {"username": USER}});
        self.answer.send(status).unwrap();
    }

    fn refuse(self, why: &str) {
        self.answer.send(json!({ "error": why })).unwrap();
    }
}

fn tokens(client: Client, pace: Option<Pace>) -> Arc<Tokens> {
    let auth = AgentAuth {
        namespace: "n".into(),
        service_account: "a".into(),
        audience: "x".into(),
        kubeconfig: None,
        pace,
    };
    Arc::new(Tokens::new(client, auth))
}

fn metadata(token: &str) -> MetadataMap {
    let mut metadata = MetadataMap::new();
    metadata.insert("authorization", format!("Bearer {token}").parse().unwrap());
    metadata
}

/// Returns the reason why a token is refused if the reviews use this client.
async fn refusal(client: Client) -> String {
    let checked = tokens(client, None).check(&metadata("t"), HOST).await;
    let text = checked.unwrap_err().to_string();
    let prefix =
        "Failed to validate authentication token, err:Failed to authenticate request. err:";
    let text = text.strip_prefix(prefix).unwrap();
    let api = "the Kubernetes API of the server: ";
    text.strip_prefix(api).unwrap().to_owned()
}

/// Agents, and the fake API that reviews their tokens.
struct Fake {
    tokens: Arc<Tokens>,
    asked: mpsc::UnboundedReceiver<Asked>,
}

impl Fake {
    fn new() -> Self {
        Self::with_pace(None)
    }

    fn with_pace(pace: Option<Pace>) -> Self {
        let (sender, asked) = mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: Request<Body>| {
            let sender = sender.clone();
            async move {
                let body = request.into_body().collect().await.unwrap().to_bytes();
                let mut review: Value = serde_json::from_slice(&body).unwrap();
                let token = review.pointer("/spec/token").and_then(Value::as_str);
                let token = token.unwrap().to_owned();
                let (answer, answered) = oneshot::channel();
                sender.send(Asked { token, answer }).ok().unwrap();
                let status = answered.await.map_err(std::io::Error::other)?;
                let review_object = review.as_object_mut().unwrap();
                review_object.insert("status".into(), status);
                let body = Body::from(review.to_string().into_bytes());
                Ok::<_, std::io::Error>(Response::new(body))
            }
        });
        let tokens = tokens(Client::new(service, "default"), pace);
        Self { tokens, asked }
    }

    /// Presents a token as one agent.
    fn present(&self, token: &str) -> impl Future<Output = Result<Account, AuthError>> + use<> {
        self.present_from(HOST, token)
    }

    fn present_from(
        &self,
        from: IpAddr,
        token: &str,
    ) -> impl Future<Output = Result<Account, AuthError>> + use<> {
        let tokens = self.tokens.clone();
        let metadata = metadata(token);
        async move { tokens.check(&metadata, from).await }
    }

    /// Presents a token as a thousand agents at once, all waiting for the outcome.
    async fn present_thousand(&self, token: &str) -> JoinSet<Result<Account, AuthError>> {
        let agents = (0..1_000).map(|_| self.present(token)).collect();
        sleep(MOMENT).await;
        agents
    }

    async fn review(&mut self) -> Asked {
        let asked = timeout(REVIEW_TIMEOUT * 6, self.asked.recv()).await;
        asked.expect("a review").unwrap()
    }

    fn nothing_else_is_asked(&mut self) {
        assert!(self.asked.try_recv().is_err());
    }
}

/// Returns the outcome that all agents received.
async fn heard(agents: JoinSet<Result<Account, AuthError>>) -> Result<Account, String> {
    let mut heard = agents.join_all().await;
    assert_eq!(heard.len(), 1_000);
    heard.dedup();
    assert_eq!(heard.len(), 1, "{heard:?}");
    heard.remove(0).map_err(|error| error.to_string())
}

#[tokio::test(start_paused = true)]
async fn waiting_agents_share_the_outcome_and_only_acceptance_is_remembered() {
    let mut fake = Fake::new();
    let agents = fake.present_thousand("t").await;
    fake.review().await.refuse("expired");
    let text = "Failed to validate authentication token, err:lookup failed: expired";
    assert_eq!(heard(agents).await, Err(text.to_owned()));
    fake.nothing_else_is_asked();
    // Later agents cause a new review.
    let agents = fake.present_thousand("t").await;
    let asked = fake.review().await;
    assert_eq!(asked.token, "t");
    asked.accept();
    assert_eq!(heard(agents).await, Ok(ACCOUNT));
    assert_eq!(heard(fake.present_thousand("t").await).await, Ok(ACCOUNT));
    fake.nothing_else_is_asked();
    // The server remembers the token for a limited time.
    sleep(REMEMBER).await;
    let agents = fake.present_thousand("t").await;
    fake.review().await.refuse("revoked");
    assert!(heard(agents).await.unwrap_err().ends_with("revoked"));
    fake.nothing_else_is_asked();
}

#[tokio::test(start_paused = true)]
async fn waiting_agents_share_one_timeout_of_a_silent_api() {
    let mut fake = Fake::new();
    let started = Instant::now();
    let agents = fake.present_thousand("t").await;
    let _silent = fake.review().await;
    let error = heard(agents).await.unwrap_err();
    assert!(
        error.contains("no answer to the TokenReview within 10s; the server asks the API"),
        "{error}"
    );
    assert_eq!(started.elapsed(), REVIEW_TIMEOUT);
    fake.nothing_else_is_asked();
    let later = tokio::spawn(fake.present("t"));
    fake.review().await.accept();
    assert_eq!(later.await.unwrap(), Ok(ACCOUNT));
}

#[tokio::test(start_paused = true)]
async fn a_review_goes_on_without_the_agents_that_wait_for_it() {
    let mut fake = Fake::new();
    let first = tokio::spawn(fake.present("t"));
    let asked = fake.review().await;
    let second = tokio::spawn(fake.present("t"));
    sleep(MOMENT).await;
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    sleep(MOMENT).await;
    asked.accept();
    assert_eq!(second.await.unwrap(), Ok(ACCOUNT));
    fake.nothing_else_is_asked();

    // An agent that returns receives the answer, before and after the end of the review.
    let only = tokio::spawn(fake.present("other"));
    let asked = fake.review().await;
    only.abort();
    sleep(MOMENT).await;
    let next = tokio::spawn(fake.present("other"));
    sleep(MOMENT).await;
    next.abort();
    sleep(MOMENT).await;
    asked.accept();
    sleep(REMEMBER_UNSEEN - MOMENT).await;
    assert_eq!(fake.present("other").await, Ok(ACCOUNT));
    fake.nothing_else_is_asked();
    sleep(2 * MOMENT).await;
    let late = tokio::spawn(fake.present("other"));
    fake.review().await.accept();
    assert_eq!(late.await.unwrap(), Ok(ACCOUNT));
}

#[tokio::test(start_paused = true)]
async fn a_review_ends_in_its_queue_once_every_waiting_agent_has_left() {
    let mut fake = Fake::new();
    let mut agents = JoinSet::new();
    let mut asked = Vec::new();
    for number in 0..REVIEWS {
        agents.spawn(fake.present(&format!("first {number}")));
        asked.push(fake.review().await);
    }
    let left = tokio::spawn(fake.present("left"));
    let kept = tokio::spawn(fake.present("kept"));
    sleep(MOMENT).await;
    left.abort();
    sleep(MOMENT).await;
    asked.remove(0).accept();
    fake.review().await.accept();
    assert_eq!(kept.await.unwrap(), Ok(ACCOUNT));
    fake.nothing_else_is_asked();
}

#[tokio::test(start_paused = true)]
async fn agents_that_leave_before_every_answer_are_accepted_in_the_end() {
    const AGENTS: usize = 10 * REVIEWS;
    const REVIEW: Duration = Duration::from_secs(1);
    const PATIENCE: Duration = Duration::from_millis(100);
    let mut fake = Fake::new();
    let mut waiting: Vec<usize> = (0..AGENTS).collect();
    let mut asked = Vec::new();
    let started = Instant::now();
    while !waiting.is_empty() {
        let limit = REVIEW * 2 * (AGENTS / REVIEWS) as u32;
        assert!(started.elapsed() < limit, "{} still wait", waiting.len());
        let mut attempts = JoinSet::new();
        for number in waiting.drain(..) {
            let agent = fake.present(&format!("{number}"));
            attempts.spawn(async move { (number, timeout(PATIENCE, agent).await) });
        }
        for (number, outcome) in attempts.join_all().await {
            match outcome {
                Ok(accepted) => assert_eq!(accepted, Ok(ACCOUNT)),
                Err(_) => waiting.push(number),
            }
        }
        while let Ok(review) = fake.asked.try_recv() {
            asked.push((Instant::now() + REVIEW, review));
        }
        let now = Instant::now();
        for (_, review) in asked.extract_if(.., |(at, _)| *at <= now) {
            review.accept();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_timeout_of_a_review_starts_with_its_turn() {
    let mut fake = Fake::new();
    let mut silent = Vec::new();
    let mut agents = JoinSet::new();
    for number in 0..REVIEWS {
        agents.spawn(fake.present(&format!("first {number}")));
        silent.push(fake.review().await);
    }
    let started = Instant::now();
    let mut late = JoinSet::new();
    for number in 0..REVIEWS {
        late.spawn(fake.present(&format!("second {number}")));
    }
    sleep(MOMENT).await;
    let last = tokio::spawn(fake.present("last"));
    sleep(MOMENT).await;
    fake.nothing_else_is_asked();
    assert!(agents.join_all().await.iter().all(Result::is_err));
    // Every late review now has its full time.
    let mut reviews = Vec::new();
    for _ in 0..REVIEWS {
        reviews.push(fake.review().await);
    }
    assert_eq!(started.elapsed(), REVIEW_TIMEOUT);
    // The wait for a turn is limited.
    let error = last.await.unwrap().unwrap_err().to_string();
    assert!(
        error.ends_with("no turn for a TokenReview within 15s"),
        "{error}"
    );
    assert!(started.elapsed() < REVIEW_TIMEOUT * 2);
    sleep(Duration::from_secs(4)).await;
    for review in reviews {
        review.accept();
    }
    assert!(late.join_all().await.iter().all(Result::is_ok));
    fake.nothing_else_is_asked();
}

#[tokio::test(start_paused = true)]
async fn host_with_many_tokens_does_not_delay_the_review_of_another_host() {
    let mut fake = Fake::new();
    let mut flood = JoinSet::new();
    for number in 0..10 * REVIEWS {
        flood.spawn(fake.present(&format!("random {number}")));
    }
    let mut asked = Vec::new();
    for _ in 0..REVIEWS {
        asked.push(fake.review().await);
    }
    let from = Ipv4Addr::new(192, 0, 2, 2).into();
    let honest = tokio::spawn(fake.present_from(from, "honest"));
    sleep(MOMENT).await;
    fake.nothing_else_is_asked();
    asked.pop().unwrap().refuse("unknown");
    let next = fake.review().await;
    assert_eq!(next.token, "honest");
    next.accept();
    assert_eq!(honest.await.unwrap(), Ok(ACCOUNT));
}

#[tokio::test(start_paused = true)]
async fn answer_without_the_requested_audience_is_refused() {
    for audiences in [json!(["other", "y"]), json!([]), Value::Null] {
        let mut fake = Fake::new();
        let agent = tokio::spawn(fake.present("t"));
        let user = json!({ "username": USER });
        let status = json!({"authenticated": true, "audiences": audiences, "user": user});
        fake.review().await.answer.send(status).unwrap();
        let error = agent.await.unwrap().unwrap_err().to_string();
        assert!(error.ends_with(". Expected \"x\""), "{error}");
        // A refusal is not remembered.
        let agent = tokio::spawn(fake.present("t"));
        let user = json!({ "username": USER });
        let status = json!({"authenticated": true, "audiences": ["y", "x"], "user": user});
        fake.review().await.answer.send(status).unwrap();
        assert_eq!(agent.await.unwrap(), Ok(ACCOUNT));
    }
}

#[tokio::test(start_paused = true)]
async fn account_has_the_pod_of_a_bound_token() {
    for (extra, pod) in [
        (json!({POD_NAME: ["agent-7d4b"]}), Some("agent-7d4b".into())),
        (json!({POD_NAME: ["a", "b"]}), None),
        (json!({POD_NAME: [""]}), None),
        (json!({"other": ["a"]}), None),
    ] {
        let mut fake = Fake::new();
        let agent = tokio::spawn(fake.present("t"));
        let user = json!({"username": USER, "extra": extra});
        let status = json!({"authenticated": true, "audiences": ["x"], "user": user});
        fake.review().await.answer.send(status).unwrap();
        let account = Account { pod };
        assert_eq!(agent.await.unwrap(), Ok(account.clone()));
        // The account is remembered with the token.
        assert_eq!(fake.present("t").await, Ok(account));
        fake.nothing_else_is_asked();
    }
}

#[tokio::test(start_paused = true)]
async fn reviews_keep_the_pace_and_remembered_tokens_need_no_review() {
    let interval = Duration::from_secs(2);
    let mut fake = Fake::with_pace(Some(Pace { interval, burst: 2 }));
    let started = Instant::now();
    let tokens = ["a", "b", "c", "d"];
    let agents: JoinSet<_> = tokens
        .into_iter()
        .map(|token| fake.present(token))
        .collect();
    let mut times = Vec::new();
    for _ in tokens {
        let asked = fake.review().await;
        times.push(started.elapsed().as_secs());
        asked.accept();
    }
    assert_eq!(times, [0, 0, 2, 4]);
    assert!(agents.join_all().await.iter().all(Result::is_ok));
    assert_eq!(fake.present("d").await, Ok(ACCOUNT));
    fake.nothing_else_is_asked();
}

#[tokio::test(start_paused = true)]
async fn review_refused_by_an_overloaded_api_is_repeated_twice() {
    const CASES: [(&[u16], usize, bool); 4] = [
        (&[429], 2, true),
        (&[503, 504], 3, true),
        (&[502, 502, 502], 3, false),
        (&[500], 1, false),
    ];
    for (codes, reviews, is_accepted) in CASES {
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = asked.clone();
        let service = tower::service_fn(move |_: Request<Body>| {
            let code = codes.get(counted.fetch_add(1, Ordering::Relaxed)).copied();
            let user = json!({ "username": USER });
            let status = json!({"authenticated": true, "audiences": ["x"], "user": user});
            let answer = match code {
                Some(code) => json!({"kind": "Status", "status": "Failure", "code": code}),
                None => json!({"metadata": {}, "spec": {}, "status": status}),
            };
            let body = Body::from(answer.to_string().into_bytes());
            async move { Response::builder().status(code.unwrap_or(200)).body(body) }
        });
        let tokens = tokens(Client::new(service, "default"), None);
        let is_ok = tokens.check(&metadata("t"), HOST).await.is_ok();
        let outcome = (asked.load(Ordering::Relaxed), is_ok);
        assert_eq!(outcome, (reviews, is_accepted), "{codes:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn repeats_do_not_make_a_review_longer() {
    let service = tower::service_fn(move |_: Request<Body>| async move {
        sleep(Duration::from_secs(4)).await;
        let body = json!({"kind": "Status", "status": "Failure", "code": 503}).to_string();
        Response::builder()
            .status(503)
            .body(Body::from(body.into_bytes()))
    });
    let tokens = tokens(Client::new(service, "default"), None);
    let started = Instant::now();
    assert!(tokens.check(&metadata("t"), HOST).await.is_err());
    assert_eq!(started.elapsed(), REVIEW_TIMEOUT);
}

/// Returns the reason why a token is refused if the kubeconfig's cluster has these fields.
async fn refusal_of_cluster(cluster: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    std::fs::write(&path, kubeconfig(cluster, "{token: t}")).unwrap();
    refusal(client_of(&path).await).await
}

/// Returns a client whose API answers every request with a failure.
fn failing_with(code: u16, message: &'static str) -> Client {
    let service = tower::service_fn(move |_: Request<Body>| async move {
        let status =
            json!({"kind": "Status", "status": "Failure", "code": code, "message": message});
        let body = Body::from(status.to_string().into_bytes());
        Response::builder().status(code).body(body)
    });
    Client::new(service, "default")
}

#[tokio::test]
async fn refusal_contains_the_cause_of_a_failed_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let refused = refusal_of_cluster(&format!("{{server: 'http://{address}'}}")).await;
    assert!(refused.starts_with("Connection refused"), "{refused}");

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let issue = || rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let (own, foreign) = (issue(), issue());
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth();
    let key = PrivatePkcs8KeyDer::from(own.signing_key.serialize_der());
    let config = config.with_single_cert(vec![own.cert.der().clone()], key.into());
    let config = Arc::new(config.unwrap());
    let server = tokio::task::spawn_blocking(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut connection = rustls::ServerConnection::new(config).unwrap();
        connection.complete_io(&mut stream).unwrap_err()
    });
    let dir = tempfile::tempdir().unwrap();
    let ca = dir.path().join("ca.crt");
    std::fs::write(&ca, foreign.cert.pem()).unwrap();
    let ca = ca.display();
    let cluster = format!("{{server: 'https://{address}', certificate-authority: {ca}}}");
    let refused = refusal_of_cluster(&cluster).await;
    assert!(
        refused.starts_with("invalid peer certificate: "),
        "{refused}"
    );
    server.await.unwrap();
}

#[tokio::test]
async fn refusal_names_the_remedy_if_the_api_cannot_be_reached() {
    let service = tower::service_fn(|_: Request<Body>| async {
        Err::<Response<Body>, _>(std::io::Error::other("Connection refused"))
    });
    let failed = refusal(Client::new(service, "default")).await;
    assert_eq!(failed, format!("Connection refused{ADVICE}"));
}

#[tokio::test]
async fn refusal_contains_the_message_of_the_api_once() {
    let failed = refusal(failing_with(500, "etcd is down")).await;
    assert_eq!(failed, "etcd is down (500)");
    let forbidden = refusal(failing_with(403, "tokenreviews is forbidden")).await;
    assert_eq!(
        forbidden,
        "tokenreviews is forbidden; allow the account to create tokenreviews.authentication.k8s.io (ClusterRole \
         system:auth-delegator)"
    );
}
