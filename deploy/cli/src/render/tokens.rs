//! Issuers and audiences of service account tokens.
//!
//! KKP (`getApiserverFlags` in pkg/resources/apiserver/deployment.go) has one issuer: `spec.serviceAccount.issuer`, or the
//! URL of the API server. The audiences are `spec.serviceAccount.apiAudiences`, or the issuer, and the audience of the
//! agents.
//!
//! A running kube-apiserver keeps its issuers and audiences, because it refuses tokens of an issuer that it does not know.
//! The first issuer signs new tokens.

use culvert_host::net::dial::join_host_port;

use super::apiserver::Apiserver;
use super::finding::Findings;
use super::spec::ServiceAccount;
use super::target::Target;

/// Audience of the agents' tokens.
pub(super) const AUDIENCE: &str = "system:konnectivity-server";
const ISSUER_FLAG: &str = "--service-account-issuer";
const AUDIENCES_FLAG: &str = "--api-audiences";

/// Issuers and audiences of kube-apiserver.
pub(super) struct Tokens {
    issuers: Vec<String>,
    audiences: Vec<String>,
    /// True if the first issuer is unknown: neither in the cluster file nor a URL of the API server.
    is_unknown: bool,
}

impl Tokens {
    /// Returns KKP's values, added to the values of the `running` kube-apiserver.
    pub(super) fn new(target: &Target<'_>, running: Option<&Apiserver>) -> Self {
        let given = target.cluster.spec.service_account.clone();
        let ServiceAccount {
            issuer: named,
            api_audiences,
        } = given.unwrap_or_default();
        let wanted = match named.as_str() {
            "" => url(&target.external_name, target.apiserver_port),
            _ => named.clone(),
        };
        let running_issuers = running.map(|it| owned(it.values(ISSUER_FLAG)));
        let mut issuers = running_issuers.unwrap_or_default();
        let is_wanted = issuers.first() == Some(&wanted);
        let is_new = !is_wanted
            && issuers
                .first()
                .is_none_or(|first| !named.is_empty() || is_old_url(first, target, running));
        let is_unknown = !is_wanted && !is_new && !issuers.contains(&wanted);

        let lists = running.map_or_else(Vec::new, |it| it.values(AUDIENCES_FLAG));
        let lists = lists.iter().flat_map(|list| list.split(','));
        let mut audiences = owned(lists.collect());
        if audiences.is_empty() {
            // The default of kube-apiserver.
            audiences.clone_from(&issuers);
        }
        if is_new {
            issuers.retain(|issuer| *issuer != wanted);
            issuers.insert(0, wanted.clone());
        }
        let mut more = api_audiences;
        if more.is_empty() && is_new {
            more.push(wanted);
        }
        more.push(AUDIENCE.to_owned());
        for audience in more {
            if !audiences.contains(&audience) {
                audiences.push(audience);
            }
        }
        Self {
            issuers,
            audiences,
            is_unknown,
        }
    }

    /// Returns the flags of kube-apiserver.
    pub(super) fn flags(&self) -> Vec<String> {
        let issuers = self.issuers.iter();
        let mut flags: Vec<String> = issuers.map(|it| format!("{ISSUER_FLAG}={it}")).collect();
        flags.push(format!("{AUDIENCES_FLAG}={}", self.audiences.join(",")));
        flags
    }
}

/// Warns if kube-apiserver keeps an unknown issuer.
pub(super) fn check(target: &Target<'_>, running: &Apiserver, findings: &mut Findings) {
    let tokens = Tokens::new(target, Some(running));
    if tokens.is_unknown {
        findings.warn(
            "spec.serviceAccount.issuer",
            tokens.issuers.first(),
            "the running kube-apiserver has this issuer, which is not the URL of the API server, and the cluster file names \
             no issuer; kube-apiserver keeps it; set the field to the issuer that signs tokens",
        );
    }
}

/// Returns true for the URL of the API server before a change of its name or port.
fn is_old_url(issuer: &str, target: &Target<'_>, running: Option<&Apiserver>) -> bool {
    let values = |flag| running.map_or_else(Vec::new, |it| it.values(flag));
    let mut names = values("--external-hostname");
    names.push(&target.external_name);
    let ports = values("--secure-port");
    let mut ports = ports.iter().filter_map(|port| port.parse().ok());
    ports.any(|port| names.iter().any(|name| url(name, port) == issuer))
}

/// Returns KKP's URL of an API server.
fn url(name: &str, port: u16) -> String {
    format!("https://{}", join_host_port(name, port))
}

fn owned(list: Vec<&str>) -> Vec<String> {
    list.into_iter().map(str::to_owned).collect()
}
