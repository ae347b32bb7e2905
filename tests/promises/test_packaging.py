"""What is shipped: the core's dependencies, the crates' and the source archives' contents, the wheel's libraries."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from megatrain import _core
from megatrain.compat import GLIBC, dotted, numbers
from support.hangs import HANG_SECONDS

ROOT = Path(__file__).parents[2]
CRATES = ROOT / "crates"

needs_cargo = pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not installed")
needs_maturin = pytest.mark.skipif(
    shutil.which("maturin", path=str(Path(sys.executable).parent)) is None, reason="maturin is not in this environment"
)


def run(*command: str, cwd: Path = ROOT, **environment: str) -> str:
    """Runs a command that must succeed; what it printed."""
    answer = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def dependencies(crate: str) -> set[str]:
    """The names of every crate that `crate` is built with, on any platform."""
    tree = run("cargo", "tree", "--locked", "-p", crate, "-e", "normal,build", "--target", "all", "--prefix", "none")
    return {line.split()[0] for line in tree.splitlines() if line.strip()}


@needs_cargo
def test_the_core_knows_neither_cuda_nor_python() -> None:
    core = dependencies("megatrain-core")
    assert "serde" in core
    assert not {name for name in core if re.search(r"cuda|nvidia|libloading|pyo3|python", name)}


@needs_cargo
def test_the_cuda_device_knows_no_python() -> None:
    cuda = dependencies("megatrain-cuda")
    assert {"cudarc", "megatrain-core"} <= cuda
    assert not {name for name in cuda if "py" in name}


@needs_cargo
@pytest.mark.parametrize("crate", ["megatrain-core", "megatrain-cuda"])
def test_a_packaged_crate_holds_every_source_file(crate: str) -> None:
    listed = set(run("cargo", "package", "--locked", "--allow-dirty", "--list", "-p", crate).split())
    folder = CRATES / crate
    sources = {str(path.relative_to(folder)) for path in (folder / "src").rglob("*") if path.is_file()}
    assert sources
    assert sources <= listed


@needs_cargo
def test_the_packaged_crates_build_from_their_archives(tmp_path: Path) -> None:
    run(
        "cargo", "package", "--locked", "--allow-dirty", "-p", "megatrain-core", "-p", "megatrain-cuda",
        CARGO_TARGET_DIR=str(tmp_path),
    )  # fmt: skip
    assert len(list((tmp_path / "package").glob("megatrain-*.crate"))) == 2


@needs_cargo
@needs_maturin
def test_the_source_archive_builds_once_unpacked(tmp_path: Path) -> None:
    maturin = str(Path(sys.executable).parent / "maturin")
    run(maturin, "sdist", "--out", str(tmp_path))
    (archive,) = tmp_path.glob("megatrain-*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames()}
        # From Python 3.10.12, 3.11.4 and 3.12 on; required without a warning from 3.12 on.
        tar.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    wanted = {str(path.relative_to(ROOT)) for path in CRATES.glob("*/src/**/*.*")}
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / "python").rglob("*.py*") if path.suffix != ".pyc"}
    wanted |= {str(path.relative_to(ROOT)) for path in CRATES.glob("*/build.rs")}
    wanted |= {"Cargo.toml", "Cargo.lock", "pyproject.toml", "LICENSE", "README.md", "python/megatrain/py.typed"}
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*.*")}
    assert wanted <= names, sorted(wanted - names)
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    run("cargo", "check", "--locked", "-p", "megatrain-py", cwd=unpacked, CARGO_TARGET_DIR=str(tmp_path / "target"))


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf (binutils) is not installed")
def test_the_native_module_links_no_cuda_library() -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", str(_core.__file__)))
    assert any(name.startswith("libc.so") for name in needed)
    assert {name.split(".so")[0] for name in needed} <= {
        "libc",
        "libm",
        "libgcc_s",
        "libpthread",
        "libdl",
        "ld-linux-x86-64",
    }


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf (binutils) is not installed")
def test_the_native_module_needs_no_newer_c_library_than_the_readme_says() -> None:
    needed = re.findall(r"\bGLIBC_(\d+(?:\.\d+)+)", run("readelf", "--version-info", "--wide", str(_core.__file__)))
    assert needed
    newest = max(numbers(version) for version in needed)
    assert newest <= GLIBC, f"glibc {dotted(newest)} is needed; the README promises {dotted(GLIBC)}"


def test_wheels_are_built_for_the_c_library_that_the_readme_says() -> None:
    tag = "_".join(map(str, GLIBC))
    assert f"--compatibility manylinux_{tag}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_installed_package_is_typed_and_has_its_command() -> None:
    package = Path(_core.__file__).parent
    assert (package / "py.typed").is_file()
    assert (package / "_core.pyi").is_file()
    scripts = {point.name: point.value for point in distribution("megatrain").entry_points}
    assert scripts["megatrain"] == "megatrain.cli:main"


@pytest.mark.skipif(
    not (Path(sys.executable).parent / "stubtest").exists(), reason="mypy's stubtest is not in this environment"
)
def test_the_stub_says_what_the_native_module_holds(tmp_path: Path) -> None:
    stubtest = Path(sys.executable).parent / "stubtest"
    answer = subprocess.run(
        [str(stubtest), "megatrain._core", "--concise"],
        cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr


def ptxas() -> Path | None:
    """The PTX assembler that triton brings along."""
    try:
        import triton
    except ImportError:
        return None
    found = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    return found if found.exists() else None


@pytest.mark.skipif(ptxas() is None, reason="no PTX assembler: triton is not installed")
@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("kernel", sorted(path.name for path in CRATES.rglob("*.ptx")))
def test_the_kernels_assemble_for_every_generation(kernel: str, architecture: str, tmp_path: Path) -> None:
    (source,) = CRATES.rglob(kernel)
    run(str(ptxas()), "-v", f"-arch={architecture}", "-o", str(tmp_path / "kernel.cubin"), str(source))


@pytest.mark.parametrize("kernel", sorted(path.name for path in CRATES.rglob("*.ptx")))
def test_the_kernels_round_every_operation_and_flush_nothing(kernel: str) -> None:
    (source,) = CRATES.rglob(kernel)
    code = re.sub(r"//.*", "", source.read_text())
    assert ".ftz" not in code
    assert "approx" not in code
    arithmetic = re.findall(r"^\s*(?:@\S+ )?((?:add|sub|mul|fma|div|sqrt)\.\S*f(?:32|64))\b", code, re.MULTILINE)
    assert arithmetic
    assert all(".rn." in operation for operation in arithmetic), arithmetic
