//! Records the compiler that builds the harness: without it, a measurement cannot be repeated.

use std::process::Command;

fn main() {
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = Command::new(compiler).arg("--version").output();
    let version = version.map_or_else(|_| String::new(), |out| String::from_utf8_lossy(&out.stdout).into_owned());
    println!("cargo::rustc-env=TASUKI_BENCH_RUSTC={}", version.trim());
    println!("cargo::rustc-env=TASUKI_BENCH_PROFILE={}", std::env::var("PROFILE").unwrap_or_default());
    println!("cargo::rerun-if-changed=build.rs");
}
