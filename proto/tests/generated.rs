//! The check that the checked-in code is the code generated from the `.proto` files.

#![allow(clippy::expect_used)]

use std::path::Path;

#[test]
fn generated_code_is_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = tempfile::tempdir().expect("a temporary directory");
    let descriptors = protox::compile(["proto/agent/agent.proto"], [root]).expect("valid schema");
    tonic_prost_build::configure()
        .bytes(".")
        .build_transport(false)
        .emit_rerun_if_changed(false)
        .out_dir(out.path())
        .compile_fds(descriptors)
        .expect("code generation");
    let fresh = std::fs::read_to_string(out.path().join("_.rs")).expect("generated file");
    let path = root.join("src/generated.rs");
    if std::env::var_os("CULVERT_REGENERATE").is_some() {
        std::fs::write(&path, &fresh).expect("writing the generated file");
    }
    let current = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        current == fresh,
        "src/generated.rs is stale: run CULVERT_REGENERATE=1 cargo test -p culvert-proto"
    );
}
