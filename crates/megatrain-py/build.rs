//! Refuses every target but the one of the README's table, by name and before anything else fails.
use std::{env, process};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let target = |name: &str| env::var(format!("CARGO_CFG_TARGET_{name}")).unwrap_or_default();
    let found = ["OS", "ENV", "ARCH", "POINTER_WIDTH"].map(target);
    if found != ["linux", "gnu", "x86_64", "64"] {
        let found = found.join(" ");
        eprintln!("megatrain is built for 64-bit Linux with the GNU C library on x86-64; this target is: {found}");
        process::exit(1);
    }
}
