"""`docs/checkpoints.md`: the script on the page reads what we write, and the page names every file and key."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.checkpoint.save import save
from support.fake_core import MemoryCore, engine
from support.tiny_tokenizer import tiny_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
SCRIPT = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs the script of the page, in which nothing of megatrain is imported."""
    (text,) = SCRIPT
    assert "megatrain" not in re.sub(r"#.*", "", text)
    assert "torch" not in text
    assert len([line for line in text.splitlines() if line.strip()]) <= 36
    monkeypatch.setattr(sys, "argv", ["read", str(folder)])
    names: dict[str, Any] = {}
    exec(compile(text, "docs/checkpoints.md", "exec"), names)
    return names


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("shard", [20_000, 5_000_000_000])
@pytest.mark.parametrize("freeze", [[], ["*layers.0*"]])
def test_the_script_of_the_page_reads_masters_moments_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, shard: int, freeze: list[str]
) -> None:
    from megatrain.system import safetensors_io

    monkeypatch.setattr(safetensors_io.plan_shards, "__defaults__", (shard,))
    source = engine(precision, tied=True, seed=1, freeze=freeze)
    save(tmp_path / "step-7", source, {}, step=7)
    found = read(tmp_path / "step-7", monkeypatch)
    core: MemoryCore = source.core
    assert set(found["weights"]) == set(source.decoder.tensors)
    for name, ref in source.decoder.tensors.items():
        planes = core.planes[ref.unit, ref.tensor]
        wanted = core.master(ref) if ref.role == "trainable" else planes.weights.float().view(ref.shape)
        assert np.array_equal(found["weights"][name], wanted.numpy()), name
        assert found["counts"].get(name) == (7 if ref.role == "trainable" else None)
        for moment in ("exp_avg", "exp_avg_sq"):
            if ref.role == "trainable":
                values = getattr(planes, moment).view(ref.shape)
                assert torch.equal(torch.tensor(found["planes"][moment][name]), values)
            else:
                assert name not in found["planes"][moment]


def test_the_script_of_the_page_notices_a_changed_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "step-7", engine("bf16", seed=1), {}, step=7)
    path = tmp_path / "step-7" / "residual.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(AssertionError, match="residual"):
        read(tmp_path / "step-7", monkeypatch)


def test_the_page_names_every_file_and_key(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    save(tmp_path / "step-7", engine("bf16", seed=1), {}, step=7, tokenizer=tokenizer)
    for path in (tmp_path / "step-7").iterdir():
        if not path.name.startswith(("tokenizer", "chat_template", "special_tokens", "added_tokens")):
            assert path.stem in PAGE, path.name
    for name in ("manifest.json", "state.json"):
        for key in json.loads((tmp_path / "step-7" / name).read_text()):
            assert f"`{key}`" in PAGE or f'"{key}"' in PAGE, key
