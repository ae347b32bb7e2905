"""Checkpoints and model folders from anywhere: what is wrong in them is an error of ours, nothing outside is opened,
and no value in them decides how much memory is taken."""

import copy
import json
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.checkpoint import checkpoint, manifest
from megatrain.checkpoint.export import export_checkpoint
from megatrain.checkpoint.load import load
from megatrain.checkpoint.save import save
from megatrain.errors import CheckpointError, ConfigError
from megatrain.system.atomic import crc_per_chunk
from megatrain.system.safetensors_io import DamagedFile, read_folder
from megatrain.weights.source import open_weights, resolve
from support.fake_core import engine

OPENED: list[str] | None = None
"""Paths that were opened while a list is here; an audit hook cannot be taken away again."""


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if OPENED is not None and event == "open" and isinstance(arguments[0], str | bytes):
        OPENED.append(str(arguments[0]))


sys.addaudithook(_audit)


@pytest.fixture
def opened() -> Iterator[list[str]]:
    global OPENED
    OPENED = []
    yield OPENED
    OPENED = None


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "step-1"
    save(folder, engine("bf16", seed=1, num_hidden_layers=1), {"which": 1}, step=1)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy by hard links, beside files that nobody may open; replaced files are new ones."""
    made = tmp_path / "inside" / "step-1"
    made.mkdir(parents=True)
    for path in saved.iterdir():
        (made / path.name).hardlink_to(path)
    (tmp_path / "secret").write_bytes(b"x" * 10)
    (tmp_path / "inside" / "secret").write_bytes(b"x" * 10)
    return made


def rewrite(path: Path, text: str) -> None:
    path.unlink()
    path.write_text(text)


def seal(folder: Path, described: Any) -> None:
    """Writes a manifest with its right checksum."""
    if isinstance(described, dict):
        described["crc32"] = manifest._own_sum(described)
    rewrite(folder / "manifest.json", json.dumps(described))


def resealed_state(folder: Path, state: Any) -> None:
    """Writes another state.json, and a manifest that agrees with it."""
    text = state if isinstance(state, str) else json.dumps(state)
    rewrite(folder / "state.json", text)
    described = json.loads((folder / "manifest.json").read_text())
    described["files"]["state.json"] = {"bytes": len(text.encode()), "crc32": crc_per_chunk(text.encode())}
    seal(folder, described)


def everything_that_reads(folder: Path, out: Path) -> list[Callable[[], Any]]:
    return [
        lambda: load(folder, target()),
        lambda: export_checkpoint(folder, out / "auto", overwrite=True),
        lambda: export_checkpoint(folder, out / "fp32", dtype="fp32", overwrite=True),
        lambda: checkpoint.Checkpoint.open(folder).types(),
    ]


def target() -> SimpleNamespace:
    return engine("bf16", seed=2, num_hidden_layers=1)


def is_refused(folder: Path, tmp_path: Path, opened: list[str], words: str | None = None) -> None:
    """Every reader raises CheckpointError, and opens nothing that is not in the folder."""
    untouched = target()
    with pytest.raises(CheckpointError, match=words):
        load(folder, untouched)
    assert untouched.core.equals(target().core)
    for read in everything_that_reads(folder, tmp_path / "out"):
        with pytest.raises(CheckpointError):
            read()
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    assert not [path for path in opened if path.endswith(("secret", "passwd"))]


NAMES = [
    "../secret",
    "../../secret",
    "sub/../../secret",
    "./state.json",
    "/etc/passwd",
    "//etc/passwd",
    "",
    ".",
    "..",
    "sub//file",
    "sub/",
    "a\\b",
    "a\0b",
    "manifest.json",
    "\ud800",
    "x" * 5000,
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leads_out_of_the_folder_is_refused_and_not_opened(
    folder: Path, tmp_path: Path, opened: list[str], name: str
) -> None:
    described = json.loads((folder / "manifest.json").read_text())
    described["files"][name] = {"bytes": 10, "crc32": crc_per_chunk(b"x" * 10)}
    try:
        seal(folder, described)
    except UnicodeEncodeError:  # no checksum can be right
        rewrite(folder / "manifest.json", json.dumps(described))
    is_refused(folder, tmp_path, opened)


def deep(depth: int) -> str:
    return "[" * depth + "]" * depth


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no checksums": lambda m: m["files"]["model.safetensors"].update(crc32=[]),
    "too many checksums": lambda m: m["files"]["model.safetensors"].update(crc32=[1, 2]),
    "checksums that are no list": lambda m: m["files"]["model.safetensors"].update(crc32=5),
    "checksums that are no numbers": lambda m: m["files"]["model.safetensors"].update(crc32=["1"]),
    "a size that is none": lambda m: m["files"]["model.safetensors"].update(bytes=1.5),
    "a size below 0": lambda m: m["files"]["model.safetensors"].update(bytes=-1),
    "a size beyond every disk": lambda m: m["files"]["model.safetensors"].update(bytes=1 << 70),
    "no size": lambda m: m["files"]["model.safetensors"].pop("bytes"),
    "a list for a file": lambda m: m["files"].update({"model.safetensors": []}),
    "a list for files": lambda m: m.update(files=[]),
    "no files": lambda m: m.pop("files"),
    "none for files": lambda m: m.update(files=None),
    "no state.json": lambda m: m["files"].pop("state.json"),
    "no config.json": lambda m: m["files"].pop("config.json"),
    "no weights": lambda m: m["files"].pop("model.safetensors"),
    "no residuals": lambda m: m["files"].pop("residual.safetensors"),
    "no moments": lambda m: m["files"].pop("exp_avg.safetensors"),
    "a step that is none": lambda m: m.update(step="1"),
    "a step below 0": lambda m: m.update(step=-1),
    "another precision": lambda m: m.update(precision="fp16"),
    "the other precision": lambda m: m.update(precision="fp32"),
    "no precision": lambda m: m.pop("precision"),
    "a version of another kind": lambda m: m.update(version={}),
    "other chunks": lambda m: m.update(chunk_bytes=1),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_with_its_right_checksum_is_still_checked(
    folder: Path, tmp_path: Path, opened: list[str], case: str
) -> None:
    described = json.loads((folder / "manifest.json").read_text())
    MANIFESTS[case](described)
    seal(folder, described)
    is_refused(folder, tmp_path, opened)


@pytest.mark.parametrize("text", ["", "[]", "null", "3", '"x"', "{", deep(100_000), '{"files":' + deep(5000) + "}"])
def test_a_manifest_that_is_no_object_is_refused(folder: Path, tmp_path: Path, opened: list[str], text: str) -> None:
    rewrite(folder / "manifest.json", text)
    is_refused(folder, tmp_path, opened, "manifest.json is damaged")


def test_a_manifest_or_file_that_is_a_folder_or_a_pipe_is_refused(
    folder: Path, tmp_path: Path, opened: list[str]
) -> None:
    import os

    for name in ("manifest.json", "state.json", "model.safetensors"):
        (folder / name).rename(tmp_path / "kept")
        (folder / name).mkdir()
        is_refused(folder, tmp_path, opened)
        (folder / name).rmdir()
        os.mkfifo(folder / name)
        is_refused(folder, tmp_path, opened)
        (folder / name).unlink()
        (tmp_path / "kept").rename(folder / name)
    load(folder, target())


STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda _: [],
    "text": lambda _: "",
    "nested too deeply": lambda _: deep(100_000),
    "no step counts": lambda s: s.pop("step_counts"),
    "a list of step counts": lambda s: s.update(step_counts=[1]),
    "a step count below 0": lambda s: s["step_counts"].update({"model.norm.weight": -1}),
    "a step count that is none": lambda s: s["step_counts"].update({"model.norm.weight": "7"}),
    "a tensor that is not there": lambda s: s["step_counts"].update({"model.none": 7}),
    "a tensor left out": lambda s: s["step_counts"].pop("model.norm.weight"),
    "no state": lambda s: s.pop("state"),
    "a list for the state": lambda s: s.update(state=[]),
    "a layout that is none": lambda s: s.update(layout={"model.norm.weight": 5}),
    "a layout of other parts": lambda s: s.update(layout={"a": {"shape": [32], "blocks": [{"name": "b"}]}}),
    "a layout beyond the tensor": lambda s: s.update(layout={"x": ["model.norm.weight", 1 << 60, [32]]}),
}


@pytest.mark.parametrize("case", [name for name in STATES if "layout" not in name])
def test_a_state_with_its_right_checksum_is_still_checked(
    folder: Path, tmp_path: Path, opened: list[str], case: str
) -> None:
    state = json.loads((folder / "state.json").read_text())
    changed = STATES[case](state)
    resealed_state(folder, changed if case in ("a list", "text", "nested too deeply") else state)
    for read in everything_that_reads(folder, tmp_path / "out"):
        with pytest.raises(CheckpointError):
            read()
    assert not [path for path in opened if path.endswith("secret")]


@pytest.mark.parametrize("case", [name for name in STATES if "layout" in name])
def test_a_layout_that_is_not_one_of_this_model_is_not_used(folder: Path, tmp_path: Path, case: str) -> None:
    state = json.loads((folder / "state.json").read_text())
    STATES[case](state)
    resealed_state(folder, state)
    load(folder, target())
    export_checkpoint(folder, tmp_path / "out")
    assert {e.name for shard in read_folder(tmp_path / "out") for e in shard.entries} == set(target().decoder.tensors)


# ----------------------------------------------------------------------------------------------------------- fuzzing

VALUES = [None, True, -1, 0, 1, 1 << 31, 1 << 64, -(1 << 70), 1.5, float("nan"), "", "../secret", "/etc/passwd", [], {}]


def mutated(value: Any, chance: random.Random) -> Any:
    """A JSON value in which something was replaced, removed, doubled or nested."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        changed = dict(value)
        what = chance.random()
        if what < 0.15:
            del changed[key]
        elif what < 0.3:
            changed[str(chance.choice(["../secret", "/etc/passwd", "state.json", "\0", "x"]))] = changed.pop(key)
        else:
            changed[key] = mutated(changed[key], chance)
        return changed
    if isinstance(value, list) and value and chance.random() < 0.85:
        place = chance.randrange(len(value))
        new = [*value] * 2 if chance.random() < 0.2 else [*value]
        new[place] = mutated(new[place], chance)
        return new
    if chance.random() < 0.05:
        return json.loads(deep(500))
    return copy.deepcopy(chance.choice(VALUES))


def bounded(read: Callable[[], Any], allowed: tuple[type[Exception], ...]) -> None:
    """Runs a reader, which may raise errors of ours, and take no more than 32 MiB of Python's memory."""
    tracemalloc.start()
    try:
        read()
    except allowed:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 32 << 20


def inside(opened: list[str]) -> bool:
    return not [path for path in opened if path.endswith(("secret", "passwd"))]


def test_any_manifest_or_state_loads_rightly_or_is_refused(folder: Path, opened: list[str]) -> None:
    described = json.loads((folder / "manifest.json").read_text())
    state = json.loads((folder / "state.json").read_text())
    wanted = target()
    load(folder, wanted)
    into = target()
    for seed in range(400):
        chance = random.Random(seed)
        if seed % 2:
            seal(folder, mutated(mutated(described, chance), chance))
        else:
            seal(folder, copy.deepcopy(described))
            resealed_state(folder, mutated(mutated(state, chance), chance))

        def read() -> None:
            load(folder, into)

        bounded(read, (CheckpointError,))
        bounded(lambda: checkpoint.verify(folder), ())
    assert inside(opened)


def test_any_index_is_read_rightly_or_refused(tmp_path: Path, opened: list[str]) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from support.fake_core import llama

    place = tmp_path / "model"
    settings = {k: v for k, v in llama(num_hidden_layers=1).items() if k != "model_type"}
    AutoModelForCausalLM.from_config(LlamaConfig(**settings)).save_pretrained(place, max_shard_size="20KB")
    (tmp_path / "secret").write_bytes(b"x")
    index = place / "model.safetensors.index.json"
    described = json.loads(index.read_text())
    opened.clear()
    for seed in range(300):
        chance = random.Random(seed)
        index.write_text(json.dumps(mutated(mutated(described, chance), chance)))
        bounded(lambda: open_weights(resolve(str(place))), (ConfigError,))
    for text in ("", "[]", deep(100_000), '{"weight_map":' + deep(50_000) + "}"):
        index.write_text(text)
        with pytest.raises(ConfigError, match="is not an index of shards"):
            open_weights(resolve(str(place)))
    for name in ("x" * 300, "a\0b", "../secret", "/etc/passwd", "..", "a\\b", 5, None, []):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(ConfigError, match="which is not a file name"):
            open_weights(resolve(str(place)))
    assert inside(opened)


def test_any_header_is_read_rightly_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    described = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }

    def write(text: bytes, length: int | None = None) -> None:
        path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(32))

    def read() -> None:
        found = {entry.name: entry for shard in read_folder(tmp_path) for entry in shard.entries}
        for entry in found.values():  # whatever is accepted is in the file
            assert 8 <= entry.begin <= entry.begin + entry.nbytes <= path.stat().st_size

    write(json.dumps(described).encode())
    read()
    for seed in range(500):
        chance = random.Random(seed)
        write(json.dumps(mutated(mutated(described, chance), chance)).encode())
        bounded(read, (DamagedFile,))
        text = bytearray(json.dumps(described).encode())
        for _ in range(chance.randrange(1, 4)):
            text[chance.randrange(len(text))] = chance.randrange(256)
        write(bytes(text))
        bounded(read, (DamagedFile,))
    for shape in ([-1], [-2, -3], ["2", "3"], [6.0], [True, 6], [1 << 62, 4], [2, 3, 0], None, 6, {}):
        changed = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 24]}}
        write(json.dumps(changed).encode())
        with pytest.raises(DamagedFile):
            read_folder(tmp_path)
    for length in (1 << 63, (1 << 64) - 1, 1 << 40, 100_000_001, 0):
        write(b"{}", length)
        with pytest.raises(DamagedFile):
            read_folder(tmp_path)
    write(deep(100_000).encode())
    with pytest.raises(DamagedFile):
        read_folder(tmp_path)


def test_values_that_are_not_finite_are_the_checkpoints_fault(folder: Path) -> None:
    """A frozen tensor of a crafted file that is trained from now on."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    planes = {"model": weights} | {
        stem: load_file(folder / f"{stem}.safetensors") for stem in ("residual", "exp_avg", "exp_avg_sq")
    }
    described = json.loads((folder / "manifest.json").read_text())
    for stem, tensors in planes.items():
        if stem != "model":
            del tensors["model.norm.weight"]
        path = folder / f"{stem}.safetensors"
        path.unlink()
        save_file(tensors, path, {"format": "pt"})
        described["files"][path.name] = {"bytes": path.stat().st_size, "crc32": crc_per_chunk(path.read_bytes())}
    seal(folder, described)
    state = json.loads((folder / "state.json").read_text())
    del state["step_counts"]["model.norm.weight"]
    resealed_state(folder, state)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: not finite"):
        load(folder, target())
