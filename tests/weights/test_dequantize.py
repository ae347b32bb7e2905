"""Quantised checkpoints: read as transformers dequantises them, trained, exported as models that are not quantised."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config
from transformers.integrations import finegrained_fp8
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import megatrain
from megatrain.checkpoint.export import export_checkpoint
from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.system import hardware
from megatrain.training import forecast
from megatrain.weights.dequantize import dequantised
from megatrain.weights.source import TensorWeights
from support import private_memory
from support.families import build
from support.reference import batches, error

VOCAB = 96
Values = dict[str, torch.Tensor]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BLOCK = (8, 16)
"""Which every size is a multiple of: otherwise transformers takes blocks of another size than the configuration's."""
SIZES: dict[str, dict[str, Any]] = {
    "gpt-oss": {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 3, "head_dim": 16},
    "deepseek-v3": {},
    "qwen3": {},
}


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[experts, in, out] -> nearest blocks [experts, out, in / 32, 16] and scales [experts, out, in / 32]."""
    groups = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(-1).log2().floor() - 2
    scaled = groups / exponent.exp2().unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    packed = codes[..., 0::2] + 16 * codes[..., 1::2]
    return packed.to(torch.uint8), (exponent + 127).to(torch.uint8)


def fp8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, columns] -> the same in float8_e4m3fn, and a scale for each block, fp32."""
    rows, columns = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    room = torch.zeros(rows * block[0], columns * block[1])
    room[: weight.shape[0], : weight.shape[1]] = weight
    blocks = room.view(rows, block[0], columns, block[1])
    scales = blocks.abs().amax((1, 3)) / 448
    narrow = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return narrow.view(room.shape)[: weight.shape[0], : weight.shape[1]].contiguous(), scales


def widened(narrow: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The reverse: every element times its block's scale."""
    down, across = scales.repeat_interleave(block[0], -2), narrow.shape[-1]
    return narrow.float() * down.repeat_interleave(block[1], -1)[..., : narrow.shape[-2], :across]


def with_mxfp4(values: Values) -> Values:
    found = {}
    for name, value in values.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[f"{name}_blocks"], found[f"{name}_scales"] = mxfp4(value)
        else:
            found[name] = value
    return found


def with_fp8(values: Values, block: tuple[int, int] = BLOCK) -> Values:
    found = {}
    for name, value in values.items():
        if "_proj" in name and value.ndim == 2 and value.shape[1] % BLOCK[1] == 0:
            found[name], found[f"{name}_scale_inv"] = fp8(value, block)
        else:
            found[name] = value
    return found


FORMS: dict[str, tuple[str, Callable[[Values], Values], dict[str, Any], Any]] = {
    "mxfp4": ("gpt-oss", with_mxfp4, {"quant_method": "mxfp4"}, Mxfp4Config(dequantize=True)),
    "fp8, experts apart": (
        "deepseek-v3",
        with_fp8,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(BLOCK)},
        FineGrainedFP8Config(dequantize=True, weight_block_size=BLOCK),
    ),
    "fp8, dense": (
        "qwen3",
        with_fp8,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)},
        FineGrainedFP8Config(dequantize=True, weight_block_size=BLOCK),
    ),
}


def published(form: str, folder: Path) -> tuple[torch.nn.Module, Values]:
    """A stock model's folder with its weights quantised; and the keys and shapes that it had before."""
    name, quantise, told, _ = FORMS[form]
    model = build(name, **SIZES[name])
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    values = load_file(path)
    save_file(quantise(values), path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": told}))
    return model, values


def read(folder: Path, precision: str = "fp32") -> megatrain.Engine:
    return megatrain.Engine.from_pretrained(
        str(folder), precision=precision, device="cpu", memory={"gpu": "1GiB", "host": "1GiB"}
    )


@pytest.mark.parametrize("form", FORMS)
def test_weights_logits_and_loss_are_those_of_stock_dequantised(form: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model, _ = published(form, tmp_path)
    stock, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=FORMS[form][3], output_loading_info=True
    )
    assert not any(info.values()), info
    stock = stock.float()  # older releases leave experts in bf16
    batch = batches(1, rows=2, seq=12, vocab=VOCAB)[0]
    with read(tmp_path) as ours, torch.no_grad():
        changed = 0
        for name in ours.decoder.tensors:
            wanted = stock.get_parameter(name) if name in dict(stock.named_parameters()) else stock.get_buffer(name)
            assert torch.equal(ours.weight(name), wanted), name
            changed += not torch.equal(wanted, model.state_dict()[name])
        assert changed >= 2
        wanted = stock.eval()(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False)
        assert error(ours.logits(batch["input_ids"]), wanted.logits[:, -1]) < 1e-5
        loss = ours.evaluate([{"input_ids": batch["input_ids"], "labels": batch["input_ids"]}])
        assert abs(loss - wanted.loss.item()) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_the_export_is_that_of_a_model_that_was_never_quantised(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, values = published(form, tmp_path / "in")
    batch = batches(1, rows=1, seq=8, vocab=VOCAB)
    with caplog.at_level(logging.WARNING), read(tmp_path / "in") as ours:
        ours.step(batch)
        ours.save_pretrained(tmp_path / "engine")
        ours.save_pretrained(tmp_path / "library", layout="library")
        ours.save(tmp_path / "step-1", step=1)
        wanted = ours.logits(batch[0]["input_ids"])
    told = [record.getMessage() for record in caplog.records if "dequantised" in record.getMessage()]
    assert len(told) == 1
    assert "training goes on in bf16 or fp32, and the export will not be quantised" in told[0]
    assert str(tmp_path / "in") in told[0]
    export_checkpoint(tmp_path / "step-1", tmp_path / "checkpoint")
    for folder in ("engine", "checkpoint", "library"):
        found = load_file(tmp_path / folder / "model.safetensors")
        if folder != "library":
            assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in values.items()}
        assert "quantization_config" not in json.loads((tmp_path / folder / "config.json").read_text())
        again, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, dtype=torch.float32, output_loading_info=True
        )
        assert not any(info.values()), info
        with torch.no_grad():
            logits = again.eval()(batch[0]["input_ids"], use_cache=False).logits[:, -1]
        assert error(logits, wanted) < 1e-5
    with read(tmp_path / "engine") as again:
        assert not torch.equal(again.logits(batch[0]["input_ids"]), torch.zeros_like(wanted))


@pytest.mark.parametrize("form", FORMS)
def test_in_bf16_the_master_is_the_dequantised_value_exactly(form: str, tmp_path: Path) -> None:
    published(form, tmp_path)
    with read(tmp_path) as wide, read(tmp_path, "bf16") as ours:
        assert all(torch.equal(ours.weight(name), wide.weight(name)) for name in ours.decoder.tensors)


@pytest.mark.parametrize("form", FORMS)
def test_frozen_weights_are_dequantised_too(form: str, tmp_path: Path) -> None:
    published(form, tmp_path)
    options = {"precision": "bf16", "device": "cpu", "memory": {"gpu": "1GiB", "host": "1GiB"}}
    with (
        read(tmp_path) as wide,
        megatrain.Engine.from_pretrained(str(tmp_path), freeze=["*layers.1.*"], **options) as ours,
    ):
        frozen = [name for name, ref in ours.decoder.tensors.items() if ref.role == "frozen"]
        assert any("mlp" in name for name in frozen)
        assert all(torch.equal(ours.weight(name).float(), wide.weight(name).float()) for name in frozen)


@pytest.mark.parametrize("form", FORMS)
def test_a_config_plans_the_export_that_is_written(form: str, tmp_path: Path) -> None:
    published(form, tmp_path / "in")
    config = Config.from_dict(
        {
            "model": {"path": str(tmp_path / "in")},
            "data": {"seq_len": 16},
            "train": {"batch_size": 1, "precision": "bf16"},
            "device": "cpu",
            "output": {"export": "bf16"},
        }
    )
    planned = forecast.without_data(config, hardware.read(gpus=False)).disk["export"]
    with read(tmp_path / "in", "bf16") as ours:
        ours.save_pretrained(tmp_path / "out")
    assert planned == (tmp_path / "out" / "model.safetensors").stat().st_size


# -------------------------------------------------------------------------------------------- values, piece by piece


def source_of(values: Values, told: dict[str, Any], folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": told}))
    return dequantised(TensorWeights(values, "here"), folder)


def in_pieces(source: Any, name: str, step: int) -> torch.Tensor:
    entry = source.entries[name]
    buffer = torch.empty(step * entry.dtype.itemsize, dtype=torch.uint8)
    pieces = [
        source.read(name, start, min(step, entry.numel - start), buffer).clone()
        for start in range(0, entry.numel, step)
    ]
    return torch.cat(pieces).view(entry.shape)


@pytest.mark.parametrize("step", [1, 31, 1000, 10**6])
@pytest.mark.parametrize("shape", [(320, 200), (128, 256), (5, 300)])
def test_fp8_in_blocks_of_128_is_that_of_transformers_in_any_pieces(
    shape: tuple[int, int], step: int, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    narrow, scales = fp8(torch.randn(shape) * torch.rand(shape).exp2(), (128, 128))
    step = step if step > 1 or shape[0] == 5 else 7
    source = source_of({"w.weight": narrow, "w.weight_scale_inv": scales}, {"quant_method": "fp8"}, tmp_path)
    found = in_pieces(source, "w.weight", step)
    assert torch.equal(found, widened(narrow, scales, (128, 128)))
    stock = getattr(finegrained_fp8, "_dequantize_fp8_weight", None)  # not in every release
    assert stock is None or torch.equal(found, stock(narrow, scales, (128, 128), torch.float32))


def test_fp8_of_experts_in_one_tensor_and_with_one_scale_a_tensor(tmp_path: Path) -> None:
    torch.manual_seed(2)
    pairs = [fp8(torch.randn(40, 24), (16, 16)) for _ in range(3)]
    values = {"e": torch.stack([p[0] for p in pairs]), "e_scale_inv": torch.stack([p[1] for p in pairs])}
    told = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    source = source_of(values, told, tmp_path)
    wanted = torch.stack([widened(*pair, (16, 16)) for pair in pairs])
    assert torch.equal(in_pieces(source, "e", 517), wanted)
    narrow = torch.randn(40, 24).to(torch.float8_e4m3fn)
    values = {"w": narrow, "w_scale_inv": torch.tensor(0.37), "w.activation_scale": torch.tensor(2.0)}
    source = source_of(values, {"quant_method": "fp8", "weight_block_size": None}, tmp_path)
    assert list(source.entries) == ["w"]
    assert torch.equal(in_pieces(source, "w", 100), narrow.float() * torch.tensor(0.37))


@pytest.mark.parametrize("step", [7, 32, 1000, 10**6])
def test_every_mxfp4_number_is_that_of_transformers_in_any_pieces(step: int, tmp_path: Path) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).repeat(255).view(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16).contiguous()
    if step == 7:
        blocks, scales = blocks[:, ::50].contiguous(), scales[:, ::50].contiguous()
    source = source_of({"w_blocks": blocks, "w_scales": scales}, {"quant_method": "mxfp4"}, tmp_path)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).transpose(1, 2)
    assert source.entries["w"].dtype == torch.bfloat16
    assert torch.equal(in_pieces(source, "w", step), wanted)


@pytest.mark.parametrize("form", ["mxfp4", "fp8, experts apart"])
def test_quantised_weights_are_loaded_within_the_memory_of_one_tensor(form: str, tmp_path: Path) -> None:
    name, quantise, told, _ = FORMS[form]
    sizes = {"hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 2}
    model = build(name, **sizes, **{"num_local_experts" if name == "gpt-oss" else "n_routed_experts": 24})
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(quantise(load_file(path)), path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": told}))
    peak, largest, _ = private_memory.while_loading(tmp_path)
    assert largest == 4 * 24 * 512 * 1024
    assert peak < largest, (peak, largest)


# ---------------------------------------------------------------------------------------------------- what is wrong


def changed(folder: Path, change: Callable[[Values], None]) -> str:
    path = folder / "model.safetensors"
    values = load_file(path)
    change(values)
    save_file(values, path, {"format": "pt"})
    with pytest.raises(ConfigError) as caught, read(folder) as ours:
        ours.weight("model.norm.weight")
    assert str(path) in str(caught.value)
    return str(caught.value)


GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"
UP = "model.layers.1.mlp.experts.gate_up_proj"


def replaced(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Values], None]:
    def apply(values: Values) -> None:
        values[name] = change(values[name]).contiguous()

    return apply


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        ("fp8, experts apart", lambda v: v.pop(GATE + "_scale_inv"), (GATE, "no file holds its scales", "_scale_inv")),
        ("fp8, experts apart", lambda v: v.pop(GATE), (GATE + "_scale_inv", f"no file holds {GATE}")),
        (
            "fp8, experts apart",
            replaced(GATE + "_scale_inv", lambda scale: scale[:, :-1]),
            (GATE + "_scale_inv of shape [3, 1]", "scales of shape [3, 2]", "blocks of 8 x 16"),
        ),
        (
            "fp8, experts apart",
            replaced(GATE + "_scale_inv", lambda scale: scale.to(torch.int32)),
            (GATE + "_scale_inv in torch.int32",),
        ),
        ("fp8, experts apart", replaced(GATE, lambda w: w.to(torch.int8)), (GATE + " in torch.int8", "float8_e4m3fn")),
        (
            "fp8, experts apart",
            replaced(GATE + "_scale_inv", lambda scale: scale * float("inf")),
            ("model.layers.1.mlp.experts.gate_up_proj in", "not finite"),
        ),
        ("mxfp4", lambda v: v.pop(UP + "_scales"), (UP + "_blocks", f"no file holds its scales {UP}_scales")),
        ("mxfp4", lambda v: v.pop(UP + "_blocks"), (UP + "_scales", f"no file holds {UP}_blocks")),
        (
            "mxfp4",
            replaced(UP + "_scales", lambda scales: scales[:, :, :1]),
            (UP + "_scales of shape [3, 192, 1]", "scales of shape [3, 192, 2]"),
        ),
        (
            "mxfp4",
            replaced(UP + "_blocks", lambda blocks: blocks[..., :8]),
            (UP + "_blocks of shape [3, 192, 2, 8]", "[..., rows, blocks, 16]"),
        ),
        ("mxfp4", replaced(UP + "_scales", lambda scales: scales.int()), (UP + "_scales in torch.int32",)),
        (
            "mxfp4",
            lambda v: (
                replaced(UP + "_blocks", lambda blocks: blocks[:, :-2])(v),
                replaced(UP + "_scales", lambda scales: scales[:, :-2])(v),
            ),
            (UP + " of shape [3, 190, 64] where the model has [3, 192, 64]",),
        ),
        ("mxfp4", replaced(UP + "_scales", lambda scales: scales * 0 + 255), (UP + " in", "not finite")),
    ],
)
def test_what_does_not_belong_together_is_refused_with_file_and_key(
    form: str, change: Callable[[Values], None], words: tuple[str, ...], tmp_path: Path
) -> None:
    published(form, tmp_path)
    said = changed(tmp_path, change)
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "with gptq"),
        ({"quant_method": "awq", "bits": 4}, "with awq"),
        ({"quant_method": "compressed-tensors"}, "with compressed-tensors"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "with bitsandbytes"),
        ({"load_in_8bit": True}, "with bitsandbytes"),
        ({"bits": 3}, "by a method that its configuration does not name"),
    ],
)
def test_other_methods_are_refused_by_name_with_advice(told: dict[str, Any], named: str, tmp_path: Path) -> None:
    build("qwen3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": told}))
    with pytest.raises(ConfigError, match=rf"is quantised {named}; .* only fp8 and mxfp4 are read.*made from"):
        read(tmp_path)


def test_a_block_size_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weight_block_size is \[128\]; expected two numbers"):
        source_of({"w": torch.zeros(2, 2)}, {"quant_method": "fp8", "weight_block_size": [128]}, tmp_path)


def test_fp8_weights_that_no_configuration_tells_of_are_refused(tmp_path: Path) -> None:
    published("fp8, dense", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"config\.json does not say how .*_proj\.weight in torch\.float8_e4m3fn"):
        read(tmp_path)
