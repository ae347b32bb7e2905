"""An export has the keys of the model's source, also from a run's checkpoint and after it was resumed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import megatrain
from megatrain.checkpoint import checkpoint, export
from megatrain.checkpoint.export import export_checkpoint
from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.system import hardware
from megatrain.training import forecast
from support import private_memory
from support.families import build
from support.gguf_files import write_gguf
from support.reference import batches
from support.vision import SEEING, see

VOCAB = 88
"""Ids of text; models that see have those of images above, of 96."""
Values = dict[str, torch.Tensor]


def without_base_prefix(values: Values, _: torch.nn.Module) -> Values:
    return {name.removeprefix("transformer."): value for name, value in values.items()}


def with_tied_head(values: Values, _: torch.nn.Module) -> Values:
    return {**values, "lm_head.weight": values["model.embed_tokens.weight"].clone()}


def fused(_: Values, model: torch.nn.Module) -> Values:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def half_fused(values: Values, model: torch.nn.Module) -> Values:
    """The first layer's experts as the library holds them, the second's apart."""
    own = fused(values, model)
    first = {name: value for name, value in own.items() if ".layers.0." in name}
    return first | {name: value for name, value in values.items() if ".layers.0." not in name}


def transposed(values: Values, _: torch.nn.Module) -> Values:
    """Fused experts as Qwen3-VL-MoE is published."""
    return {
        name: value.transpose(1, 2).contiguous() if ".experts." in name else value for name, value in values.items()
    }


def made(name: str) -> torch.nn.Module:
    """A tiny stock model of a family."""
    return (see(name) if name in SEEING else build(name)).eval()


SOURCES: dict[str, tuple[str, Callable[[Values, torch.nn.Module], Values]]] = {
    "experts apart": ("mixtral", lambda values, _: values),
    "experts fused": ("mixtral", fused),
    "experts of one layer fused": ("qwen2-moe", half_fused),
    "fused as published": ("gpt-oss", lambda values, _: values),
    "experts transposed": ("qwen3-vl-moe", transposed),
    "experts as the library holds them": ("qwen3-vl-moe", lambda values, _: values),
    "without the base's prefix": ("gpt2", without_base_prefix),
    "tied head beside the embedding": ("qwen2", with_tied_head),
}


def read(folder: Path) -> megatrain.Engine:
    return megatrain.Engine.from_pretrained(
        str(folder), precision="fp32", device="cpu", memory={"gpu": "1GiB", "host": "1GiB"}
    )


@pytest.mark.parametrize("source", SOURCES)
def test_keys_equal_the_sources_from_the_engine_its_checkpoint_and_a_resumed_run(source: str, tmp_path: Path) -> None:
    name, laid_out = SOURCES[source]
    model = made(name)
    model.save_pretrained(tmp_path / "in")
    given = laid_out(load_file(tmp_path / "in" / "model.safetensors"), model)
    save_file(given, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    step = batches(1, rows=1, seq=8, vocab=VOCAB)
    with read(tmp_path / "in") as ours:
        ours.save_pretrained(tmp_path / "same")
        ours.step(step)
        ours.save(tmp_path / "step-1", step=1)
        ours.save_pretrained(tmp_path / "engine")
        wanted = {key: ours.weight(key) for key in ours.decoder.tensors}
    export_checkpoint(tmp_path / "step-1", tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "step-1", tmp_path / "library", layout="library")
    with megatrain.Engine(made(name).train(), device="cpu", memory={"gpu": "1GiB", "host": "1GiB"}) as other:
        other.load(tmp_path / "step-1")
        other.save_pretrained(tmp_path / "resumed")
        other.save(tmp_path / "step-2", step=2)
    export_checkpoint(tmp_path / "step-2", tmp_path / "again")
    same = load_file(tmp_path / "same" / "model.safetensors")
    assert same.keys() == given.keys()
    assert all(torch.equal(same[key], value) for key, value in given.items())
    for folder in ("engine", "checkpoint", "resumed", "again"):
        found = load_file(tmp_path / folder / "model.safetensors")
        assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in given.items()}, folder
    assert load_file(tmp_path / "library" / "model.safetensors").keys() == wanted.keys()
    for folder in ("engine", "checkpoint", "resumed", "again", "library"):
        again, info = type(model).from_pretrained(tmp_path / folder, dtype=torch.float32, output_loading_info=True)
        assert not any(info.values()), info
        stock = dict(again.named_parameters())
        assert all(torch.equal(stock[key], value) for key, value in wanted.items() if key in stock), folder


@pytest.mark.parametrize("source", [*SOURCES, "gguf"])
@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp32"])
def test_the_plan_counts_the_bytes_that_the_export_writes(source: str, dtype: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    if source == "gguf":
        write_gguf(tmp_path / "in" / "tiny.gguf")
    else:
        name, laid_out = SOURCES[source]
        model = made(name)
        model.save_pretrained(tmp_path / "in")
        path = tmp_path / "in" / "model.safetensors"
        save_file(laid_out(load_file(path), model), path, {"format": "pt"})
    config = Config.from_dict(
        {
            "model": {"path": str(tmp_path / "in")},
            "data": {"seq_len": 16},
            "train": {"batch_size": 1, "precision": "bf16"},
            "device": "cpu",
            "output": {"export": dtype},
        }
    )
    planned = forecast.without_data(config, hardware.read(gpus=False)).disk["export"]
    with megatrain.Engine.from_pretrained(str(tmp_path / "in"), precision="bf16", device="cpu") as ours:
        ours.save_pretrained(tmp_path / "out", dtype=dtype)
        ours.save_pretrained(tmp_path / "library", dtype=dtype, layout="library")
        own = export.weight_bytes(ours.decoder, dtype, "library")  # type: ignore[arg-type]
    assert planned == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert own == (tmp_path / "library" / "model.safetensors").stat().st_size


def test_a_tied_head_of_a_gguf_file_is_exported_once(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_gguf(tmp_path / "in" / "tiny.gguf")
    with read(tmp_path / "in") as ours:
        ours.step(batches(1, rows=1, seq=8, vocab=VOCAB))
        ours.save_pretrained(tmp_path / "engine")
        ours.save(tmp_path / "step-1", step=1)
        wanted = {name: ours.weight(name) for name in ours.decoder.tensors}
    export_checkpoint(tmp_path / "step-1", tmp_path / "checkpoint")
    assert "lm_head.weight" not in wanted
    for folder in ("engine", "checkpoint"):
        found = load_file(tmp_path / folder / "model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_checkpoint_says_its_layout_shortly_where_it_can(tmp_path: Path) -> None:
    found = {}
    for source in ("experts apart", "experts fused", "without the base's prefix"):
        name, laid_out = SOURCES[source]
        model = made(name)
        model.save_pretrained(tmp_path / source)
        path = tmp_path / source / "model.safetensors"
        save_file(laid_out(load_file(path), model), path, {"format": "pt"})
        with read(tmp_path / source) as ours:
            ours.step(batches(1, rows=1, seq=8, vocab=VOCAB))
            ours.save(tmp_path / "saved" / source / "step-1", step=1)
        found[source] = checkpoint.Checkpoint.open(tmp_path / "saved" / source / "step-1").state().layout
    assert found["experts apart"] == "published"
    assert found["experts fused"] == "library"
    assert found["without the base's prefix"]["wte.weight"] == ["transformer.wte.weight", 0, [96, 32]]


def test_transposed_experts_are_read_as_stock_reads_them(tmp_path: Path) -> None:
    model = made("qwen3-vl-moe")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    values = load_file(path)
    save_file(transposed(values, model), path, {"format": "pt"})
    found = load_file(path)
    assert sum(found[name].shape != value.shape for name, value in values.items()) == 2 * 3
    stock, info = type(model).from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    ids = batches(1, rows=1, seq=8, vocab=VOCAB)[0]["input_ids"]
    with read(tmp_path) as ours, torch.no_grad():
        assert all(torch.equal(ours.weight(name), stock.get_parameter(name)) for name in ours.decoder.tensors)
        wanted = stock.eval()(input_ids=ids, use_cache=False).logits[:, -1]
        assert torch.allclose(ours.logits(ids), wanted, atol=1e-5)


def test_experts_of_a_shape_that_is_no_layout_are_refused_by_name(tmp_path: Path) -> None:
    model = made("qwen3-vl-moe")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    values = load_file(path)
    name = next(name for name in values if name.endswith("experts.down_proj"))
    values[name] = values[name].transpose(0, 1).contiguous()
    save_file(values, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"model\.safetensors do not belong .* has {name} of shape \[32, 4, 24\]"):
        read(tmp_path)


def test_transposed_experts_are_loaded_within_the_memory_of_one_tensor(tmp_path: Path) -> None:
    text = {**SEEING["qwen3-vl-moe"].config["text_config"], "hidden_size": 512, "num_experts": 32}
    text |= {"moe_intermediate_size": 512}
    vision = {**SEEING["qwen3-vl-moe"].config["vision_config"], "out_hidden_size": 512}
    model = see("qwen3-vl-moe", text_config=text, vision_config=vision)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(transposed(load_file(path), model), path, {"format": "pt"})
    peak, largest, _ = private_memory.while_loading(tmp_path)
    assert largest == 4 * 32 * 512 * 2 * 512
    assert peak < largest, (peak, largest)


def test_a_layout_of_another_model_is_not_written(caplog: pytest.LogCaptureFixture) -> None:
    from megatrain.weights.hf_layout import read_layout

    assert read_layout({"a": ["weight", 0, [2, 3]]}, {"weight": (4, 3)}) is None
    assert read_layout({"a": ["weight", 0, [4, 3]], "b": ["other", 0, [1]]}, {"weight": (4, 3)}) is None
    assert "the published one is written" in caplog.text
    halves = {"a": ["weight", 0, [2, 3]], "b": ["weight", 6, [2, 3]]}
    assert list(read_layout(halves, {"weight": (4, 3)}) or {}) == ["a", "b"]
