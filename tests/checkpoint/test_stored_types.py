"""Tensors that keep the type of their file: through a run, a kill, a resume, a branch and an export, bit for bit."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from megatrain import Engine
from megatrain.checkpoint.export import export_checkpoint, save_pretrained, weight_bytes
from megatrain.checkpoint.load import load
from megatrain.checkpoint.save import save
from megatrain.errors import CheckpointError
from megatrain.models.decoder import Decoder
from megatrain.training.stop import Stop
from megatrain.weights import loader
from megatrain.weights.source import open_weights, resolve
from megatrain.weights.state_format import StateFormat
from support.fake_core import MemoryCore, engine, llama
from support.families import BASE, FAMILIES
from support.runs import settings
from support.tiny_tokenizer import tiny_tokenizer
from support.trainer import At, assert_bit_equal, fit, losses

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
GATE = "model.layers.1.mlp.gate.weight"
"""Of DeepSeek-V3: a buffer and a parameter that transformers keeps in fp32 in a bf16 model."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def deepseek(dtype: torch.dtype) -> torch.nn.Module:
    """A stock DeepSeek-V3 whose routing bias has values that bf16 does not hold."""
    from transformers import AutoConfig

    family = FAMILIES["deepseek-v3"]
    config = AutoConfig.for_model(family.kind, **{**BASE, **family.changes})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, tensor in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(1 + torch.rand(tensor.shape) * 2**-10)
        if name.endswith("gate.weight"):
            tensor.copy_(torch.randn(tensor.shape))
    return model


def loaded(folder: Path, precision: str, freeze: tuple[str, ...] = ()) -> SimpleNamespace:
    """Decoder and store of a folder, as `Engine.from_pretrained` makes them."""
    source = open_weights(resolve(str(folder)))
    decoder = Decoder.from_config(
        json.loads((folder / "config.json").read_text()),
        precision=precision,
        freeze=freeze,
        frozen_dtypes={name: entry.dtype for name, entry in source.entries.items()},
    )
    core = MemoryCore(decoder)
    loader.load(source, decoder, core)
    return SimpleNamespace(decoder=decoder, core=core, state_format=StateFormat())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp32"])
@pytest.mark.parametrize("from_disk", [False, True])
def test_an_export_has_the_types_that_stock_gives_a_model_and_routes_as_the_trained_one(
    tmp_path: Path, precision: str, dtype: Any, from_disk: bool
) -> None:
    model = deepseek(DTYPES[precision])
    model.save_pretrained(tmp_path / "source")
    target = loaded(tmp_path / "source", precision)
    if from_disk:
        save(tmp_path / "step-1", target, {}, step=1)
        export_checkpoint(tmp_path / "step-1", tmp_path / "out", dtype=dtype)
    else:
        save_pretrained(target.decoder, target.core, tmp_path / "out", dtype=dtype)
        shards = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
        assert shards == weight_bytes(target.decoder, dtype)
    asked = DTYPES[precision if dtype == "auto" else dtype]
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=asked)
    stock.save_pretrained(tmp_path / "stock")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "stock"))
    assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in theirs.items()}
    assert torch.equal(ours[BIAS], model.state_dict()[BIAS])
    again, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(told.values()), told
    assert torch.equal(again.state_dict()[BIAS], model.state_dict()[BIAS])
    if asked == torch.bfloat16 and precision == "bf16":  # the gate that the device computed with
        ref = target.decoder.tensors[GATE]
        assert torch.equal(ours[GATE].view(-1), target.core.planes[ref.unit, ref.tensor].weights.float())


STORED = [torch.bfloat16, torch.float16, torch.float32]


def stock_llama(folder: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{k: v for k, v in llama().items() if k != "model_type"}))
    model.to(dtype).save_pretrained(folder)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("from_disk", [False, True])
def test_a_frozen_tensor_is_exported_as_it_is_stored_unless_a_type_is_named(
    tmp_path: Path, precision: str, stored: torch.dtype, from_disk: bool
) -> None:
    stock_llama(tmp_path / "source", stored)
    target = loaded(tmp_path / "source", precision, ("lm_head*",))
    wanted = load_file(tmp_path / "source" / "model.safetensors")["lm_head.weight"]
    save(tmp_path / "step-1", target, {}, step=1)
    for dtype, expected in (("auto", stored), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        out = tmp_path / dtype
        if from_disk:
            export_checkpoint(tmp_path / "step-1", out, dtype=dtype)  # type: ignore[arg-type]
        else:
            save_pretrained(target.decoder, target.core, out, dtype=dtype)  # type: ignore[arg-type]
        found = load_file(out / "model.safetensors")
        assert found["lm_head.weight"].dtype == expected
        assert torch.equal(found["lm_head.weight"], wanted.to(expected))
        trained = DTYPES[precision if dtype == "auto" else dtype]
        assert {t.dtype for name, t in found.items() if name != "lm_head.weight"} == {trained}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stored", STORED)
def test_a_frozen_tensor_that_is_trained_on_resume_starts_from_its_exact_values(
    tmp_path: Path, precision: str, stored: torch.dtype
) -> None:
    stock_llama(tmp_path / "source", stored)
    frozen = loaded(tmp_path / "source", precision, ("lm_head*",))
    save(tmp_path / "step-1", frozen, {}, step=1)
    target = engine(precision, seed=9)
    load(tmp_path / "step-1", target)
    ref = target.decoder.tensors["lm_head.weight"]
    wanted = load_file(tmp_path / "source" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(target.core.master(ref), wanted.float())


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("here", STORED)
def test_a_frozen_tensor_is_restored_exactly_or_refused_before_anything_changes(
    tmp_path: Path, stored: torch.dtype, here: torch.dtype
) -> None:
    stock_llama(tmp_path / "source", stored)
    saved = loaded(tmp_path / "source", "fp32", ("lm_head*",))
    save(tmp_path / "step-1", saved, {}, step=1)

    def empty() -> SimpleNamespace:
        decoder = Decoder.from_config(
            llama(), precision="fp32", freeze=["lm_head*"], frozen_dtypes={"lm_head.weight": here}
        )
        return SimpleNamespace(decoder=decoder, core=MemoryCore(decoder), state_format=StateFormat())

    target = empty()
    wanted = load_file(tmp_path / "source" / "model.safetensors")["lm_head.weight"]
    if torch.equal(wanted.to(here).to(stored), wanted):
        load(tmp_path / "step-1", target)
        ref = target.decoder.tensors["lm_head.weight"]
        assert torch.equal(target.core.planes[ref.unit, ref.tensor].weights.to(stored), wanted.view(-1))
        return
    with pytest.raises(CheckpointError, match=rf"its lm_head\.weight has values that {here}, its type here, cannot"):
        load(tmp_path / "step-1", target)
    assert target.core.equals(empty().core)


def test_a_trained_tensor_is_never_rounded_when_it_is_frozen(tmp_path: Path) -> None:
    saved = engine("fp32", seed=4)
    save(tmp_path / "step-1", saved, {}, step=1)
    decoder = Decoder.from_config(
        llama(), precision="fp32", freeze=["lm_head*"], frozen_dtypes={"lm_head.weight": torch.bfloat16}
    )
    with pytest.raises(CheckpointError, match=r"its lm_head\.weight has values that torch\.bfloat16"):
        load(
            tmp_path / "step-1", SimpleNamespace(decoder=decoder, core=MemoryCore(decoder), state_format=StateFormat())
        )


# ------------------------------------------------------------------------------------------------- runs of the trainer


def model_folder(folder: Path, dtype: torch.dtype, kind: str = "llama") -> Path:
    """A model with tokenizer, all of it stored in `dtype`, buffers too."""
    tiny_tokenizer().save_pretrained(folder)
    if kind == "llama":
        small = {**llama(tied=True), "vocab_size": 330}
        small.pop("model_type")
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(LlamaConfig(**small)).to(dtype).save_pretrained(folder)
        return folder
    family = FAMILIES["deepseek-v3"]
    from transformers import AutoConfig

    torch.manual_seed(3)
    config = AutoConfig.for_model(family.kind, **{**BASE, **family.changes, "vocab_size": 330})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    values = load_file(folder / "model.safetensors")
    for name, value in values.items():
        values[name] = (value + torch.rand(value.shape) if "e_score" in name else value).to(dtype)
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("model*.safetensors") for name, tensor in load_file(path).items()}


CASES = {
    "bf16 file, fp32 run": (torch.bfloat16, "fp32", "llama", ["*layers.0*", "*embed*"]),
    "fp32 file, bf16 run": (torch.float32, "bf16", "llama", ["*layers.0*", "*embed*"]),
    "fp16 file, fp32 run": (torch.float16, "fp32", "llama", ["*layers.0*"]),
    "fp16 file, bf16 run": (torch.float16, "bf16", "llama", ["*layers.0*"]),
    "bf16 buffers, fp32 run": (torch.bfloat16, "fp32", "deepseek", []),
    "bf16 buffers, bf16 run": (torch.bfloat16, "bf16", "deepseek", []),
    "fp32 buffers, bf16 run": (torch.float32, "bf16", "deepseek", []),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_with_tensors_in_their_files_type_goes_on_bit_for_bit(tmp_path: Path, case: str) -> None:
    dtype, precision, kind, freeze = CASES[case]
    model = {"path": str(model_folder(tmp_path / "model", dtype, kind)), "freeze": freeze}

    def config(name: str, **output: Any) -> dict[str, Any]:
        return settings(
            tmp_path,
            model=model,
            train={"steps": 4, "precision": precision},
            output={"dir": str(tmp_path / name), "save_every": 2, "keep": 9, "export": "auto", **output},
        ) | {"model": model}

    fit(config("whole"))
    stop = Stop()
    fit(config("parted"), stop=stop, display=At(2, lambda: stop.request("SIGINT")))
    fit(config("parted"))
    fit(config("branch", resume=str(tmp_path / "parted" / "checkpoints" / "step-2")))
    last = Path("checkpoints") / "step-4"
    for name in ("parted", "branch"):
        assert_bit_equal(tmp_path / "whole" / last, tmp_path / name / last)
        assert_bit_equal(tmp_path / "whole" / "export", tmp_path / name / "export")
    assert losses(tmp_path / "parted") == losses(tmp_path / "whole")
    # The frozen ones are those of the model's folder, in its type, in checkpoint and export.
    given = load_file(tmp_path / "model" / "model.safetensors")
    for folder in (last, Path("export")):
        held = weights_of(tmp_path / "whole" / folder)
        kept = [name for name in held if "layers.0" in name or "embed" in name] if freeze[:1] else []
        kept = kept if len(freeze) == 2 else [name for name in kept if "layers.0" in name]
        for name in [*kept, *(name for name in held if "e_score" in name)]:
            assert torch.equal(held[name].to(dtype), given[name]), name
            if kind == "llama" or folder == last:
                assert held[name].dtype == dtype, name
    # An evaluation of the run, and a branch that trains what was frozen.
    from megatrain.config import Config
    from megatrain.training.setup import assemble

    parts = assemble(Config.of(config("parted")), folder=None, resume=tmp_path / "parted" / last)
    parts.close()
    if freeze:
        model["freeze"] = []
        unfrozen = config("unfrozen", resume=str(tmp_path / "parted" / "checkpoints" / "step-2"))
        assert fit(unfrozen).step == 4
        assert "state.json" in {path.name for path in (tmp_path / "unfrozen" / last).iterdir()}
        counts = json.loads((tmp_path / "unfrozen" / last / "state.json").read_text())["step_counts"]
        frozen_before = [name for name in counts if "layers.0" in name]
        assert {counts[name] for name in frozen_before} == {2}


def test_from_pretrained_goes_on_from_a_checkpoint_of_another_folders_types(tmp_path: Path) -> None:
    """The same model as two folders, one in bf16 and one in fp32: what is frozen has the same values in both."""
    folder = model_folder(tmp_path / "bf16", torch.bfloat16)
    wide = tmp_path / "fp32"
    wide.mkdir()
    (wide / "config.json").write_text((folder / "config.json").read_text())
    values = load_file(folder / "model.safetensors")
    save_file({name: value.float() for name, value in values.items()}, wide / "model.safetensors", {"format": "pt"})
    options: dict[str, Any] = {"freeze": ["*layers.0*"], "precision": "fp32", "device": "cpu"}
    first, second = (Engine.from_pretrained(path, **copy.deepcopy(options)) for path in (folder, wide))
    ids = torch.arange(12).view(1, 12)
    first.step([{"input_ids": ids, "labels": ids}])
    first.save(tmp_path / "saved")
    second.load(tmp_path / "saved")
    assert first.step([{"input_ids": ids, "labels": ids}]).loss == second.step([{"input_ids": ids, "labels": ids}]).loss
    for name, value in first.state_dict().items():
        assert torch.equal(value.float(), second.state_dict()[name].float()), name
    first.close()
    second.close()
