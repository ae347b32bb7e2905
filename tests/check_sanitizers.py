"""The Rust core under AddressSanitizer, ThreadSanitizer and Miri, which only a nightly Rust has: `make test-sanitize`.

Some minutes, most of them compiling. Tests of the core's own modules, and those that drive the memory of a whole engine
on the simulated device: what a sanitizer watches, without the longest property tests. What cannot be run here for want
of a component is named, with the command that installs it, and makes the exit status 1.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = "x86_64-unknown-linux-gnu"
# Files of crates/megatrain-core/tests.
MEMORY = ("device", "disk", "disk_state", "forks", "kernels", "memory", "saves", "store", "turn")
THREADS = ("device", "disk_state", "store", "turn")
# A ring that is given up keeps its memory mapped, which is the point of this test and a leak.
LEAKS = "memory_stays_mapped_when_pieces_are_under_way_as_a_callback_panics"
# Without calls of the system that Miri does not know.
INTERPRETED = ("host::pool", "schedule", "adamw::scalars", "layout")
NOT_INTERPRETED = "workers_can_be_bound_to_cores"


def main() -> int:
    if text(["rustc", "+nightly", "--version"]) is None:
        print("sanitizers need a nightly Rust: rustup toolchain install nightly --component rust-src --component miri")
        return 2
    sysroot = Path(text(["rustc", "+nightly", "--print", "sysroot"]) or "")
    left_out = []
    cargo = ["cargo", "+nightly", "test", "--locked", "-p", "megatrain-core", "--target", TARGET]
    tests = ["--lib", *(word for name in MEMORY for word in ("--test", name))]
    run("AddressSanitizer", [*cargo, *tests, "--", "--skip", LEAKS], "address")
    run("AddressSanitizer", [*cargo, "--lib", LEAKS], "address", ASAN_OPTIONS="detect_leaks=0")

    if (sysroot / "lib/rustlib/src/rust/library/Cargo.lock").exists():
        # The standard library has to be instrumented too, or its locks order nothing.
        tests = ["-Zbuild-std", "--lib", *(word for name in THREADS for word in ("--test", name))]
        run("ThreadSanitizer", [*cargo, *tests], "thread")
    else:
        left_out.append("ThreadSanitizer: rustup +nightly component add rust-src")

    if text(["cargo", "+nightly", "miri", "--version"]) is not None:
        miri = ["cargo", "+nightly", "miri", "test", "--locked", "-p", "megatrain-core", "--lib", "--", *INTERPRETED]
        run("Miri", [*miri, "--skip", NOT_INTERPRETED], None, MIRIFLAGS="-Zmiri-disable-isolation")
    else:
        left_out.append("Miri: rustup +nightly component add rust-src miri")

    for line in left_out:
        print(f"not run, {line}")
    return 1 if left_out else 0


def text(command: list[str]) -> str | None:
    """What a command prints, or None where there is no such command or component."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def run(name: str, command: list[str], sanitizer: str | None, **environment: str) -> None:
    """Runs tests under one sanitizer, built on its own; ends this process where they fail."""
    folder = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / (sanitizer or "miri")
    # Optimised a little: the tests end in a fraction of the time.
    environment |= {"CARGO_TARGET_DIR": str(folder), "CARGO_PROFILE_DEV_OPT_LEVEL": "1", "PROPTEST_CASES": "8"}
    if sanitizer is not None:
        environment["RUSTFLAGS"] = f"-Zsanitizer={sanitizer}"
    print(f"{name}: {' '.join(command)}", flush=True)
    status = subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=False).returncode
    if status != 0:
        sys.exit(f"{name} found something, or its tests failed (exit status {status})")


if __name__ == "__main__":
    sys.exit(main())
