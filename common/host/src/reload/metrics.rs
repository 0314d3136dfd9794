//! Metrics of reloaded files.

use std::sync::Arc;

use metrics::{Counter, Gauge};

use super::Expiry;
use crate::label_values;
use crate::telemetry::metrics::{Family, LabelSet, Registry};

label_values! {
    /// Outcome of a change of files.
    pub(super) enum Outcome("result") {
        /// The content is in use.
        Ok = "ok",
        /// The content cannot be used.
        Failed = "failed",
    }
}

label_values! {
    /// Kind of a certificate or a CRL in a file set.
    pub(super) enum Kind("certificate") {
        /// The program's own certificate, with its chain.
        Own = "own",
        /// The CAs that peers are verified with.
        Ca = "ca",
        /// The CRLs that peers are verified with.
        Crl = "crl",
    }
}

/// Series of all file sets of a program.
pub(super) struct FileMetrics<F> {
    expiry: Family<(F, Kind), Gauge>,
    reloads: Family<(F, Outcome), Counter>,
    in_use: Family<F, Gauge>,
}

impl<F: LabelSet> FileMetrics<F> {
    pub(super) fn new(registry: &Arc<Registry>) -> Self {
        Self {
            expiry: Family::new(
                registry,
                "culvert_certificate_expiry_seconds",
                "Time at which the first certificate or CRL of the kind expires, in seconds since the Unix epoch.",
            ),
            reloads: Family::new(
                registry,
                "culvert_reloads_total",
                "Changes of files, by result. A change that fails for the same reason again is not counted again. \
                 A check that takes more than 30 s counts as failed.",
            ),
            in_use: Family::new(
                registry,
                "culvert_last_reload_successful",
                "1 if the content of the files is in use, 0 while the last good content stays in use instead, \
                 or while a check takes more than 30 s.",
            ),
        }
    }

    /// Shows the series of a set after its first load.
    pub(super) fn start(&self, files: F, expiry: Expiry) {
        for outcome in Outcome::ALL {
            self.reloads.get((files, *outcome));
        }
        self.in_use(files, true);
        self.expires(files, Expiry::default(), expiry);
    }

    /// Replaces the expiry of the certificates. The value of a certificate that no longer exists is NaN, so that
    /// no alert compares it.
    pub(super) fn expires(&self, files: F, before: Expiry, now: Expiry) {
        let kinds = [
            (Kind::Own, before.own, now.own),
            (Kind::Ca, before.ca, now.ca),
            (Kind::Crl, before.crl, now.crl),
        ];
        for (kind, before, now) in kinds {
            let gauge = || self.expiry.get((files, kind));
            match now {
                Some(now) => gauge().set(now as f64),
                None if before.is_some() => gauge().set(f64::NAN),
                None => {}
            }
        }
    }

    /// Counts a change.
    pub(super) fn count(&self, files: F, outcome: Outcome) {
        self.reloads.get((files, outcome)).increment(1);
    }

    /// Sets whether the content of the files is in use.
    pub(super) fn in_use(&self, files: F, is_in_use: bool) {
        self.in_use.get(files).set(f64::from(u8::from(is_in_use)));
    }
}
