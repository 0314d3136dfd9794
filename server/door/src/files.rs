//! Names of the file sets that the proxy follows while it runs.

use culvert_host::label_values;
use culvert_host::reload;

label_values! {
    /// A set of files that are loaded together.
    pub enum Files("files") {
        /// Certificate, key and client CA of the CONNECT listener.
        Tunneling = "tunneling",
        /// Kubeconfig and the files that it names.
        Kubeconfig = "kubeconfig",
    }
}

/// Follows the proxy's files.
pub(crate) type Reloader = reload::Reloader<Files>;
