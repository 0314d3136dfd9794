//! Identities, trust and cipher suites.
