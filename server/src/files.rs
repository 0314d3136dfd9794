//! Names of the file sets that the server follows while it runs.

use culvert_host::label_values;
use culvert_host::reload;

label_values! {
    /// A set of files that are loaded together.
    pub enum Files("files") {
        /// Certificate, key and CA of the front end.
        Frontend = "frontend",
        /// Certificate, key and CA of the listener for agents.
        Agent = "agent",
        /// Certificate, key and CA of the admin listener.
        Admin = "admin",
        /// Certificate, key, CA and CRL of the OpenVPN listeners.
        Openvpn = "openvpn",
        /// Kubeconfig and the files that it names.
        Kubeconfig = "kubeconfig",
    }
}

/// Follows the server's files.
pub(crate) type Reloader = reload::Reloader<Files>;
