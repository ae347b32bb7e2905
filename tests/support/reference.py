"""Plain PyTorch as the reference: stock transformers with everything resident, torch.optim.AdamW, clip_grad_norm_.

Promise 1 is judged tensor by tensor against a run of the reference in fp64: the error may be 1e-5, or three times the
error that the same reference makes in fp32, whichever is larger.

Two things can bring a right engine near that bound, or over it, on other rows or another machine. Where the gradient of
one element cancels to about AdamW's eps of 1e-8 in the first step, its update lr g / (|g| + eps) turns rounding of g by
a millionth of what is usual in its tensor into a tenth of lr, which is 1e-5 of a small tensor's norm (StarCoder2's
`c_fc.weight`, rows of seed 36: 1.78e-8 in fp64, 2.33e-8 here, 1.82e-8 in plain fp32, usual 6e-3). And a parameter of
one element has no others to average with: its first moment can cancel (Apertus's `alpha_p`, rows of seed 0: 7e-6,
where a tenth of its last gradient is 2e-4). Of the rows of 60 seeds StarCoder2 came to at most 0.90 of the bound.
"""

import contextlib
import copy
import dataclasses
import itertools
import logging
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import megatrain

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
"""T-dense of the acceptance cases."""

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 8},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, **NO_DROPOUT},
}

logging.getLogger("transformers").setLevel(logging.ERROR)


def config(kind: str = "llama", **changes: Any) -> Any:
    """The configuration of a tiny model of a family."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **{**SIZES, **FAMILIES.get(kind, {}), **changes})


def build(kind: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A tiny stock model with real, somewhat uneven weights."""
    from transformers import AutoModelForCausalLM

    attention = changes.pop("attn_implementation", "sdpa")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config(kind, **changes), dtype=dtype, attn_implementation=attention)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.train()


def batches(
    count: int = 3, *, seed: int = 0, rows: int = 2, seq: int = 32, padded: bool = False, vocab: int = 256
) -> list[dict[str, Tensor]]:
    """Micro-batches of random tokens with unequal numbers of supervised ones, padded behind and before by turns where
    asked (padding behind needs no mask, padding before does)."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        ids = torch.randint(0, vocab, (rows, seq), generator=generator)
        labels = ids.clone()
        labels[:, : 5 * index] = -100
        batch = {"input_ids": ids, "labels": labels}
        if padded:
            mask = torch.ones_like(ids)
            mask[0, slice(0, 5 + index) if index % 2 else slice(seq - 9 + index, seq)] = 0
            labels[mask == 0] = -100
            batch["attention_mask"] = mask
        made.append(batch)
    return made


def packed(lengths: list[list[int]], *, seed: int = 0, vocab: int = 256) -> dict[str, Tensor]:
    """Rows of several documents, each with positions from 0 on; no token supervises the next document's first."""
    generator = torch.Generator().manual_seed(seed)
    seq = sum(lengths[0])
    ids = torch.randint(0, vocab, (len(lengths), seq), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def supervised(batch: dict[str, Tensor]) -> int:
    """Tokens that carry loss."""
    return int((batch["labels"][:, 1:] != -100).sum())


def cross_entropy_sum(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Sum over a micro-batch, logits upcast to fp32 as Hugging Face does."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1), reduction="sum"
    )


def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Sum of the cross-entropy over a micro-batch."""
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    return cross_entropy_sum(model(**inputs, use_cache=False).logits, batch)


def mean_loss(model: nn.Module, batch: dict[str, Tensor], tokens: int) -> Tensor:
    """Sum of the cross-entropy over a micro-batch divided by `tokens`, with the router's auxiliary loss where the
    model's configuration asks for it."""
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    output: Any = model(**inputs, use_cache=False)
    loss = cross_entropy_sum(output.logits, batch) / tokens
    aux_loss = getattr(output, "aux_loss", None)
    return loss if aux_loss is None else loss + cast("Any", model).router_aux_loss_coef * aux_loss


class AllInDouble(TorchFunctionMode):
    """Computes in fp64 what a model asks to have in fp32 (norms, softmax, rotary tables, recurrent states): without it
    an fp64 run would be no more exact there than the runs it judges."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


@dataclasses.dataclass
class Run:
    """What a reference run came to."""

    model: nn.Module
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    """Of the last step, before clipping."""
    optimizer: torch.optim.Optimizer


def run_reference(
    model: nn.Module,
    steps: list[list[dict[str, Tensor]]],
    *,
    dtype: torch.dtype = torch.float32,
    lr: float = 3e-4,
    weight_decay: float = 0.1,
    max_grad_norm: float | None = 0.5,
    frozen: tuple[str, ...] = (),
    no_decay: tuple[str, ...] = (),
) -> Run:
    """Trains a copy of a stock model: one backward a micro-batch, loss over the tokens of the whole step."""
    model = copy.deepcopy(model).to(dtype).train()
    exact = dtype == torch.float64
    if exact and getattr(model.config, "_experts_implementation", None) == "grouped_mm":
        model.set_experts_implementation("eager")  # torch groups no fp64 matmuls
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if not any(part in n for part in no_decay)], "weight_decay": weight_decay},
        {"params": [p for n, p in named if any(part in n for part in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr)
    losses, norms, gradients = [], [], {}
    for step in steps:
        tokens = sum(supervised(batch) for batch in step)
        total = 0.0
        for batch in step:
            with AllInDouble() if exact else contextlib.nullcontext():
                loss = mean_loss(model, batch, tokens)
            loss.backward()
            total += float(loss.detach())
        gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
        limit = float("inf") if max_grad_norm is None else max_grad_norm
        norms.append(float(torch.nn.utils.clip_grad_norm_([p for _, p in named], limit)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return Run(model, losses, norms, gradients, optimizer)


def error(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖ in fp64."""
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm().clamp_min(1e-30))


def assert_equal(ours: dict[str, Tensor], exact: dict[str, Tensor], plain: list[dict[str, Tensor]], what: str) -> None:
    """Promise 1 for a set of tensors: `exact` is the fp64 run, `plain` the fp32 ones."""
    assert set(exact) <= set(ours), sorted(set(exact) - set(ours))
    for name, value in exact.items():
        allowed = max(1e-5, *(3 * error(run[name], value) for run in plain))
        found = error(ours[name], value)
        assert found <= allowed, f"{what} of {name}: {found:.2e} where plain PyTorch has {allowed / 3:.2e}"


def by_row(step: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The same rows, a micro-batch each: another order of sums, which fp32 rounds otherwise."""
    return [{k: v[i : i + 1] for k, v in batch.items()} for batch in step for i in range(len(batch["input_ids"]))]


def at_once(step: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The same rows, all in one micro-batch."""
    return [{k: torch.cat([batch[k] for batch in step]) for k in step[0]}]


def rotated(step: list[dict[str, Tensor]], by: int) -> list[dict[str, Tensor]]:
    """The same rows, all in one micro-batch, in another order."""
    return [{k: v.roll(by, 0) for k, v in batch.items()} for batch in at_once(step)]


def one_document_per_row(step: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The documents of packed rows, a micro-batch each; those of one token have nothing to predict."""
    documents = []
    for batch in step:
        begins = [*(batch["position_ids"].flatten() == 0).nonzero().flatten().tolist(), batch["labels"].numel()]
        for start, end in itertools.pairwise(begins):
            cut = {name: batch[name].flatten()[None, start:end] for name in ("input_ids", "labels")}
            documents += [cut] if end - start > 1 else []
    return documents


def engine(model: Any, **options: Any) -> megatrain.Engine:
    """Our engine on a copy of a stock model, with the reference's settings."""
    optimizer = options.pop("optimizer", None) or megatrain.AdamW(lr=3e-4, weight_decay=0.1)
    options.setdefault("max_grad_norm", 0.5)
    options.setdefault("device", "cpu")
    options.setdefault("memory", {"gpu": "1GiB", "host": "1GiB"})
    return megatrain.Engine(copy.deepcopy(model), optimizer=optimizer, **options)


def weights(ours: megatrain.Engine) -> dict[str, Tensor]:
    return {name: ours.weight(name) for name in ours.decoder.tensors}


def assert_unchanged(ours: megatrain.Engine, before: dict[str, Tensor]) -> None:
    assert all(torch.equal(value, before[name]) for name, value in weights(ours).items())


def check_training(
    model: nn.Module,
    steps: list[list[dict[str, Tensor]]],
    *,
    reference: dict[str, Any] | None = None,
    splits: bool = False,
    whole: bool = False,
    alone: bool = False,
    **options: Any,
) -> tuple[megatrain.Engine, Run]:
    """Trains a model in our engine and by the reference in fp32 and fp64; compares losses, norms, gradients, moments
    and weights. With `splits` plain PyTorch's error is the largest of three splits of the rows: a gradient that cancels
    to nearly nothing (a key's bias, a scalar) may be lucky in one. With `whole` the reference has a step as one batch
    in three orders of its rows, with `alone` each document of packed rows by itself, in three orders. Returns our
    engine and the fp64 run."""
    settings = reference or {}
    ways = [by_row, at_once] if splits else []
    given = steps
    if whole:
        given, ways = (
            [at_once(step) for step in steps],
            [lambda step: rotated(step, 1), lambda step: rotated(step, 2)],
        )
    if alone:
        given, ways = (
            [one_document_per_row(step) for step in steps],
            [lambda step: one_document_per_row(step)[::-1], lambda step: one_document_per_row(step[::-1])],
        )
    exact = run_reference(model, given, dtype=torch.float64, **settings)
    plain = [run_reference(model, given, dtype=torch.float32, **settings)]
    for way in ways:
        plain += [run_reference(model, [way(step) for step in steps], dtype=torch.float32, **settings)]
    ours = engine(model, **options)
    outputs = [ours.step(step) for step in steps]
    for found, wanted, near in (
        ([o.loss for o in outputs], exact.losses, [run.losses for run in plain]),
        ([o.grad_norm for o in outputs], exact.norms, [run.norms for run in plain]),
    ):
        for a, b, *others in zip(found, wanted, *near, strict=True):
            assert abs(a - b) <= max(1e-5, *(3 * abs(c - b) / b for c in others)) * b, (found, wanted)
    weights, *plain_weights = (dict(run.model.named_parameters()) for run in (exact, *plain))
    assert_equal(dict(ours.state_dict()), weights, plain_weights, "weight")
    trained = list(exact.gradients)
    if ours.update == "just_in_time":
        gradients = {name: ours.gradient(name) for name in trained}
        assert_equal(gradients, exact.gradients, [run.gradients for run in plain], "gradient")
    for moment in ("exp_avg", "exp_avg_sq"):
        assert_equal(
            {name: ours.optimizer_state(name)[moment] for name in trained},
            {name: exact.optimizer.state[weights[name]][moment] for name in trained},
            [
                {name: run.optimizer.state[own[name]][moment] for name in trained}
                for run, own in zip(plain, plain_weights, strict=True)
            ],
            moment,
        )
    assert {ours.optimizer_state(name)["step"] for name in trained} == {len(steps)}
    return ours, exact


ROPE: dict[str, dict[str, Any]] = {
    "longrope": {
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.2 * i for i in range(8)],
    },
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"partial_rotary_factor": 0.5},
}
"""Scalings that need, or are tried with, more than a factor and the length that the model was made for."""
ORIGINAL = 32


def scaled(rope: str) -> Any:
    """A tiny Llama made for 32 positions and scaled to 128; with `dynamic` the first is its number, as in stock."""
    asked = {"rope_type": rope, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    positions = ORIGINAL if rope == "dynamic" else 4 * ORIGINAL
    return build("llama", max_position_embeddings=positions, rope_parameters=asked | ROPE.get(rope, {}))
