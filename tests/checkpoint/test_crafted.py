"""Data files of a checkpoint from anywhere, with right checksums: a load either restores what the files hold, or is
refused in our own words, which name the folder or a file in it."""

import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from megatrain.checkpoint import manifest
from megatrain.checkpoint.load import load
from megatrain.checkpoint.save import save
from megatrain.errors import CheckpointError
from megatrain.system.atomic import crc_per_chunk
from support.fake_core import engine

STEMS = ("model", "residual", "exp_avg", "exp_avg_sq")
ROUNDS = 600


def target() -> SimpleNamespace:
    return engine("bf16", seed=2, num_hidden_layers=1)


def written(folder: Path, files: dict[str, bytes]) -> None:
    """A checkpoint of these files, whose manifest agrees with all of them."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    known = {name: crc_per_chunk(data) for name, data in files.items()}
    manifest.write(folder, 1, "bf16", known)


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and values of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header: Any, values: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + values


def random_bytes(data: bytes, chance: random.Random) -> bytes:
    """Anywhere in a file, its first number and its header among them."""
    changed = bytearray(data)
    limit = chance.choice([16, 400, len(data)])
    for _ in range(chance.randrange(1, 20)):
        changed[chance.randrange(limit)] = chance.randrange(256)
    return bytes(changed)


def random_values(data: bytes, chance: random.Random) -> bytes:
    """Values of which many are no number, behind a header that is right."""
    header, values = parts(data)
    return joined(header, chance.randbytes(len(values)))


def another_length(data: bytes, chance: random.Random) -> bytes:
    return chance.choice([data[: chance.randrange(len(data))], data + chance.randbytes(chance.randrange(1, 99)), b""])


def claimed_header(data: bytes, chance: random.Random) -> bytes:
    length = chance.choice([0, 1, 7, len(data), len(data) - 7, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1])
    return length.to_bytes(8, "little") + data[8:]


def changed_entry(data: bytes, chance: random.Random) -> bytes:
    """Shapes, offsets, types and names of tensors."""
    header, values = parts(data)
    name = chance.choice([one for one in header if one != "__metadata__"])
    entry = header[name]
    begin, end = entry["data_offsets"]
    huge = chance.choice([-1, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 1 << 90])
    what = chance.randrange(7)
    if what == 0:
        offsets = [[begin, huge], [huge, end], [end, begin], [begin + 2, end + 2], [begin], [], None, "0", [0.0, end]]
        entry["data_offsets"] = chance.choice(offsets)
    elif what == 1:
        entry["shape"] = chance.choice([[huge], [huge, huge], [0], [], None, entry["shape"][::-1], [[1]], "x", [True]])
    elif what == 2:
        entry["dtype"] = chance.choice(["F32", "BF16", "I16", "F16", "F64", "U8", "BOOL", "F8_E4M3", "X", "", None, 5])
    elif what == 3:
        header[chance.choice(["../secret", "/etc/passwd", "", "\0", "x", "__metadata__"])] = header.pop(name)
    elif what == 4:
        del header[name]
    elif what == 5:
        other = chance.choice([one for one in header if one not in (name, "__metadata__")])
        header[other], header[name] = header[name], header[other]
    else:
        header[name] = chance.choice([None, [], {}, 5, "x", json.loads("[" * 400 + "]" * 400)])
    return joined(header, values)


DAMAGES: list[Callable[[bytes, random.Random], bytes]] = [
    random_bytes,
    random_values,
    another_length,
    claimed_header,
    changed_entry,
    changed_entry,
]


def mixed(files: dict[str, bytes], chance: random.Random) -> None:
    """The same data under another name: beside its own, as one of several, or in place of another's."""
    stem, other = chance.choice(STEMS), chance.choice(STEMS)
    name = chance.choice([f"{other}-00001-of-00001", f"{other}-00002-of-00002", f"{other}-99999-of-00001", other])
    files[f"{name}.safetensors"] = files[f"{stem}.safetensors"]


def held(folder: Path, stem: str) -> dict[str, torch.Tensor]:
    """What the files of a plane hold, as another reader sees it."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob(f"{stem}.safetensors")) + sorted(folder.glob(f"{stem}-*.safetensors")):
        found |= safetensors.torch.load(path.read_bytes())
    return found


def is_what_the_files_hold(folder: Path, loaded: SimpleNamespace) -> None:
    planes = {stem: held(folder, stem) for stem in STEMS}
    for name, ref in loaded.decoder.tensors.items():
        mine = loaded.core.planes[ref.unit, ref.tensor]
        for stem, field in zip(STEMS, ("weights", "residual", "exp_avg", "exp_avg_sq"), strict=True):
            bits, wanted = getattr(mine, field), planes[stem][name]
            assert tuple(wanted.shape) == tuple(ref.shape)
            assert torch.equal(bits.view(torch.uint8), wanted.flatten().view(torch.uint8)), (name, stem)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a checkpoint, but for its manifest."""
    folder = tmp_path_factory.mktemp("saved") / "step-1"
    save(folder, engine("bf16", seed=1, num_hidden_layers=1), {"which": 1}, step=1)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != manifest.NAME}


def test_any_data_file_with_right_checksums_is_restored_as_it_is_or_refused_by_name(
    whole: dict[str, bytes], tmp_path: Path
) -> None:
    into, loads = target(), 0
    size = sum(len(data) for data in whole.values())
    for seed in range(ROUNDS):
        chance = random.Random(seed)
        files = dict(whole)
        for _ in range(chance.randrange(1, 3)):
            if chance.random() < 0.15:
                mixed(files, chance)
            else:
                name = f"{chance.choice(STEMS)}.safetensors"
                if files[name]:
                    files[name] = damaged(files[name], chance)
        folder = tmp_path / f"step-{seed}"
        written(folder, files)
        tracemalloc.start()
        try:
            load(folder, into, threads=1)
            refusal = None
        except CheckpointError as error:
            refusal = str(error)
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        # Python's own memory: a header as text and as objects.
        assert peak < 8 * size + (4 << 20), (seed, peak)
        if refusal is None:
            loads += 1
            is_what_the_files_hold(folder, into)
        else:
            assert str(folder) in refusal, (seed, refusal)
    assert 0.05 < loads / ROUNDS < 0.95, loads  # neither case is rare


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Falls back to random bytes where the header cannot be changed any more, because it was damaged before."""
    try:
        return chance.choice(DAMAGES)(data, chance)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return random_bytes(data, chance)
