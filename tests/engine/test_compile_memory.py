"""What a compiled layer is said to keep and to need is what the compiler's own partition of it keeps and needs."""

import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from megatrain.engine import compile_memory, layer_cost
from megatrain.engine.compile import cut_for
from megatrain.engine.saved_tensors import CheckpointedCall
from megatrain.models.decoder import Decoder
from megatrain.models.modules import on_meta
from support.small_layers import SIZES, decoder, real_layer

ROWS, SEQ = 2, 128


def saved_by_the_compiler(model: Decoder, *, least: bool) -> int:
    """Bytes that the compiled layer's graph holds between forward and backward, by storage."""
    layer = real_layer(model)
    record = model.recorder.record(torch.zeros((ROWS, SEQ), dtype=torch.int64))
    hidden = torch.randn(ROWS, SEQ, model.hidden_size).to(model.dtype).requires_grad_()
    given = tree_leaves((record.args[0], record.kwargs[0]))
    known = [hidden, *layer.parameters(), *layer.buffers(), *(v for v in given if isinstance(v, Tensor))]
    held = {t.untyped_storage()._cdata for t in known}
    kept: dict[int, int] = {}
    alive = []  # so that no storage's address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in held:
            kept[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    torch.compiler.reset()  # a graph that another cut has made would be used again
    compiled = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)
    with cut_for(least), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = compiled(hidden, *record.args[0], **record.kwargs[0])
        output = output[0] if model.recorder.tuple_output else output
    output.float().sum().backward()
    assert hidden.grad is not None
    return sum(kept.values())


@pytest.mark.parametrize("least", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
def test_a_compiled_layer_keeps_what_the_partition_says(family: str, least: bool) -> None:
    model = decoder(family)
    said = layer_cost.measure(model, model.units[1], ROWS, SEQ, "cuda", compiled=True, least=least)
    real = saved_by_the_compiler(model, least=least)
    assert said.running_bytes is not None, "the layer was traced"
    assert said.kept_bytes == pytest.approx(real, rel=0.02), (said.kept_bytes, real)


def test_what_torch_keeps_is_more_than_the_least() -> None:
    model = decoder("llama")
    least, usual = (
        layer_cost.measure(model, model.units[1], ROWS, SEQ, "cuda", compiled=True, least=least)
        for least in (True, False)
    )
    assert least.kept_bytes < 0.8 * usual.kept_bytes
    assert (least.remakes, usual.remakes) == (True, False)


def test_a_layer_that_is_compiled_but_for_packed_rows_has_memory_for_either() -> None:
    config = AutoConfig.for_model(
        "gpt_oss", hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8, head_dim=8
    )
    config.update({"num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 96})
    model = Decoder.from_config(config, precision="bf16").halves
    attention = model.units[1]
    assert attention.layer in model.mixing_layers
    with_either = layer_cost.measure(model, attention, ROWS, SEQ, "cuda", compiled=True)
    eager = layer_cost.measure(model, attention, ROWS, SEQ, "cuda")
    record = model.recorder.record(torch.zeros((ROWS, SEQ), dtype=torch.int64))
    shape = (ROWS, SEQ, model.hidden_size)
    module = on_meta(model.module_of(attention))
    cut = compile_memory.cut(module, record.args[0], record.kwargs[0], shape, model.dtype, model.recorder.tuple_output)
    scores = ROWS * 8 * SEQ * SEQ * 2
    assert cut.kept + cut.backward > eager.kept_bytes + 2 * scores, "its backward has several matrices of scores"
    assert with_either.running_bytes is not None
    assert with_either.running_bytes >= cut.kept + cut.backward
    assert with_either.kept_bytes >= max(eager.kept_bytes, cut.kept)
    assert not with_either.remakes


def test_less_is_kept_than_by_a_layer_that_is_not_compiled_and_in_proportion_to_the_rows() -> None:
    model = decoder("qwen2")
    two, four = (layer_cost.measure(model, model.units[1], rows, SEQ, "cuda", compiled=True) for rows in (2, 4))
    assert four.kept_bytes == pytest.approx(2 * two.kept_bytes, rel=0.02)
    assert two.kept_bytes < 0.8 * layer_cost.measure(model, model.units[1], 2, SEQ, "cuda").kept_bytes
    assert two.running_bytes is not None
    assert two.running_bytes > two.kept_bytes


def test_a_backward_needs_at_least_its_gradients_and_the_widest_part_beside_them() -> None:
    model = decoder("llama")
    record = model.recorder.record(torch.zeros((ROWS, SEQ), dtype=torch.int64))
    layer = on_meta(model.layers[0])
    shape = (ROWS, SEQ, model.hidden_size)
    cut = compile_memory.cut(layer, record.args[0], record.kwargs[0], shape, model.dtype, model.recorder.tuple_output)
    gradients = sum(p.numel() for p in layer.parameters()) * 2
    wide = ROWS * SEQ * SIZES["intermediate_size"] * 2
    assert gradients + 2 * wide < cut.backward < gradients + 6 * wide
    assert cut.forward > cut.kept
    assert cut.largest == wide


def test_a_forward_moves_what_its_norms_rotations_sums_and_swiglu_read_and_write() -> None:
    model = decoder("llama")
    found = measured(model).moved_bytes
    assert found is not None
    wide, hidden = (ROWS * SEQ * width * 2 for width in (SIZES["intermediate_size"], model.hidden_size))
    # SwiGLU reads two wide tensors and writes one; each of two norms reads and writes hidden states, each of two sums
    # reads two of them; queries and keys are rotated: at least twelve hidden states, and twice that with copies
    assert 3 * wide + 12 * hidden < found < 3 * wide + 24 * hidden


@pytest.mark.parametrize(("family", "spared"), [("qwen2", 1), ("gemma2", 0)])
def test_a_recomputation_is_planned_without_the_matmuls_that_only_the_output_depends_on(
    family: str, spared: int
) -> None:
    model = decoder(family)  # a norm follows Gemma's last matmul
    last = 2 * ROWS * SEQ * model.hidden_size * SIZES["intermediate_size"]
    assert measured(model).spared_flops == spared * last


def test_a_layer_that_cannot_be_traced_is_planned_as_if_it_were_not_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> compile_memory.Cut:
        raise ValueError("no")

    model = decoder("qwen2")
    monkeypatch.setattr(compile_memory, "cut", fails)
    with caplog.at_level(logging.INFO, "megatrain"):
        found = layer_cost.measure(model, model.units[1], ROWS, SEQ, "cuda", compiled=True)
        assert found == layer_cost.measure(model, model.units[1], ROWS, SEQ, "cuda")
        layer_cost.measure(model, model.units[1], ROWS, SEQ, "cuda", compiled=True)
    assert [r.message for r in caplog.records].count("Qwen2DecoderLayer is planned as if it were not compiled: no") == 1


def test_two_threads_that_plan_at_once_measure_what_one_does() -> None:
    """Tracing replaces methods of `nn.Module` for the whole process."""
    families = ("llama", "qwen3")
    wanted = [measured(decoder(family)) for family in families]
    models = [decoder(families[number % 2]) for number in range(12)]  # transformers sets the default dtype meanwhile
    original = nn.Module.__call__
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(measured, models))
    finally:
        sys.setswitchinterval(before)
    assert found == wanted * 6
    assert nn.Module.__call__ is original


def test_measuring_leaves_modules_of_other_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks of all modules, as torch's own counter of operations registers, run wherever a module does."""
    model = decoder("llama")
    wanted = layer_cost.measure(model, model.units[1], ROWS, SEQ, "cpu")
    forward, hooks = CheckpointedCall.forward, []

    def looked_at(*args: Any, **kwargs: Any) -> Any:
        hooks.extend(torch.nn.modules.module._global_forward_pre_hooks.values())
        hooks.extend(torch.nn.modules.module._global_forward_hooks.values())
        return forward(*args, **kwargs)

    monkeypatch.setattr(CheckpointedCall, "forward", looked_at)
    assert layer_cost.measure(model, model.units[1], ROWS, SEQ, "cpu") == wanted
    assert wanted.flops > 0
    assert hooks == []


def measured(model: Decoder) -> layer_cost.Measured:
    return layer_cost.measure(model, model.units[1], ROWS, SEQ, "cuda", compiled=True)
