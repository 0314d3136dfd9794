//! The identity of an agent process, by which a server recognizes the successor of a process that has ended.
//!
//! ```text
//! culvert-process: <place>.<instance>
//! ```
//!
//! The kernel lets only one process at a time run in a place, so a new instance in a place proves that the earlier one
//! is gone.

use aws_lc_rs::digest::{Context, SHA256};
use aws_lc_rs::rand::{SecureRandom as _, SystemRandom};
use http::{HeaderMap, HeaderName, HeaderValue};

use super::hello::{hex, unhex};

/// Header of an agent's introduction.
const PROCESS: HeaderName = HeaderName::from_static("culvert-process");

/// Bytes of a place, and of an instance.
const ID_BYTES: usize = 16;

/// Identity of an agent process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    place: [u8; ID_BYTES],
    instance: [u8; ID_BYTES],
}

impl Process {
    /// Creates the identity of this process. `place` are the names of a resource that only one process at a time can
    /// have. Returns `None` if the system has no random numbers.
    pub fn new(place: &[&str]) -> Option<Self> {
        let mut context = Context::new(&SHA256);
        for name in place {
            context.update(&name.len().to_be_bytes());
            context.update(name.as_bytes());
        }
        let hash = context.finish();
        let mut instance = [0; ID_BYTES];
        SystemRandom::new().fill(&mut instance).ok()?;
        Some(Self {
            place: *hash.as_ref().first_chunk()?,
            instance,
        })
    }

    /// Adds the identity to an introduction.
    pub fn add_to(&self, headers: &mut HeaderMap) {
        let text = format!("{}.{}", hex(&self.place), hex(&self.instance));
        if let Ok(value) = HeaderValue::try_from(text) {
            headers.insert(PROCESS, value);
        }
    }

    /// Returns the identity in an introduction. Returns `None` without one, and for a value of a newer version.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let (place, instance) = headers.get(PROCESS)?.to_str().ok()?.split_once('.')?;
        Some(Self {
            place: unhex(place)?,
            instance: unhex(instance)?,
        })
    }

    /// Returns the place of the process.
    pub fn place(&self) -> [u8; ID_BYTES] {
        self.place
    }

    /// Returns true if the process runs in the place of an earlier process that has ended.
    pub fn replaces(&self, earlier: &Self) -> bool {
        self.place == earlier.place && self.instance != earlier.instance
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn only_another_process_in_the_same_place_replaces_a_process() {
        let new = |place: &[&str]| Process::new(place).unwrap();
        let first = new(&["boot", "network", "127.0.0.1:8093"]);
        let second = new(&["boot", "network", "127.0.0.1:8093"]);
        assert!(second.replaces(&first) && !first.replaces(&first));
        for other in [
            ["boot", "network", "127.0.0.1:8094"],
            ["bootn", "etwork", "127.0.0.1:8093"],
        ] {
            assert!(!new(&other).replaces(&first), "{other:?}");
        }
    }

    #[test]
    fn process_travels_as_a_header_and_other_values_are_ignored() {
        let process = Process::new(&["here"]).unwrap();
        let mut headers = HeaderMap::new();
        assert_eq!(Process::of(&headers), None);
        process.add_to(&mut headers);
        assert_eq!(Process::of(&headers), Some(process));
        let half = "00".repeat(ID_BYTES);
        for other in [
            "",
            "1",
            &half,
            &format!("{half}."),
            &format!("{half}.{half}0"),
        ] {
            headers.insert(PROCESS, other.parse().unwrap());
            assert_eq!(Process::of(&headers), None, "{other}");
        }
    }
}
