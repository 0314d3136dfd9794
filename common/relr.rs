//! The build script of the server's and the agent's programs.
//!
//! The script makes the linker pack the relocations of position-independent code. A packed relocation takes
//! about one bit instead of 24 bytes, and a program reads half a MiB less at startup.
//!
//! glibc 2.36 (2022) and later versions load such programs. The script omits the option if the build machine
//! has an older glibc or compiles for another target. GNU ld before 2.38 warns about the option and ignores
//! it.

use std::env::var;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=TARGET");
    let native = var("HOST").is_ok_and(|host| var("TARGET").is_ok_and(|target| host == target));
    if native && glibc().is_some_and(|version| version >= (2, 36)) {
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}

/// Returns the glibc version of the build machine; `None` if `getconf` does not report a glibc version.
fn glibc() -> Option<(u32, u32)> {
    let output = Command::new("getconf")
        .arg("GNU_LIBC_VERSION")
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let (major, minor) = text.trim().strip_prefix("glibc ")?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}
