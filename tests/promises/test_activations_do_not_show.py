"""Where activations go shows in no number: a bounded fuzz over plans, shapes, frozen parts, stored types and families.

Kept activations are the reference; offloaded and recomputed ones give their bits. With `poison`, whatever the core does
not carry to the host and back is NaN. Nor does it show in which type frozen weights are stored whose values are the
same: the reference has them in the type that is computed in.
"""

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch

import megatrain
from support import families
from support.reference import batches, packed

PLANNED = (4, 32)  # rows, seq
FUZZED = (
    "llama3", "qwen2", "gemma2", "phi", "gpt2", "olmo2", "bloom", "gpt-neox", "mistral", "qwen3-moe", "deepseek-v3",
    "mixtral", "lfm2", "falcon",
)  # fmt: skip
SHAPES = (PLANNED, (2, 64), (1, 64), (1, 16), (3, 8))
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@dataclasses.dataclass
class Case:
    """One draw: a model as it is stored and frozen, how it is planned, and what it is trained with."""

    family: str
    precision: str
    model_dtype: torch.dtype
    training: bool
    freeze: list[str]
    frozen_dtypes: dict[str, torch.dtype]
    changes: dict[str, Any]
    plan: dict[str, Any]
    micro_batches: list[dict[str, torch.Tensor]]
    options: dict[str, Any]


def drawn(number: int) -> Case:
    """The case of a number, always the same."""
    rng = random.Random(number)
    family = rng.choice(FUZZED)
    changes: dict[str, Any] = {}
    if family == "gpt2" and rng.random() < 0.5:
        changes = {"resid_pdrop": 0.1, "attn_pdrop": rng.choice([0.0, 0.1])}
    names = [n for n, _ in families.build(family, **changes).named_parameters()]
    layers = [n for n in names if ".0." in n or ".1." in n]
    frozen = rng.choice([[], [n for n in layers if ".1." in n], rng.sample(layers, 3), layers, names[:1]])
    micro_batches = []
    for seed in range(rng.choice([1, 2, 3])):
        rows, seq = rng.choice(SHAPES)
        if rng.random() < 0.25:
            cut = rng.randint(1, seq - 1)
            micro_batches.append(packed([[cut, seq - cut]] * rows, seed=seed, vocab=96))
        else:
            padded = rng.random() < 0.25 and seq > 12
            micro_batches += batches(1, seed=seed, rows=rows, seq=seq, padded=padded, vocab=96)
    return Case(
        family=family,
        precision=rng.choice(["bf16", "fp32"]),
        model_dtype=rng.choice([torch.float32, torch.float32, torch.bfloat16]),
        training=rng.random() < 0.8,
        freeze=frozen,
        frozen_dtypes={n: rng.choice(DTYPES) for n in frozen if rng.random() < 0.7},
        changes=changes,
        plan={
            "slots": rng.choice([2, 3]),
            "group": rng.choice([1, len(micro_batches)]),
            "stage_buffers": rng.choice([2, 3]),
            "state_on_device": rng.choice([0, 1]),
        },
        micro_batches=micro_batches,
        options={"update": "immediate", "max_grad_norm": None} if rng.random() < 0.25 else {},
    )


def in_compute_type(case: Case, model: Any) -> dict[str, torch.dtype]:
    """Gives the frozen weights the values that are computed with, and the type of each that they are stored in then."""
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    stored = {name: case.frozen_dtypes.get(name, case.model_dtype) for name in case.freeze}
    with torch.no_grad():
        for name in case.freeze:
            parameter = model.get_parameter(name)
            parameter.copy_(parameter.to(stored[name]).to(dtype))
    return dict.fromkeys(case.freeze, dtype)


def bits(case: Case, *, as_computed: bool = False, **plan: Any) -> dict[str, torch.Tensor]:
    """Loss and norm of two steps, and the trained weights and moments they leave."""
    # the values of the type the model comes in, in one that holds those of every type
    model = families.build(case.family, **case.changes).to(case.model_dtype).float().train(case.training)
    stored = dict.fromkeys(case.freeze, case.model_dtype) | case.frozen_dtypes
    if as_computed:
        stored = in_compute_type(case, model)
    decoder = megatrain.Decoder(model, freeze=case.freeze, precision=case.precision, frozen_dtypes=stored)
    ours = megatrain.Engine(
        decoder,
        device="cpu",
        optimizer=megatrain.AdamW(lr=1e-2),
        micro_batch=PLANNED,
        micro_batches=len(case.micro_batches),
        memory={"gpu": "1GiB", "host": "1GiB"},
        plan={"poison": True, "threads": 1, **case.plan, **plan},
        **case.options,
    )
    outs = [ours.step(case.micro_batches) for _ in range(2)]
    found = {"losses and norms": torch.tensor([(out.loss, out.grad_norm) for out in outs], dtype=torch.float64)}
    for name, ref in decoder.tensors.items():
        if ref.role == "trainable":
            found[name] = ours.weight(name)
            found |= {f"{plane} of {name}": ours.optimizer_state(name)[plane] for plane in ("exp_avg", "exp_avg_sq")}
    ours.close()
    return found


def assert_hidden(case: Case) -> None:
    wanted = bits(case, as_computed=True, activation="keep")
    assert all(value.isfinite().all() for value in wanted.values())
    for activation, inputs in [("keep", None), *itertools.product(("offload", "recompute"), ("device", "host"))]:
        found = bits(case, activation=activation, inputs=inputs)
        different = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
        assert not different, f"{activation}, inputs on {inputs}: {different[:4]} of {len(wanted)} differ in {case}"


@pytest.mark.parametrize("number", range(24))
def test_neither_where_activations_go_nor_how_frozen_weights_are_stored_shows(number: int) -> None:
    assert_hidden(drawn(number))
