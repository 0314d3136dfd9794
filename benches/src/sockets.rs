//! Sockets of running programs, from the kernel's tables.

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;

/// Column of the inode in the tables of `/proc/PID/net`, see proc(5).
const INODE: usize = 9;

/// Returns the rows of a table in `/proc/PID/net` that belong to sockets of the process.
pub(crate) fn rows(pid: u32, table: &str) -> io::Result<Vec<String>> {
    let inodes = inodes(pid)?;
    let path = PathBuf::from(format!("/proc/{pid}/net/{table}"));
    // A machine without IPv6 has no tables for IPv6.
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines = text.lines().skip(1);
    let own = lines.filter(|line| {
        let inode = line.split_whitespace().nth(INODE);
        inode.is_some_and(|inode| inodes.contains(inode))
    });
    Ok(own.map(str::to_owned).collect())
}

/// Returns the local TCP ports of the process.
pub(crate) fn tcp_ports(pid: u32) -> io::Result<HashSet<u16>> {
    let mut ports = HashSet::new();
    for table in ["tcp", "tcp6"] {
        let rows = rows(pid, table)?;
        ports.extend(rows.iter().filter_map(|row| local_port(row)));
    }
    Ok(ports)
}

/// Returns the local port of a row: `0: 0100007F:1F90 ...`.
fn local_port(row: &str) -> Option<u16> {
    let local = row.split_whitespace().nth(1)?;
    let (_, port) = local.rsplit_once(':')?;
    u16::from_str_radix(port, 16).ok()
}

fn inodes(pid: u32) -> io::Result<HashSet<String>> {
    let mut inodes = HashSet::new();
    for file in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        // The program may have closed the file meanwhile.
        let link = std::fs::read_link(file?.path()).unwrap_or_default();
        let link = link.to_string_lossy();
        let inode = link.strip_prefix("socket:[");
        inodes.extend(
            inode
                .and_then(|rest| rest.strip_suffix(']'))
                .map(str::to_owned),
        );
    }
    Ok(inodes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn ports_of_this_process_are_found_until_they_are_closed() {
        let own = std::process::id();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let client = TcpStream::connect(at).unwrap();
        let source = client.local_addr().unwrap().port();
        let ports = tcp_ports(own).unwrap();
        assert!(ports.contains(&at.port()) && ports.contains(&source));
        drop((client, listener));
        let ports = tcp_ports(own).unwrap();
        assert!(!ports.contains(&source));
        tcp_ports(u32::MAX).unwrap_err();
    }
}
