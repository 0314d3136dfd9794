//! Name of the file set that the node tunnel follows while it runs.

use culvert_host::label_values;
use culvert_host::reload;

label_values! {
    /// A set of files that are loaded together.
    pub enum Files("files") {
        /// CA of the proxy, and certificate and key for the proxy.
        Proxy = "proxy",
    }
}

/// Follows the node tunnel's files.
pub(crate) type Reloader = reload::Reloader<Files>;
