"""What of a pass may be captured as CUDA graphs. That the graphs give the same bits, `gpu/check_graphs.py` shows."""

import itertools
import json
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain import _core
from megatrain.engine import layer_graphs, step_templates
from megatrain.engine.inputs import InputPreprocessor, MicroBatch
from megatrain.engine.layer_graphs import CapturedPass, LayerGraphs, Recording, can_capture
from megatrain.engine.profile import plan_request
from megatrain.engine.step import Pass
from megatrain.models.decoder import Decoder
from megatrain.models.types import PRECISIONS
from megatrain.models.varlen_attention import Documents, documents_attention
from megatrain.weights.state_format import StateFormat
from support.reference import batches, build, config, engine, packed

CPU = torch.device("cpu")


@pytest.fixture
def on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors pass for a card's."""
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))


def micro_batches(given: list[dict[str, Any]]) -> list[MicroBatch]:
    preparer = InputPreprocessor(Decoder.from_config(config()), CPU)
    return [preparer.with_record(micro) for micro in preparer.prepare(given).micro_batches]


def kinds(graphs: LayerGraphs, given: list[dict[str, Any]], times: int) -> list[type]:
    found = [graphs.begin(micro_batches(given)) for _ in range(times)]
    return [type(one) for one in found]


@pytest.mark.usefixtures("on_the_card")
def test_a_pass_is_recorded_once_it_has_run_twice() -> None:
    graphs = LayerGraphs(frozenset({1}))
    assert kinds(graphs, batches(2), 3) == [type(None), type(None), Recording]
    assert kinds(graphs, batches(1), 2) == [type(None), type(None)], "another number of micro-batches"
    assert kinds(graphs, batches(2, seq=16), 1) == [type(None)], "another length"
    assert kinds(graphs, batches(2, seed=9), 1) == [Recording], "other tokens"


@pytest.mark.usefixtures("on_the_card")
def test_a_captured_pass_is_found_by_its_shapes_and_reads_the_new_arguments() -> None:
    graphs = LayerGraphs(frozenset({1}))
    kinds(graphs, batches(1), 2)
    recording = graphs.begin(micro_batches(batches(1)))
    assert isinstance(recording, Recording)
    static = [torch.full_like(tensor, -1) for tensor in recording.inputs.values()]
    known = CapturedPass({}, static, torch.empty(0), [None] * len(static))
    graphs._captured[recording.key] = known
    micro = micro_batches(batches(1, seed=3))
    assert graphs.begin(micro) is known
    arguments = layer_graphs._Arguments.of(micro[0])
    assert arguments is not None
    wanted = {id(t): t for t in arguments.tensors}.values()
    assert len(static) > 0
    assert all(torch.equal(got, want) for got, want in zip(static, wanted, strict=True))


@pytest.mark.usefixtures("on_the_card")
def test_what_is_captured_reads_one_copy_of_what_layers_share() -> None:
    micro = micro_batches(batches(1))[0]
    arguments = layer_graphs._Arguments.of(micro)
    assert arguments is not None
    static = {id(t): t.clone() for t in arguments.tensors}
    args, kwargs = arguments.bound_to(static)
    assert len(kwargs) == len(micro.recorded.kwargs)
    for made, given in zip((args, kwargs), (micro.recorded.args, micro.recorded.kwargs), strict=True):
        found, wanted = (torch.utils._pytree.tree_leaves(tree) for tree in (made, given))
        for one, other in zip(found, wanted, strict=True):
            assert one is static[id(other)] if isinstance(other, Tensor) else one == other


def test_arguments_on_the_cpu_are_not_captured() -> None:
    assert kinds(LayerGraphs(frozenset({1})), batches(1), 4) == [type(None)] * 4


@pytest.mark.usefixtures("on_the_card")
def test_large_masks_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_graphs, "_LARGEST_INPUT", 16)
    assert kinds(LayerGraphs(frozenset({1})), batches(1), 4) == [type(None)] * 4


@pytest.mark.usefixtures("on_the_card")
def test_counts_of_ever_new_lengths_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_graphs, "_MOST_COUNTED", 3)
    graphs = LayerGraphs(frozenset({1}))
    for seq in range(8, 16):
        kinds(graphs, batches(1, seq=seq), 1)
        assert len(graphs._runs) <= 3


@pytest.mark.usefixtures("on_the_card")
def test_packed_rows_have_few_kinds() -> None:
    """Of 16 batches of random documents."""
    keys = set()
    generator = torch.Generator().manual_seed(0)
    for seed in range(16):
        cuts = torch.randperm(63, generator=generator)[: 2 + seed].add(1).sort().values.tolist()
        row = [end - begin for begin, end in itertools.pairwise([0, *cuts, 64])]
        micro = micro_batches([packed([row], seed=seed)])[0]
        leaves = torch.utils._pytree.tree_leaves(micro.recorded.kwargs, is_leaf=lambda v: isinstance(v, Documents))
        documents = next(leaf for leaf in leaves if isinstance(leaf, Documents))
        rounded = documents.rounded_up()
        keys.add((rounded.starts.shape[0] - 1, int(rounded.lengths.max())))
    assert all(n & (n - 1) == 0 for key in keys for n in key)
    assert len(keys) <= 8


def test_rounding_up_adds_empty_documents_alone() -> None:
    lengths = torch.tensor([5, 11, 3])
    starts = torch.tensor([0, 5, 16, 19], dtype=torch.int32)
    rounded = Documents(starts, lengths, None).rounded_up()
    assert rounded.starts.tolist() == [0, 5, 16, 19, 19]
    assert rounded.starts.dtype == torch.int32
    assert int(rounded.lengths.max()) == 16
    assert rounded.lengths.shape == (4,)
    assert lengths.tolist() == [5, 11, 3]
    query = torch.randn(19, 2, 8)
    whole = documents_attention(query, query, query, rounded.starts, rounded.starts.diff().long(), None, 0.3)[0]
    assert torch.equal(whole, documents_attention(query, query, query, starts, lengths, None, 0.3)[0])


def test_what_may_be_captured_at_all() -> None:
    assert can_capture(Decoder.from_config(config()), 32)
    assert not can_capture(Decoder.from_config(config()), 33)
    assert not can_capture(Decoder.from_config(config("gpt2", resid_pdrop=0.1)), 1)
    routed = config("mixtral", num_local_experts=4, num_experts_per_tok=2)
    assert not can_capture(Decoder.from_config(routed), 1)


@pytest.mark.parametrize(
    ("micro_batches", "stored", "captured"), [(32, "bf16", True), (33, "bf16", False), (1, "fp32", False)]
)
def test_a_plan_counts_no_captured_layers_where_none_will_be(micro_batches: int, stored: str, captured: bool) -> None:
    """More than 32 micro-batches, and frozen weights that are cast, are computed without graphs."""
    dtype = PRECISIONS[stored]
    decoder = Decoder(build("llama", dtype=dtype), freeze=["model.layers.0.*"], precision="bf16")
    request = plan_request(
        decoder,
        micro_batch=(1, 64),
        micro_batches=micro_batches,
        grad_precision="bf16",
        state_format=StateFormat(),
        update="just_in_time",
        budget={"device": 8 << 30, "host": 8 << 30},
        device="cuda",
    )
    plan = json.loads(_core.plan(json.dumps(request)))
    assert plan["graphs"] is captured
    assert any(item["what"] == "captured layers (torch)" for item in plan["items"]) is captured


@pytest.mark.parametrize(
    ("state", "activation", "inputs", "wanted"),
    [
        (["device"] * 4, "keep", "device", {1, 2, 3, 4}),
        (["device", "host", "device", "host"], "recompute", "device", {1, 3}),
        (["device"] * 4, "offload", "device", set()),
        (["device"] * 4, "recompute", "host", set()),
    ],
)
def test_units_that_stay_on_the_card_are_captured_but_for_tiled_ones(
    state: list[str], activation: str, inputs: str, wanted: set[int]
) -> None:
    end = {"state": "device", "activation": "keep", "input": "device"}
    units = [{"state": place, "activation": activation, "input": inputs} for place in state]
    plan = {"graphs": True, "units": [end, *units, end]}
    assert step_templates.captured_units(plan, {}) == wanted
    assert step_templates.captured_units(plan, {2: 5, 4: 5}) == wanted - {2, 4}
    assert not step_templates.captured_units(plan | {"graphs": False}, {})


class _Graph:
    """Stands for `torch.cuda.CUDAGraph`: its operations run on the CPU where a card would note them."""

    def capture_begin(self, **_: Any) -> None: ...

    def capture_end(self) -> None: ...


@pytest.mark.parametrize("plan", [{"fragments": "halves"}, {"mlp_tiles": 3}])
def test_halves_are_captured_as_parts_of_their_own(monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any]) -> None:
    """A pass is captured whose layers are halves: hidden states go from graph to graph, and through tensors of their
    own before and after a half that is not captured."""
    ours = engine(build("llama"), plan=plan)
    ops: list[Any] = []
    compute = Pass._compute
    monkeypatch.setattr(Pass, "_compute", lambda self, op: (compute(self, op), ops.append(op))[0])
    ours.step(batches(2))
    templates, tiled = ours._runtime.templates, ours._runtime.cut.tiled
    units = frozenset(range(1, len(ours.decoder.units) - 1)) - tiled.keys()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    arguments = [layer_graphs._Arguments.of(micro) for micro in micro_batches(batches(2))]
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    given = [found for found in arguments if found is not None]
    static = {id(t): t.clone() for found in given for t in found.tensors}
    work = layer_graphs._Capture(templates, units, given, static, None, fp32_sums=False)
    for op in ops:
        work.add(op)
    assert {(phase, unit) for phase, unit, _ in work.parts} == {(p, u) for p in ("forward", "backward") for u in units}
    first, last = min(units), max(units)
    for (phase, unit, _), part in work.parts.items():
        begins, ends = (first, last) if phase == "forward" else (last, first)
        assert (part.entry is not None) == (bool(tiled) or unit == begins), (phase, unit)
        assert (part.exit is not None) == (bool(tiled) or unit == ends), (phase, unit)
    ours.close()
