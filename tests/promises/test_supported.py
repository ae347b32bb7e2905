"""The README's table of what is supported: its numbers are the code's, and what is not on it is refused by name.

Other systems are emulated. `tests/check_supported.py` runs the rows of Python, PyTorch and transformers.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

from megatrain import _core, compat
from megatrain.compat import GLIBC, PACKAGES, PYTHON, Platform, dotted
from support.hangs import HANG_SECONDS

ROOT = Path(__file__).parents[2]
HERE = Platform((3, 12, 1), "CPython", False, "Linux", "x86_64", 64, (2, 36))
ISAS = ["scalar", "avx2", "avx512"]


def row(title: str) -> str:
    """A row of the table."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Supported")[1].split("\n## ")[0]
    return next(line for line in text.splitlines() if line.startswith(f"| {title} |"))


def test_the_table_says_what_the_code_does() -> None:
    assert f"glibc {dotted(GLIBC)} or newer" in row("system")
    assert f"{dotted(PYTHON.oldest)} to {dotted(PYTHON.newest)}" in row("Python")
    for title, name in (("PyTorch", "torch"), ("transformers", "transformers")):
        span = PACKAGES[name]
        assert f"{dotted(span.oldest)} to {dotted(span.newest)}" in row(title)
    assert all(words in row("processor") for words in ("x86-64", "AVX-512", "AVX2", "neither"))


def test_every_check_that_the_table_names_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for title in ("system", "processor", "Python", "PyTorch", "transformers", "card"):
        checks = re.findall(r"`([^`]+)`", row(title))
        assert checks, title
        for check in checks:
            target = check.removeprefix("make ")
            assert f"\n{target}: " in makefile if check != target else (ROOT / check).is_file(), check


def test_the_package_asks_pip_for_the_same_floors() -> None:
    asked = {}
    for one in requires("megatrain") or []:
        if "extra ==" not in one and (match := re.match(r"[\w-]+", one)):
            asked[match.group().lower()] = one
    assert set(asked) == {name.lower() for name in PACKAGES}
    for name, span in PACKAGES.items():
        (oldest,) = re.findall(r">=([\d.]+)", asked[name.lower()])
        assert compat.numbers(oldest) == span.oldest, name
        assert re.findall(r"<([\d.]+)", asked[name.lower()]) == ([dotted(span.below)] if span.below else []), name
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">={dotted(PYTHON.oldest)}"' in project
    minors = range(PYTHON.oldest[1], PYTHON.newest[1] + 1)
    assert re.findall(r"Python :: (3\.\d+)", project) == [f"3.{minor}" for minor in minors]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"python": (3, 9, 18)}, "needs Python 3.10 or newer; this is 3.9.18"),
        ({"implementation": "PyPy"}, "runs on CPython; this is PyPy"),
        ({"python": (3, 13, 1), "free_threaded": True}, "free-threaded build of 3.13.1"),
        ({"system": "Darwin", "machine": "arm64", "glibc": ()}, "64-bit Linux on x86-64; this is Darwin on arm64"),
        ({"system": "Windows", "machine": "AMD64", "glibc": ()}, "this is Windows on AMD64"),
        ({"machine": "aarch64"}, "this is Linux on aarch64"),
        ({"machine": "i686", "bits": 32}, "this is Linux on i686 with a 32-bit Python"),
        ({"bits": 32}, "this is Linux on x86_64 with a 32-bit Python"),
        ({"glibc": ()}, "needs the GNU C library, 2.34 or newer; this system has another one"),
        ({"glibc": (2, 31)}, "needs glibc 2.34 or newer; this system has 2.31"),
    ],
)
def test_what_is_not_on_the_table_is_refused_by_name(changed: dict[str, object], said: str) -> None:
    assert said in compat.refusal(HERE._replace(**changed))  # type: ignore[arg-type]


@pytest.mark.parametrize("changed", [{}, {"python": (3, 10, 0)}, {"python": (3, 99, 0)}, {"glibc": (2, 34)}])
def test_what_is_on_the_table_or_newer_is_not_refused(changed: dict[str, object]) -> None:
    assert compat.refusal(HERE._replace(**changed)) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pretended", "said"),
    [
        ("import platform; platform.machine = lambda: 'aarch64'", "this is Linux on aarch64"),
        ("import platform; platform.system = lambda: 'Darwin'", "this is Darwin on x86_64"),
        ("import os; os.confstr = lambda name: None", "needs the GNU C library"),
        ("import os; os.confstr = lambda name: 'glibc 2.28'", "this system has 2.28"),
        ("import sys; sys.maxsize = 2**31 - 1", "32-bit Python"),
        ("import sys; sys.version_info = (3, 9, 18, 'final', 0)", "needs Python 3.10 or newer; this is 3.9.18"),
    ],
)
def test_the_import_is_refused_with_that_sentence_before_the_native_module_is_looked_for(
    pretended: str, said: str
) -> None:
    code = f"""
import sys
sys.modules["megatrain._core"] = None  # looking for it would be an ImportError that says something else
{pretended}
try:
    import megatrain
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert said in done.stdout, done.stdout + done.stderr


def test_the_readme_and_the_core_crate_say_the_same_of_aarch64() -> None:
    for document in (ROOT / "README.md", ROOT / "crates" / "megatrain-core" / "src" / "lib.rs"):
        said = " ".join(document.read_text(encoding="utf-8").replace("//!", "").split())
        assert "alone compiles for AArch64 Linux too, where it is not tested" in said.replace("alone it ", "alone ")


@pytest.mark.parametrize(
    ("system", "libc", "processor", "bits", "built"),
    [
        ("linux", "gnu", "x86_64", "64", True),
        ("linux", "musl", "x86_64", "64", False),
        ("linux", "gnu", "aarch64", "64", False),
        ("linux", "gnu", "x86", "32", False),
        ("macos", "", "aarch64", "64", False),
        ("windows", "msvc", "x86_64", "64", False),
    ],
)
@pytest.mark.skipif(shutil.which("rustc") is None, reason="rustc is not installed")
def test_a_build_for_another_target_is_refused_by_name(
    tmp_path: Path, system: str, libc: str, processor: str, bits: str, built: bool
) -> None:
    script = tmp_path / "build"
    source = ROOT / "crates" / "megatrain-py" / "build.rs"
    subprocess.run(["rustc", "--edition", "2024", "-o", str(script), str(source)], check=True)
    target = {"OS": system, "ENV": libc, "ARCH": processor, "POINTER_WIDTH": bits}
    environment = os.environ | {f"CARGO_CFG_TARGET_{name}": value for name, value in target.items()}
    done = subprocess.run([str(script)], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == built
    if not built:
        assert f"this target is: {system} {libc} {processor} {bits}" in done.stderr


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("torch", "2.8.1", "torch 2.8.1 is installed; megatrain works with 2.9 or newer: pip install 'torch>=2.9'"),
        ("transformers", "5.16.9", "megatrain works with 5.17 up to, not including, 6"),
        ("transformers", "6.0.0", "pip install 'transformers>=5.17,<6'"),
        ("numpy", "1.25.2", "pip install 'numpy>=1.26'"),
        ("torch", "unknown", "torch unknown is installed"),
    ],
)
def test_a_release_outside_the_range_is_refused_by_name(name: str, version: str, said: str) -> None:
    assert said in compat.package_refusal(name, version)


@pytest.mark.parametrize("version", ["2.9", "2.9.0+cu128", "2.15.3", "2.99.0", "3.0"])
def test_a_release_inside_or_above_the_range_is_not_refused(version: str) -> None:
    assert compat.package_refusal("torch", version) == ""
    newer = compat.untried(version, PACKAGES["torch"])
    assert bool(newer) == (version in ("2.99.0", "3.0"))


TRAINS = """
import hashlib, torch
from megatrain import _core
from support.reference import batches, build, engine

torch.set_num_threads(1)
digest = hashlib.sha256()
for precision in ("fp32", "bf16"):
    ours = engine(build("llama"), precision=precision)
    for seed in range(3):
        out = ours.step(batches(2, seed=seed))
        digest.update(repr((out.loss, out.grad_norm)).encode())
    for name in ours.decoder.tensors:
        state = ours.optimizer_state(name)
        for value in (ours.weight(name), state["exp_avg"], state["exp_avg_sq"]):
            digest.update(value.contiguous().view(torch.int32).numpy().tobytes())
print(_core.isa(), digest.hexdigest())
"""


def trained_with(isa: str) -> list[str]:
    """The kernels that ran, and a digest of everything that three steps in either precision leave."""
    environment = os.environ | {"MEGATRAIN_ISA": isa, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", TRAINS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def scalar() -> str:
    """The digest that the scalar kernels leave."""
    return trained_with("scalar")[1]


@pytest.mark.parametrize("isa", ISAS[1:])
def test_training_gives_the_same_bits_with_every_instruction_set(isa: str, scalar: str) -> None:
    if ISAS.index(isa) > ISAS.index(_core.isa()):
        pytest.skip(f"{isa}: not on this machine")
    assert trained_with(isa) == [isa, scalar]
