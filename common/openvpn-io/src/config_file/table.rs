//! The accepted options without effect and the refused options, with the reasons.

/// Returns the reason why an option needs no action; `None` for other options.
pub(super) fn not_needed(name: &str) -> Option<&'static str> {
    Some(match name {
        "dev-node" | "iproute" | "txqueuelen" | "tun-ipv6" | "ifconfig-noexec" | "route-noexec"
        | "ifconfig-nowarn" | "lladdr" | "disable-dco" | "route-metric" | "route-delay"
        | "route-method" | "route-gateway" | "allow-pull-fqdn" | "block-outside-dns"
        | "register-dns" | "dhcp-option" | "dns" | "redirect-gateway" | "redirect-private"
        | "route-ipv6" | "block-ipv6" | "max-routes" | "windows-driver" | "show-net-up" => {
            "no tun device and no routes are created, packets end in this process"
        }
        "script-security" | "up" | "down" | "up-delay" | "up-restart" | "down-pre" | "route-up"
        | "route-pre-down" | "ipchange" | "setenv" | "setenv-safe" => {
            "no scripts are run; NAT and routes are part of this process"
        }
        "user" | "group" | "persist-tun" | "persist-key" | "persist-local-ip"
        | "persist-remote-ip" | "mlock" | "nice" | "daemon" | "writepid" | "syslog" => {
            "the process runs in the foreground, without privileges from the start"
        }
        "verb"
        | "mute"
        | "log"
        | "log-append"
        | "status"
        | "status-version"
        | "errors-to-stderr"
        | "suppress-timestamps"
        | "machine-readable-output"
        | "echo"
        | "mute-replay-warnings"
        | "management"
        | "management-hold"
        | "management-log-cache"
        | "management-up-down" => "logs go to stderr (--v), state to /readyz and /metrics",
        "resolv-retry" => "names are resolved again at every attempt, forever",
        "nobind" | "float" | "bind" | "rebind" => "sockets are bound as the role requires",
        "multihome" => "answers over UDP always come from the address that the client has used",
        "auth-nocache" | "auth-retry" => "credentials are read from their file",
        "tcp-nodelay" | "socket-flags" => "TCP_NODELAY is always set",
        "sndbuf"
        | "rcvbuf"
        | "fast-io"
        | "bcast-buffers"
        | "tcp-queue-limit"
        | "mark"
        | "hash-size"
        | "passtos"
        | "mtu-disc"
        | "mtu-test"
        | "mtu-dynamic"
        | "ping-timer-rem"
        | "shaper"
        | "allow-recursive-routing" => "sockets and queues are sized automatically",
        "mssfix" => {
            "TCP connections in the tunnel use segments of at most 1360 bytes, over UDP 1320"
        }
        "keysize" => "the length of a key follows from its cipher",
        "dh" | "ecdh-curve" | "tls-groups" | "tls-cipher" | "tls-ciphersuites"
        | "tls-cert-profile" => {
            "TLS 1.2 and 1.3 with ECDHE and AES-GCM or ChaCha20-Poly1305 are used"
        }
        "replay-window" => "the window holds 1984 packets",
        "explicit-exit-notify" => "over UDP the peer is always notified",
        "allow-compression" | "comp-noadapt" => "nothing is ever compressed",
        "opt-verify" | "opt-mismatch" | "disable-occ" => {
            "differing options that matter end the session anyway"
        }
        "key-method"
        | "tls-exit"
        | "single-session"
        | "push-peer-info"
        | "compat-mode"
        | "providers"
        | "prng"
        | "use-prediction-resistance"
        | "test-crypto"
        | "gremlin" => "it has no meaning here",
        "inactive" => "idle tunnels are kept",
        _ => return None,
    })
}

/// Returns the reason why an option is refused, and the remedy; `None` for other options.
pub(super) fn refused(name: &str) -> Option<&'static str> {
    Some(match name {
        "fragment" => "its packet format is not implemented; remove it from both sides, or use TCP",
        "secret" => "static key mode has no certificates; use ca, cert and key on both sides",
        "tls-crypt-v2" => "per-client keys are not implemented; use tls-crypt or tls-auth",
        "plugin" => "no code is loaded into this process",
        "connection" => {
            "connection blocks are not read; write one `remote HOST PORT PROTO` for each"
        }
        "http-proxy" | "http-proxy-option" | "http-proxy-user-pass" | "socks-proxy" => {
            "servers are dialed directly; make the server reachable without the proxy"
        }
        "pkcs12" => "split the file with `openssl pkcs12` into ca, cert and key",
        "capath" | "extra-certs" => "put all certificates into the files of ca and cert",
        "pkcs11-id"
        | "pkcs11-id-management"
        | "pkcs11-providers"
        | "cryptoapicert"
        | "engine"
        | "askpass"
        | "management-external-key"
        | "management-external-cert" => {
            "the private key must be stored in a PEM file without encryption"
        }
        "tls-verify"
        | "tls-export-cert"
        | "auth-user-pass-verify"
        | "client-connect"
        | "client-disconnect"
        | "client-crresponse"
        | "learn-address"
        | "auth-gen-token"
        | "auth-gen-token-secret"
        | "management-client-auth"
        | "tls-crypt-v2-verify"
        | "management-client-pf"
        | "management-query-passwords"
        | "management-client" => {
            "scripts and management clients cannot authorize peers; use certificates and client-config-dir"
        }
        "ns-cert-type" | "tls-remote" | "remote-cert-ku" | "remote-cert-eku" => {
            "this check of the peer's certificate is not made; use remote-cert-tls and verify-x509-name"
        }
        "verify-hash" | "peer-fingerprint" | "x509-username-field" | "x509-track" => {
            "this check of the peer's certificate is not made; use ca and verify-x509-name"
        }
        "no-replay" | "no-iv" => "this option makes the tunnel insecure; remove it from both sides",
        "chroot" => "give all paths as this process sees them",
        "config" => "put everything into one file",
        "port-share" => "the port is not shared; put a load balancer in front",
        "server-bridge" | "ifconfig-ipv6-pool" | "server-ipv6" | "ifconfig-ipv6" => {
            "only IPv4 is carried, and no Ethernet frames"
        }
        "username-as-common-name" | "client-cert-not-required" => {
            "clients are identified by their certificates"
        }
        "bind-dev" | "vrf" => "sockets are not bound to devices",
        _ => return None,
    })
}
