"""The numerics key: what it names, what counts as a change of it, and that attention does not change unsaid."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain import Decoder
from megatrain.engine import numerics
from megatrain.engine.inputs import InputPreprocessor
from megatrain.models.recorder import Recorder
from support.reference import batches, build, config, engine

CPU = torch.device("cpu")


def decoder(kind: str = "qwen3", precision: str = "bf16", **numbers: Any) -> Decoder:
    return Decoder.from_config(config(kind, **numbers), precision=precision)


def test_the_key_of_a_deterministic_run_on_a_card_names_the_kernels_that_attention_is_held_to() -> None:
    usual = decoder()
    assert numerics.attention(usual, "cuda", deterministic=True) == "sdpa: flash or math"
    assert numerics.attention(usual, "cuda", deterministic=False) == "sdpa"
    assert numerics.attention(usual, "cpu", deterministic=True) == "sdpa"
    assert numerics.attention(decoder(precision="fp32"), "cuda", deterministic=True) == "sdpa: math"
    assert numerics.attention(decoder("gemma", head_dim=320), "cuda", deterministic=True) == "sdpa: math"
    eager = decoder("llama", attn_implementation="eager")
    assert numerics.attention(eager, "cuda", deterministic=True) == "eager"


def test_a_key_of_an_earlier_version_is_not_another_one() -> None:
    now = {"attention": "sdpa: flash or math", "torch": "2.15"}
    assert numerics.differences({"attention": "sdpa", "torch": "2.15"}, now) == []
    assert numerics.differences({"attention": "eager", "torch": "2.15"}, now) == [
        "attention: 'eager' -> 'sdpa: flash or math'"
    ]
    assert numerics.differences({"attention": "sdpa: math", "torch": "2.15"}, now)
    assert numerics.differences({"attention": "sdpa", "torch": "2.14"}, now) == ["torch: '2.14' -> '2.15'"]


def test_an_engine_reads_a_checkpoint_with_such_a_key_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    ours, again = (engine(model, micro_batch=(2, 32), micro_batches=1) for _ in range(2))
    ours.step(batches(1))
    ours.save(tmp_path / "saved")
    monkeypatch.setattr(numerics, "attention", lambda *_: "sdpa: flash or math")
    with caplog.at_level(logging.WARNING):
        again.load(tmp_path / "saved")
    assert "numerics key has changed" not in caplog.text


def test_attention_that_flash_does_not_compute_has_a_reason() -> None:
    usual = decoder()
    assert numerics.why_math(usual, None) is None
    assert "micro-batch 3 has a dense mask" in (numerics.why_math(usual, 3) or "")
    assert "take no float32 heads of 16" in (numerics.why_math(decoder(precision="fp32"), None) or "")
    assert "take no bfloat16 heads of 320" in (numerics.why_math(decoder("gemma", head_dim=320), None) or "")
    assert numerics.why_math(decoder("llama", attn_implementation="eager"), 3) is None


def test_a_dense_mask_is_found_among_what_layers_are_called_with() -> None:
    whole, padded = batches(2), batches(2, padded=True)
    by_document = InputPreprocessor(decoder(), CPU)
    assert by_document.masked(by_document.prepare(whole)) is None
    assert by_document.masked(by_document.prepare(padded)) is None
    masked = InputPreprocessor(decoder("llama", attention_dropout=0.1), CPU)
    assert masked.masked(masked.prepare(whole)) is None
    assert masked.masked(masked.prepare([whole[0], padded[1]])) == 1


def test_a_deterministic_run_on_a_card_says_once_that_another_kernel_computes_attention(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours = engine(build(), deterministic=True)
    passes = ours._passes
    prepared = ours.prepare(batches(1))
    with caplog.at_level(logging.WARNING):
        passes._warn_about_math(prepared)
        assert not caplog.records, "only on a card"
        monkeypatch.setattr(passes._runtime, "device", torch.device("cuda"))
        passes._warn_about_math(prepared)
        passes._warn_about_math(prepared)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("deterministic: the flash kernels take no float32 heads of 16, so torch's math kernel")


def fp32_settings() -> tuple[Any, ...]:
    of = torch.backends
    kernels = (of, of.cuda.matmul, of.cudnn, of.cudnn.conv, of.mkldnn, of.mkldnn.matmul, of.mkldnn.conv)
    try:
        legacy = torch.get_float32_matmul_precision(), of.cuda.matmul.allow_tf32, of.cudnn.allow_tf32
    except RuntimeError:  # they cannot say what the newer settings are
        legacy = ("mixed", None, None)
    return *legacy, *(kernel.fp32_precision for kernel in kernels)


@pytest.fixture
def fp32_as_before() -> Iterator[None]:
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for kernel in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        kernel.fp32_precision = "none"


@pytest.mark.usefixtures("fp32_as_before")
@pytest.mark.parametrize("asked", ["high", "medium", "generic"])
def test_the_callers_precision_of_fp32_matmuls_changes_no_bit_and_is_left_as_it_was(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights() -> tuple[float, float, dict[str, torch.Tensor]]:
        ours = engine(build(hidden_size=128, intermediate_size=256), micro_batch=(4, 64), micro_batches=1)
        out = ours.step(batches(1, rows=4, seq=64))
        return out.loss, out.grad_norm, dict(ours.state_dict())

    loss, norm, wanted = weights()
    seen: list[set[str]] = []
    recorded = Recorder.record

    def record(recorder: Recorder, *args: Any) -> Any:
        seen.append({torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision})
        return recorded(recorder, *args)

    if asked == "generic":
        torch.backends.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision(asked)
    before = fp32_settings()
    found_loss, found_norm, found = weights()
    assert (found_loss, found_norm) == (loss, norm)
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    ours = engine(build())
    monkeypatch.setattr(Recorder, "record", record)
    ours.prepare(batches(1))
    assert seen
    assert all(precisions <= {"none", "ieee"} for precisions in seen)
    assert fp32_settings() == before


@pytest.mark.usefixtures("fp32_as_before")
def test_the_precision_of_fp32_matmuls_is_pinned_until_the_last_thread_is_out() -> None:
    torch.set_float32_matmul_precision("high")
    with numerics.full_precision:
        with numerics.full_precision:
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cudnn.conv.fp32_precision in ("none", "ieee")
    assert torch.get_float32_matmul_precision() == "high"
