"""Runs the rows of the README's table: every Python that it names, with the oldest and the newest releases it allows.

    python tests/check_supported.py            all rows, every test that a version could break
    python tests/check_supported.py --short    the oldest and the newest row, fewer tests (for CI)

Run by an environment that has the package and maturin (`make test-supported`), which builds the wheel once. Each row
makes an environment, installs that wheel with the row's releases, checks that they are the ones installed, and there
runs tests, `megatrain doctor`, a short training run, the same again to a later step, an export, and stock transformers
on what was exported. A Python below the table must refuse by name. An interpreter that is not on this machine (on the
PATH or among pyenv's) is reported as not found and is no failure. An environment takes about 6 GB and is removed after
its row.
"""

import argparse
import dataclasses
import email
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from megatrain import compat
from megatrain.compat import GLIBC, MACHINE, PACKAGES, PYTHON, dotted, numbers
from support.runs import settings

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
# What a version breaks first: the native module, exactness, models, files, the command line. With the newest releases
# the whole suite runs as well (`make test`), so what another Python breaks is enough for their row.
SHORT_NEWEST = (
    "engine/test_native", "engine/test_native_engine", "engine/test_dlpack", "promises/test_equivalence",
    "models/test_decoder", "checkpoint/test_checkpoint", "promises/test_resume_bits", "cli/test_commands",
    "cli/test_doctor", "promises/test_supported", "data/test_dataset",
)  # fmt: skip
SHORT_OLDEST = (
    *SHORT_NEWEST, "promises/test_plans_do_not_show", "data/test_chat", "data/test_train_tokenizer",
    "checkpoint/test_export", "config/test_config", "training/test_trainer", "training/test_resume", "cli/test_signals",
)  # fmt: skip
INSTALLED = (
    "promises/test_packaging.py::test_the_installed_package_is_typed_and_has_its_command",
    "promises/test_packaging.py::test_the_native_module_links_no_cuda_library",
    "promises/test_packaging.py::test_the_native_module_needs_no_newer_c_library_than_the_readme_says",
)
LOADS = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"], info
ids = AutoTokenizer.from_pretrained(sys.argv[1])("the quick brown fox", return_tensors="pt").input_ids
assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]
"""
TOOLS = ("pytest>=8.4", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "psutil>=6")
VERSIONS = """
import importlib.metadata, json, sys
print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:]}))
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """One interpreter, and which releases it runs with."""

    python: str
    releases: str
    """`oldest` allowed by the wheel; `newest` of the table that this Python can have; `refused`."""

    @property
    def name(self) -> str:
        """As it is asked for and reported."""
        return f"{self.python}-{self.releases}"


class Failed(Exception):
    """A row's check did not pass; what it said."""


def main() -> int:
    """Prints a line for each row; the exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="oldest and newest row, fewer tests")
    parser.add_argument("--row", action="append", metavar="PYTHON-RELEASES", help="only this one: 3.10-oldest")
    parser.add_argument("--work", type=Path, help="where the environments are made (default: a temporary folder)")
    parser.add_argument("--jobs", default="2", help="processes that share the tests")
    args = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)  # a row sees the package that is installed in it, and no other
    chosen = rows()
    if args.row:
        chosen = [row for row in chosen if row.name in args.row]
    elif args.short:
        chosen = [row for row in chosen if row.releases != "newest" or row.python == dotted(PYTHON.newest)]
    outcomes = {}
    with tempfile.TemporaryDirectory(prefix="megatrain-supported-", dir=args.work and args.work.resolve()) as folder:
        wheel = build_wheel(Path(folder))
        for row in chosen:
            began = time.monotonic()
            try:
                outcome = run_row(row, wheel, Path(folder) / "row", args)
            except (Failed, subprocess.TimeoutExpired) as error:
                print(f"--- {row.name}\n{error}", flush=True)
                outcome = "FAILED"
            outcomes[row] = outcome
            print(f"=== {row.name}: {outcome} ({time.monotonic() - began:.0f} s)", flush=True)
            shutil.rmtree(Path(folder) / "row", ignore_errors=True)
    print(f"\nsupported: {wheel.name}")
    for row, outcome in outcomes.items():
        print(f"  {row.name:16} {outcome}")
    if all(outcome == NOT_FOUND for outcome in outcomes.values()):
        print("  nothing was run: none of these Pythons is on this machine")
    return int("FAILED" in outcomes.values())


NOT_FOUND = "not found here"


def rows() -> list[Row]:
    """All rows, in the order in which they are run."""
    (major, oldest), (_, newest) = PYTHON.oldest, PYTHON.newest
    minors = range(oldest, newest + 1)
    return [
        Row(f"{major}.{oldest - 1}", "refused"),
        Row(f"{major}.{oldest}", "oldest"),
        *(Row(f"{major}.{minor}", "newest") for minor in reversed(minors)),
    ]


def interpreter(python: str) -> str | None:
    """An interpreter of that release: on the PATH, else one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = sorted(pyenv.glob(f"{python}.*/bin/python"), key=lambda path: len(path.parts[-3]))
    for candidate in (shutil.which(f"python{python}"), *map(str, reversed(found))):
        if candidate is None:
            continue
        # pyenv leaves commands on the PATH for releases that are not switched on: they fail.
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
        if done.stdout.strip() == python:
            return candidate
    return None


def build_wheel(folder: Path) -> Path:
    """The one wheel of all rows; its tag must be what the table promises."""
    call(sys.executable, "-m", "maturin", "build", "--release", "--locked", "--out", str(folder), cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    oldest, glibc = "".join(map(str, PYTHON.oldest)), "_".join(map(str, GLIBC))
    wanted = f"-cp{oldest}-abi3-manylinux_{glibc}_{MACHINE}.whl"
    if not wheel.name.endswith(wanted):
        raise SystemExit(f"the wheel is {wheel.name}; the table promises one that ends in {wanted}")
    return wheel


def run_row(row: Row, wheel: Path, folder: Path, args: argparse.Namespace) -> str:
    """One row; what came out."""
    base = interpreter(row.python)
    if base is None:
        return NOT_FOUND
    if row.releases == "refused":
        return refuses(base, wheel, folder)
    call(base, "-m", "venv", str(folder / "venv"))
    python = str(folder / "venv" / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    call(*pip, str(wheel), *requirements(wheel, row.releases), *TOOLS)
    call(python, "-m", "pip", "check")
    versions = json.loads(call(python, "-c", VERSIONS, *PACKAGES))
    if row.releases == "newest":
        must_be_the_newest(versions, exactly=row.python == dotted(PYTHON.newest))
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    short = SHORT_OLDEST if row.releases == "oldest" else SHORT_NEWEST
    files = [TESTS / f"{name}.py" for name in short] if args.short else sorted(TESTS.rglob("test_*.py"))
    # The rest of test_packaging needs Cargo, not another Python.
    chosen = [str(path) for path in files if path.name != "test_packaging.py"]
    chosen += [str(TESTS / test) for test in INSTALLED]
    command = [python, "-m", "pytest", "--quiet", "-n", args.jobs, "-p", "no:cacheprovider", *chosen]
    summary = call(*command, cwd=ROOT, timeout=3600, **environment).strip().splitlines()[-1]
    trains(folder, environment)
    shown = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "numpy"))
    return f"passed with {shown} ({re.sub(r' in .*', '', summary).strip('= ')})"


def requirements(wheel: Path, releases: str) -> Iterator[str]:
    """What pip is asked for beside the wheel: each requirement of the wheel at its floor, or at the table's newest."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    for line in metadata.get_all("Requires-Dist") or []:
        if "extra ==" in line:
            continue
        package, floor = re.match(r"([\w-]+).*?>=([\d.]+)", line).groups()
        newest = PACKAGES[package].newest if package in PACKAGES else ()
        if releases == "oldest":
            yield f"{package}=={floor}"
        elif newest:
            yield f"{package}<{dotted((*newest[:-1], newest[-1] + 1))}"


def must_be_the_newest(versions: dict[str, str], *, exactly: bool) -> None:
    """No release is newer than the table says; exactly the table's where this Python has not been left behind."""
    for name, span in PACKAGES.items():
        found = versions[name]
        if compat.untried(found, span) or (exactly and numbers(found)[: len(span.newest)] < span.newest):
            raise Failed(f"{name} {found} was installed; the newest of the table is {dotted(span.newest)}")


def trains(folder: Path, environment: dict[str, str]) -> None:
    """The commands a user gives, with the installed script: examined, trained, gone on with, exported, loaded."""
    bin_folder, run = folder / "venv" / "bin", folder / "run"
    command = str(bin_folder / "megatrain")
    answer = json.loads(call(command, "doctor", "--json", cwd=folder, **environment))
    tried = [one for one in answer["findings"] if "newer than" in one["advice"]]
    if not answer["usable"] or tried:
        raise Failed(f"megatrain doctor: {answer['findings']}")
    (folder / "config.yaml").write_text(json.dumps(settings(folder)), encoding="utf-8")
    call(command, "train", "config.yaml", "train.steps=3", cwd=folder, **environment)
    said = call(command, "train", "config.yaml", "--json", cwd=folder, **environment)
    last = json.loads(said.strip().splitlines()[-1])
    if last["step"] != 6:
        raise Failed(f"the run did not go on from step 3 to step 6: {last}")
    call(command, "export", str(run), "exported", "--dtype", "fp32", cwd=folder, **environment)
    call(str(bin_folder / "python"), "-c", LOADS, "exported", cwd=folder, **environment)


def refuses(python: str, wheel: Path, folder: Path) -> str:
    """An older Python: pip does not take the wheel, and an import from the tree ends in one sentence."""
    folder.mkdir()
    pip = [python, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        raise Failed("pip installed the wheel")
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'python')!r}); import megatrain"
    done = subprocess.run([python, "-B", "-c", code], capture_output=True, text=True, check=False)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if not last.startswith("ImportError") or "needs Python" not in last:
        raise Failed(f"the import said: {done.stderr}")
    return f"refused by pip and by import ({last.removeprefix('ImportError: ')})"


def call(*command: str, cwd: Path | None = None, timeout: float = 1200, **environment: str) -> str:
    """Runs a command; its standard output, or Failed with the end of all it said."""
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    if done.returncode:
        raise Failed(f"{' '.join(command)[:300]}\nexit {done.returncode}\n{(done.stdout + done.stderr)[-6000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
