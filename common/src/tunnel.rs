//! Tunnel
