"""Every way in which published checkpoints store tensors, against transformers' own conversion of real values."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from megatrain.checkpoint.export import save_pretrained
from megatrain.weights.hf_layout import describe, published, read_layout, transposed, whole
from megatrain.weights.loader import load
from megatrain.weights.source import open_weights, resolve
from support.fake_core import MemoryCore
from support.families import BASE, DEEPSEEK, MOE

ROUTED: dict[str, Any] = {**BASE, **MOE, "num_experts": 4, "head_dim": 8}
TOWER: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}

KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "one tensor, sliced by size": ("sarvam_moe", ROUTED, "query_key_value"),
    "one tensor, halved": ("hrm_text", {**ROUTED, "num_hidden_layers": 4}, "gate_up_proj"),
    "one tensor, sliced by layer type": ("lara_mini", {**ROUTED, "num_hidden_layers": 4}, "linear_attn.in_proj"),
    "several tensors put in one": ("olmo_hybrid", {**ROUTED, "num_hidden_layers": 4}, "conv1d"),
    "experts' rows interleaved": (
        "inkling2_text",
        {**ROUTED, "unpadded_vocab_size": 96, "n_routed_experts": 4},
        "w13_weight",
    ),
    "one tensor, its heads' pairs interleaved": (
        "kimi_k25",
        {"text_config": {**BASE, **DEEPSEEK}, "vision_config": TOWER},
        "wqkv",
    ),
    "heads' pairs interleaved": ("mistral_large4", {"text_config": {**BASE, **DEEPSEEK}, "vision_config": TOWER}, "wq"),
}
"""Kind of model, its configuration, and part of the name of a tensor that the library has otherwise."""


def built(kind: str, changes: dict[str, Any]) -> PreTrainedModel:
    """A tiny stock model with random weights."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"the installed transformers has no {kind}")
    config = AutoConfig.for_model(kind, **changes)
    sees = getattr(config, "vision_config", None) is not None
    torch.manual_seed(0)
    model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def stand_in(model: PreTrainedModel) -> Any:
    """What reading and writing ask of a decoder, for models that the engine does not train too."""
    values = dict(model.state_dict(keep_vars=True))
    first: dict[int, str] = {}
    aliases = {name: first[id(value)] for name, value in values.items() if first.setdefault(id(value), name) != name}
    refs = {
        name: SimpleNamespace(
            name=name,
            unit=0,
            tensor=index,
            shape=tuple(value.shape),
            dtype=value.dtype,
            role="trainable" if isinstance(value, torch.nn.Parameter) else "frozen",
            pieces=(),
        )
        for index, (name, value) in enumerate(values.items())
        if name not in aliases
    }
    made = SimpleNamespace(
        tensors=refs,
        aliases=aliases,
        tied=bool(aliases),
        model=model,
        config=model.config,
        precision="fp32",
        layout=None,
    )
    made.set_layout = lambda layout: setattr(made, "layout", layout)
    return made


@pytest.mark.parametrize("way", KINDS)
def test_what_stock_writes_is_read_and_written_again(way: str, tmp_path: Path) -> None:
    kind, changes, otherwise = KINDS[way]
    model = built(kind, changes)
    model.save_pretrained(tmp_path / "in")
    decoder = stand_in(model)
    core = MemoryCore(decoder)
    load(open_weights(resolve(str(tmp_path / "in"))), decoder, core)
    for name, ref in decoder.tensors.items():
        assert torch.equal(core.planes[0, ref.tensor].weights.view(ref.shape), model.state_dict()[name]), name
    given = load_file(tmp_path / "in" / "model.safetensors")
    assert any(otherwise in name and name not in decoder.tensors for name in given)
    save_pretrained(decoder, core, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], value) for name, value in given.items())
    save_pretrained(decoder, core, tmp_path / "library", layout="library")
    assert load_file(tmp_path / "library" / "model.safetensors").keys() == decoder.tensors.keys()


@pytest.mark.parametrize("way", KINDS)
def test_every_layout_is_the_same_after_a_checkpoint(way: str) -> None:
    kind, changes, _ = KINDS[way]
    model = built(kind, changes)
    shapes = {name: tuple(ref.shape) for name, ref in stand_in(model).tensors.items()}
    layout = published(model, shapes)
    assert describe(layout, model, shapes) == "published"
    renamed = {f"source.{name}": stored for name, stored in layout.items()}
    described = describe(renamed, model, shapes)
    assert read_layout(described, shapes) == renamed


def test_a_large_transposed_tensor_is_read_and_written_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatrain.system import safetensors_io
    from megatrain.weights import loader

    monkeypatch.setattr(loader, "_TURNED_BYTES", (1000, 1000))
    monkeypatch.setattr(safetensors_io, "CHUNK_BYTES", 7 * 4096)
    model = torch.nn.Module()
    model.register_parameter("experts", torch.nn.Parameter(torch.randn(5, 48, 36)))
    decoder = stand_in(model_with_config(model))
    values = {"experts": model.get_parameter("experts").detach().transpose(1, 2).contiguous()}
    save_file(values, tmp_path / "model.safetensors")
    core = MemoryCore(decoder)
    source = open_weights(resolve(str(tmp_path)))
    source.transposed = frozenset(values)  # type: ignore[misc]
    load(source, decoder, core)
    assert torch.equal(core.planes[0, 0].weights.view(5, 48, 36), model.get_parameter("experts"))
    out = torch.empty(values["experts"].numel())
    decoder.set_layout({"experts": transposed("experts", (5, 48, 36))})

    def read(_stem: str, entry: Any, start: int, piece: torch.Tensor) -> None:
        from megatrain.weights.hf_layout import fill

        fill(decoder.layout[entry.name], start, piece, lambda _, at, into: core.read(0, 0, "weights", into, at))

    planned = safetensors_io.plan_shards(
        tmp_path, "again", [safetensors_io.Entry("experts", torch.float32, (5, 36, 48))]
    )
    safetensors_io.write_shards(planned, read)
    out = load_file(tmp_path / "again.safetensors")["experts"]
    assert torch.equal(out, values["experts"])


def model_with_config(model: torch.nn.Module) -> Any:
    model.config = None  # type: ignore[assignment]
    return model


def test_blocks_of_a_transposed_tensor() -> None:
    stored = transposed("w", (4, 3, 2))
    assert stored.shape == (4, 2, 3)
    assert stored.blocks[0].sizes == (4, 2, 3)
    assert stored.blocks[0].order == (0, 2, 1)
    assert transposed("w", (4, 1, 2)).blocks == whole("w", (4, 1, 2)).blocks
