//! The flags for the load balancer's Service: KKP's flags for lb-updater, and client-go's flags for leader
//! election.

use clap::Args;
use culvert_host::flags::values::{ValueError, go_bool};
use culvert_host::flags::{GoDuration, Problems};
use culvert_kube::election::Times;

use super::SourceFlags;
use crate::balancer_ports::BalancerOptions;
use crate::config::BalancerConfig;

const LB_NAME: &str = "nodeport-lb";
const LB_NAMESPACE: &str = "nodeport-proxy";

#[derive(Args, Debug)]
#[command(next_help_heading = "Load balancer")]
pub(super) struct BalancerFlags {
    /// Keep the ports of the LoadBalancer Service in front of the proxy up to date; with "only", do nothing
    /// else, as KKP's lb-updater: no Lease, no listeners for connections. Without this flag, --lb-name,
    /// --lb-namespace and --namespaced imply "only"
    #[arg(long, value_name = "BOOL|only", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", value_parser = work)]
    update_loadbalancer: Option<Work>,

    /// Let one of several replicas update the Service, elected with a Lease. Default: true with
    /// --update-loadbalancer=true, otherwise false
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", value_parser = go_bool)]
    leader_elect: Option<bool>,

    /// Name of the LoadBalancer Service
    #[arg(long, value_name = "NAME", default_value = LB_NAME)]
    lb_name: String,

    /// Namespace of the LoadBalancer Service and of the Lease
    #[arg(long, value_name = "NAMESPACE", default_value = LB_NAMESPACE)]
    lb_namespace: String,

    /// Give ports only to Services in --lb-namespace. Without --update-loadbalancer=true, watch only this namespace
    #[arg(long)]
    namespaced: bool,

    /// Time that other replicas wait for a silent leader
    #[arg(long, value_name = "DURATION", default_value = "15s")]
    leader_elect_lease_duration: GoDuration,

    /// Time that a leader continues without renewing the Lease
    #[arg(long, value_name = "DURATION", default_value = "10s")]
    leader_elect_renew_deadline: GoDuration,

    /// Time between reads of the Lease, and between renewals
    #[arg(long, value_name = "DURATION", default_value = "2s")]
    leader_elect_retry_period: GoDuration,
}

/// The work of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Routes,
    RoutesAndBalancer,
    Balancer,
}

/// Parses the value of `--update-loadbalancer`.
fn work(text: &str) -> Result<Work, ValueError> {
    if text == "only" {
        return Ok(Work::Balancer);
    }
    go_bool(text).map(|updates| match updates {
        true => Work::RoutesAndBalancer,
        false => Work::Routes,
    })
}

impl BalancerFlags {
    /// Converts the flags, together with the flags of the source and the ports for server names, QUIC, CONNECT
    /// and health. `None` without `--update-loadbalancer`.
    pub(super) fn config(
        &self,
        p: &mut Problems,
        source: &SourceFlags,
        [sni_port, sni_quic_port, tunneling_port, stats_port]: [u16; 4],
    ) -> Option<Box<BalancerConfig>> {
        let times = self.times(p);
        let work = self.work();
        if work == Work::Routes {
            if self.is_lb_updater() || self.leader_elect.is_some() || times != Times::default() {
                p.warn(
                    "--lb-name, --lb-namespace, --namespaced and --leader-elect... have no effect \
                     without --update-loadbalancer",
                );
            }
            return None;
        }
        let elects = self.leader_elect.unwrap_or(work == Work::RoutesAndBalancer);
        let election = elects.then_some(times);
        if election.is_none() && times != Times::default() {
            p.warn("--leader-elect-... have no effect without --leader-elect");
        }
        let namespace = &self.lb_namespace;
        p.require(source.config.is_empty(), || {
            "--update-loadbalancer works with the Services of a cluster: leave out --config"
                .to_owned()
        });
        p.require(!self.lb_name.is_empty() && !namespace.is_empty(), || {
            "--update-loadbalancer needs --lb-name and --lb-namespace".to_owned()
        });
        let watched = &source.namespace;
        p.require(watched.is_empty() || watched == namespace, || {
            format!(
                "--update-loadbalancer: the Service of --lb-namespace={namespace} is not watched \
                 with --namespace={watched}; make them equal, or leave out --namespace"
            )
        });
        p.require(stats_port != 0, || {
            "--update-loadbalancer needs an --envoy-stats-port other than 0 for the Service's port healthz"
                .to_owned()
        });
        Some(Box::new(BalancerConfig {
            only: work == Work::Balancer,
            namespace: namespace.clone(),
            name: self.lb_name.clone(),
            options: BalancerOptions {
                annotation: source.expose_annotation_key.clone(),
                sni_port,
                sni_quic_port,
                tunneling_port,
                stats_port,
                namespace: self.namespaced.then(|| namespace.clone()),
            },
            election,
        }))
    }

    /// Returns the namespace to watch without `--namespace`. The stock lb-updater with `--namespaced` may only list
    /// the Services of one namespace.
    pub(super) fn namespace(&self) -> Option<&str> {
        let is_alone = self.work() == Work::Balancer && self.namespaced;
        is_alone.then_some(self.lb_namespace.as_str())
    }

    fn work(&self) -> Work {
        let implied = match self.is_lb_updater() {
            true => Work::Balancer,
            false => Work::Routes,
        };
        self.update_loadbalancer.unwrap_or(implied)
    }

    /// True if a flag of the stock lb-updater is set. The flags of the ports belong to both programs.
    fn is_lb_updater(&self) -> bool {
        self.namespaced || self.lb_name != LB_NAME || self.lb_namespace != LB_NAMESPACE
    }

    fn times(&self, p: &mut Problems) -> Times {
        let [lease, renew, retry] = [
            self.leader_elect_lease_duration,
            self.leader_elect_renew_deadline,
            self.leader_elect_retry_period,
        ];
        let [lease_duration, renew_deadline, retry_period] =
            [lease, renew, retry].map(GoDuration::saturating);
        let falls = lease_duration > renew_deadline && renew_deadline > retry_period;
        p.require(falls && !retry_period.is_zero(), || {
            format!(
                "--leader-elect-lease-duration, --leader-elect-renew-deadline and \
                 --leader-elect-retry-period must each be longer than the next, and greater than 0; \
                 got {lease}, {renew} and {retry}"
            )
        });
        Times {
            lease_duration,
            renew_deadline,
            retry_period,
        }
    }
}
