"""The page of the documentation on architectures, written from what their tests found.

Run: python -m support.architectures, in tests/. It runs those tests, a few minutes, keeps their outcomes and writes
the page.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrain.compat import dotted
from support.families import (
    BY_DOCUMENT,
    CHUNKS_OF_DOCUMENTS_SINCE,
    DENSE_MASKS,
    FAMILIES,
    PACKS_SINCE,
    RANDOM_ROUTING,
    REFUSED,
    ROUTER_LOSS,
)
from support.vision import SEEING

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
OUTCOMES = Path(__file__).with_suffix(".json")

TRAINED = "models/test_families.py::test_three_padded_steps_equal_plain_pytorch"
PACKED = "models/test_families.py::test_packed_and_recomputed_steps_equal_plain_pytorch"
DOCUMENTS = "models/test_families.py::test_documents_of_a_packed_row_do_not_see_each_other"
REPLAYED = "models/test_families.py::test_random_routing_is_replayed_in_recomputation"
IN_AND_OUT = "models/test_families.py::test_a_stock_folder_is_read_trained_exported_and_read_by_stock_again"
IS_REFUSED = "models/test_families.py::test_what_cannot_be_trained_exactly_is_refused_with_the_reason"
ROUTED = "models/test_moe.py::test_three_steps_equal_plain_pytorch_with_the_step_as_one_batch"
ROUTED_AT_RANDOM = "models/test_moe.py::test_random_routing_is_replayed_for_the_term_too"
NO_TERM = "models/test_moe.py::test_where_stock_adds_no_term_none_is_added"
SEES = "models/test_vision.py::test_three_steps_with_images_equal_plain_pytorch"
SEES_FROZEN = "models/test_vision.py::test_three_steps_with_a_frozen_tower_equal_plain_pytorch"
SEES_IN_AND_OUT = "models/test_vision.py::test_a_stock_folder_is_read_trained_exported_and_read_by_stock_again"
TESTS = (
    *(TRAINED, PACKED, DOCUMENTS, REPLAYED, IN_AND_OUT, IS_REFUSED),
    *(ROUTED, ROUTED_AT_RANDOM, NO_TERM, SEES, SEES_FROZEN, SEES_IN_AND_OUT),
)
"""What a cell is made of: each runs once a family, and once a way to compute its experts."""

Found = dict[str, dict[str, str]]
"""Outcomes (passed, failed, skipped) by test and case."""

HEAD = """# Architectures

Written by `python -m support.architectures` (in `tests/`) from the outcomes of the tests that it runs, which
`tests/support/architectures.json` keeps; a test fails when it is not current. Each row is a tiny random model of stock
transformers, which `tests/models/test_families.py` trains on every run:

- *padded*: three clipped AdamW steps of two padded micro-batches (one behind, one before) in fp32 on the CPU. Losses,
  gradient norms, and of every tensor the gradient, both moments and the weight differ from an fp64 run by at most 1e-5,
  or by three times what plain fp32 PyTorch does, the largest of three ways to split the rows.
- *packed*: the same with several documents a row and all activations recomputed; documents do not see each other.
  *dense mask*: kept apart by one, which makes attention about 3 times as slow on a card; elsewhere attention takes
  documents of any length.
  *by document*: stock would let them (a state is carried from token to token, or masks are built without looking at
  positions), so the layers that do are given each document as a row of its own, and so is the reference. It costs a
  call of such a layer for each length of documents, eight lengths an octave, and at most an eighth of filling.
- *experts*: how transformers computes them; each way is trained. `batched_mm` gathers weights and is refused.
- *router loss*: with `output_router_logits` in the model's configuration, `tests/models/test_moe.py` trains it with the
  router's auxiliary loss. It is taken over all tokens of the optimizer step, padding left out, of all layers: as stock
  transformers takes it over the step as one batch, however the step is split into micro-batches. *none in stock*: stock
  adds no such term, so none is added here.
- *in and out*: a folder of stock `save_pretrained` is read, trained and exported. Its keys are the source's, stock
  `from_pretrained` finds none missing or unexpected, and logits are equal.

A source is read in whichever form the hub has it, and exported in that form or in the library's: beside experts apart
and fused, tensors that are published transposed (Qwen3-VL-MoE), with interleaved rows or heads, or several in one
(`tests/weights/test_layouts.py`, `tests/weights/test_hf_layout.py`). Weights that are published in MXFP4 (GPT-OSS) or
in FP8 with a scale for each block (DeepSeek-V3) are dequantised as they are read, to the values that stock gives with
`dequantize=True`; they are trained and exported unquantised (`tests/weights/test_dequantize.py`). Other ways to
quantise are refused by name.

| Architecture | `model_type` | padded | packed | experts | router loss | in and out |
|---|---|---|---|---|---|---|"""
SEEING_HEAD = """
## With vision

Images are merged by the model's own code: its vision tower and projector belong to the embed unit, are sent with it,
and are trained or frozen (`freeze: ["*visual*"]`). A micro-batch holds what the model's processor makes:
`pixel_values`, `image_grid_thw`, `token_type_ids`, … Features that a model adds behind its first layers (Qwen3-VL) are
added there. What no layer depends on (the last block of LLaVA's tower) is left as it is, and so is all that sees
images in a step without one, as in PyTorch. `tests/models/test_vision.py` trains each:

- *trained*, *frozen tower*: three clipped AdamW steps as above, of three micro-batches each: rows of two, one and no
  image, of several sizes where the model takes them, padded behind and before; text alone; one image. All parameters
  are trained, or all but the tower's (and all activations recomputed).
- *in and out*: as above, in the layout of published checkpoints.

| Architecture | `model_type` | trained | frozen tower | in and out |
|---|---|---|---|---|"""
BETWEEN = """
[^1]: Its router draws random numbers in training, so no other program has the same ones. Recomputation is bit-equal
    to keeping activations instead.

[^2]: Before transformers 5.23, which we follow, its chunks of attention are counted from the start of the row, and
    since then from the start of the document.

Others of the same form run too: what is needed is found by running the model's own code on stubs, not by its name.
What cannot be trained exactly is refused before anything is loaded:

| Refused | `model_type` | because it |
|---|---|---|"""


def test_of(item: pytest.Item) -> str:
    """The file and the function of a test, as `TESTS` has them."""
    return f"{item.path.parent.name}/{item.path.name}::{getattr(item, 'originalname', item.name)}"


def case_of(item: Any) -> str:
    """What a test was run with: a family and its way to compute experts, or the title of what is refused."""
    given = item.callspec.params
    refusal = given.get("refusal")
    return refusal.title if refusal is not None else case(given["name"], given.get("experts"))


def case(name: str, experts: str | None) -> str:
    """As `case_of`."""
    return f"{name} {experts}" if experts else name


def ways(name: str) -> tuple[str | None, ...]:
    """How the experts of a family are computed in tests; of one without any there is one way."""
    return ("eager", "grouped_mm") if FAMILIES[name].experts else (None,)


class Recorder:
    """A plugin of pytest: keeps the outcomes of the tests that the table is made of."""

    def __init__(self) -> None:
        self.found: Found = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: Any = yield
        cases = self.found.setdefault(test_of(item), {})
        if cases.get(case_of(item), "passed") == "passed":  # set up, run and torn down: the first that did not pass
            cases[case_of(item)] = report.outcome
        return report


def cell(found: Found, tests: str | Iterable[str], cases: Iterable[str], words: str = "yes") -> str:
    """`words` where every one of the cases has passed in every one of the tests."""
    cases = list(cases)
    outcomes = {
        found.get(t, {}).get(c, "missing") for t in ([tests] if isinstance(tests, str) else tests) for c in cases
    }
    return words if outcomes == {"passed"} else "**no**" if "failed" in outcomes else "not run"


def table(found: Found) -> str:
    """The page of the documentation, of these outcomes."""
    lines = [HEAD]
    for name, family in FAMILIES.items():
        at_random = name in RANDOM_ROUTING
        cases = [case(name, way) for way in ways(name)]
        trained = REPLAYED if at_random else TRAINED
        word = "replayed [^1]" if at_random else "yes"
        padded = cell(found, trained, cases, word)
        packing = "by document" if name in BY_DOCUMENT else "dense mask" if name in DENSE_MASKS else word
        if since := PACKS_SINCE.get(name):
            packing += f"; by document before transformers {dotted(since)}"
        packing += " [^2]" if name in CHUNKS_OF_DOCUMENTS_SINCE else ""
        packed = cell(found, trained if at_random else PACKED, cases, packing)
        packed = cell(found, DOCUMENTS, [name], packed)
        experts = router = ""
        if family.experts:
            experts = ", ".join(cell(found, trained, [case(name, way)], str(way)) for way in ways(name))
            if at_random:
                router = cell(found, ROUTED_AT_RANDOM, [name], "replayed [^1]")
            elif name in ROUTER_LOSS:
                router = cell(found, ROUTED, cases)
            else:
                router = cell(found, NO_TERM, [name], "none in stock")
        back = cell(found, IN_AND_OUT, [name])
        lines.append(f"| {family.title} | `{family.kind}` | {padded} | {packed} | {experts} | {router} | {back} |")
    lines.append(SEEING_HEAD)
    for name, seeing in SEEING.items():
        trained, frozen, back = (cell(found, test, [name]) for test in (SEES, SEES_FROZEN, SEES_IN_AND_OUT))
        lines.append(f"| {seeing.title} | `{seeing.kind}` | {trained} | {frozen} | {back} |")
    lines.append(BETWEEN)
    lines += [f"| {r.title} | `{r.kind}` | {cell(found, IS_REFUSED, [r.title], r.reason)} |" for r in REFUSED]
    return "\n".join(lines) + "\n"


def recorded() -> Found:
    """The outcomes that are kept."""
    found: Found = json.loads(OUTCOMES.read_text(encoding="utf-8"))
    return found


def main() -> int:
    recorder = Recorder()
    folder = Path(__file__).parents[1]
    pytest.main(["-q", "-p", "no:xdist", *(str(folder / test) for test in TESTS)], plugins=[recorder])
    OUTCOMES.write_text(json.dumps(recorder.found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(table(recorder.found), encoding="utf-8")
    return int(any(outcome != "passed" for cases in recorder.found.values() for outcome in cases.values()))


if __name__ == "__main__":
    sys.exit(main())
