"""The real engine through its checkpoints (H16, H18): bit-equal to never having stopped, under any placement."""

import concurrent.futures
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain import Engine
from megatrain.errors import CheckpointError, ConfigError, StorageError
from megatrain.models.decoder import Decoder
from support.fake_core import llama
from support.resume import PLACEMENTS, batches, same, started, state


@pytest.mark.parametrize("options", PLACEMENTS.values(), ids=PLACEMENTS.keys())
@pytest.mark.parametrize(
    ("precision", "tied", "accumulation"), [("fp32", False, 3), ("fp32", True, 1), ("bf16", True, 3)]
)
def test_a_stopped_and_resumed_run_equals_one_that_never_stopped(
    tmp_path: Path, options: dict[str, Any], precision: str, tied: bool, accumulation: int
) -> None:
    mode = {key: options[key] for key in ("update", "max_grad_norm") if key in options}
    straight = started(precision, tied, accumulation=accumulation, **mode)
    losses = [straight.step(batches(step, accumulation)).loss for step in range(6)]
    first = started(precision, tied, accumulation=accumulation, **mode)
    for step in range(3):
        first.step(batches(step, accumulation))
    first.save(tmp_path / "step-3", {"note": 1}, step=3)
    first.close()
    second = started(precision, tied, seed=77, accumulation=accumulation, **options)
    assert second.load(tmp_path / "step-3") == {"note": 1}
    resumed = [second.step(batches(step, accumulation)).loss for step in range(3, 6)]
    assert resumed == losses[3:]
    assert same(state(second), state(straight))
    straight.close()
    second.close()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_stock_transformers_computes_the_trained_models_logits_from_export_and_checkpoint(
    tmp_path: Path, precision: str, tied: bool
) -> None:
    engine = started(precision, tied)
    for step in range(2):
        engine.step(batches(step, 3))
    ids = batches(9, 1)[0]["input_ids"][:1]
    ours = engine.logits(ids)
    engine.save_pretrained(tmp_path / "export")
    engine.save(tmp_path / "step-2", step=2)
    weights = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.close()
    for folder in ("export", "step-2"):
        model, told = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype="auto", output_loading_info=True)
        assert not any(told.values())
        with torch.no_grad():
            theirs = model.eval()(ids).logits[:, -1].float()
        bound = 1e-5 if precision == "fp32" else 2e-2
        assert torch.allclose(ours, theirs, rtol=bound, atol=bound)
        assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) == tied
        if precision == "fp32":
            assert all(torch.equal(value, model.state_dict()[name]) for name, value in weights.items())


def test_a_model_saved_and_loaded_starts_where_it_ended(tmp_path: Path) -> None:
    engine = started("fp32", True)
    engine.step(batches(0, 3))
    engine.save_pretrained(tmp_path / "out")
    before = engine.evaluate(batches(5, 1))
    again = Engine.from_pretrained(str(tmp_path / "out"), device="cpu", memory={"gpu": "1GiB", "host": "1GiB"})
    assert again.evaluate(batches(5, 1)) == before
    assert all(torch.equal(value, engine.state_dict()[name]) for name, value in again.state_dict().items())
    engine.close()
    again.close()


def test_another_models_checkpoint_leaves_the_engine_usable(tmp_path: Path) -> None:
    engine, other = started("fp32", False), started("fp32", True)
    other.save(tmp_path / "step-0", step=0)
    before = state(engine)
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        engine.load(tmp_path / "step-0")
    assert same(state(engine), before)
    engine.step(batches(0, 3))
    engine.close()
    other.close()


def test_a_save_that_fails_leaves_the_engine_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started("fp32", False)
    engine.step(batches(0, 3))
    with monkeypatch.context() as patch:
        patch.setattr("megatrain.system.atomic.free_bytes", lambda _: 10)
        with pytest.raises(StorageError, match="10 are free"):
            engine.save(tmp_path / "step-1", step=1)
    assert not list(tmp_path.iterdir())
    engine.step(batches(1, 3))
    engine.save(tmp_path / "step-2", step=2)
    engine.close()


@pytest.mark.parametrize("placement", ["two slots", "state on the device"])
def test_planes_may_be_read_and_written_from_several_threads(placement: str) -> None:
    """Checkpoints do so; state on the device passes through one window, which must not be shared by two calls."""
    decoder = Decoder.from_config(llama(False, vocab_size=20_000), precision="bf16")
    engine = Engine(decoder, device="cpu", micro_batch=(1, 8), micro_batches=1, **PLACEMENTS[placement])
    core: Any = engine.core
    # large ones, so that calls overlap, of which the device holds the first
    refs = [decoder.tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight")]
    generator = torch.Generator().manual_seed(0)
    wanted = {}
    for ref in refs:
        size = (torch.Size(ref.shape).numel(),)
        upper = torch.randint(-(2**15), 2**15, size, dtype=torch.int16, generator=generator)
        lower = torch.randint(-(2**15), 2**15, size, dtype=torch.int16, generator=generator)
        moments = torch.randn(2, *size, generator=generator)
        # an exponent of all ones is not a number, and is not what is tested
        wanted[ref.name] = {
            "weights": (upper & ~0x4000).view(torch.bfloat16),
            "residual": lower,
            "exp_avg": moments[0],
            "exp_avg_sq": moments[1],
        }
    work = [
        (ref, plane) for _ in range(8) for ref in refs for plane in ("weights", "residual", "exp_avg", "exp_avg_sq")
    ]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda w: core.write(w[0].unit, w[0].tensor, w[1], wanted[w[0].name][w[1]]), work))

        def differs(item: tuple[Any, str]) -> bool:
            ref, plane = item
            out = torch.empty_like(wanted[ref.name][plane])
            core.read(ref.unit, ref.tensor, plane, out)
            return not torch.equal(out.view(torch.uint8), wanted[ref.name][plane].view(torch.uint8))

        assert not any(pool.map(differs, work))
    engine.close()


@pytest.mark.parametrize("options", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_gradients_that_wait_are_dropped_by_a_load(tmp_path: Path, options: dict[str, Any]) -> None:
    first, second = started("bf16", False, **options), started("bf16", False, **options)
    for engine in (first, second):
        engine.step(batches(0, 3))
    first.save(tmp_path / "step-1")
    first.forward_backward(batches(1, 3))
    first.load(tmp_path / "step-1")
    assert first.num_steps == 1
    with pytest.raises(ConfigError, match="without forward_backward"):
        first.optimizer_step()
    assert same(state(first), state(second))
    assert first.step(batches(2, 3)) == second.step(batches(2, 3))
    assert same(state(first), state(second))
    first.close()
    second.close()
