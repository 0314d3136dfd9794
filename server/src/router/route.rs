//! The route of new dials, and the state of the tunnels that the route depends on.

use crate::tunnel::{Health, Kind, Mode};

/// Route of new dials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    /// Preferred tunnel when both are equally healthy.
    pub first: Kind,
    /// True if the other tunnel is the fallback.
    pub both: bool,
}

/// State of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Side {
    /// Readiness for dials.
    pub health: Health,
    /// Number of dials and connections.
    pub in_use: usize,
}

/// State of the tunnels at a point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct View {
    /// The tunnel of agents.
    pub konnectivity: Side,
    /// The tunnel of OpenVPN clients, if the server has one.
    pub openvpn: Option<Side>,
}

// === impl Route ===

impl Route {
    /// Returns a route with one tunnel only.
    pub(crate) fn only(first: Kind) -> Self {
        Self { first, both: false }
    }

    /// Returns the fallback tunnel.
    pub(crate) fn second(self) -> Option<Kind> {
        self.both.then(|| self.first.other())
    }

    /// Returns true if dials may use a tunnel.
    pub(crate) fn includes(self, kind: Kind) -> bool {
        self.both || self.first == kind
    }
}

// === impl View ===

impl View {
    /// Returns the state of a tunnel; `None` if the server does not have the tunnel.
    pub(crate) fn side(&self, kind: Kind) -> Option<Side> {
        match kind {
            Kind::Konnectivity => Some(self.konnectivity),
            Kind::Openvpn => self.openvpn,
        }
    }

    /// Returns true if the server has the tunnel of a mode.
    pub(crate) fn allows(&self, mode: Mode) -> bool {
        self.side(mode.tunnel()).is_some()
    }

    /// Returns true if the tunnel has a healthy peer.
    pub(crate) fn is_healthy(&self, kind: Kind) -> bool {
        let side = self.side(kind);
        side.is_some_and(|side| side.health == Health::Healthy)
    }
}
