//! Names of the file sets that the agent follows while it runs.

use culvert_host::label_values;
use culvert_host::reload;

label_values! {
    /// A set of files that are loaded together.
    pub enum Files("files") {
        /// CA of the servers, and certificate and key for the servers.
        Server = "server",
        /// CA, certificate and key of the OpenVPN client.
        Openvpn = "openvpn",
        /// The kubeconfig, for the leases of servers.
        Kubeconfig = "kubeconfig",
    }
}

/// Follows the agent's files.
pub(crate) type Reloader = reload::Reloader<Files>;
