"""Plain PyTorch as the reference: stock transformers with everything resident, torch.optim.AdamW, clip_grad_norm_.

Promise 1 is judged tensor by tensor against a run of the reference in fp64: the error may be 1e-5, or three times the
error that the same reference makes in fp32, whichever is larger.
"""

import copy
import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor, nn

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
    """Micro-batches of random tokens with unequal numbers of supervised ones, right-padded where asked."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        ids = torch.randint(0, vocab, (rows, seq), generator=generator)
        labels = ids.clone()
        labels[:, : 5 * index] = -100
        batch = {"input_ids": ids, "labels": labels}
        if padded:
            mask = torch.ones_like(ids)
            mask[0, seq - 9 + index :] = 0
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


def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Sum of the cross-entropy over a micro-batch, logits upcast to fp32 as Hugging Face does."""
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    logits = model(**inputs, use_cache=False).logits
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1), reduction="sum"
    )


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
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    max_grad_norm: float | None = 0.5,
    frozen: tuple[str, ...] = (),
    no_decay: tuple[str, ...] = (),
) -> Run:
    """Trains a copy of a stock model: one backward a micro-batch, loss over the tokens of the whole step."""
    model = copy.deepcopy(model).to(dtype).train()
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
            loss = loss_sum(model, batch) / tokens
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


def assert_equal(ours: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor], what: str) -> None:
    """Promise 1 for a set of tensors: `exact` is the fp64 run, `plain` the fp32 one."""
    assert set(exact) <= set(ours), sorted(set(exact) - set(ours))
    for name, value in exact.items():
        allowed = max(1e-5, 3 * error(plain[name], value))
        found = error(ours[name], value)
        assert found <= allowed, f"{what} of {name}: {found:.2e} where plain PyTorch has {allowed / 3:.2e}"


def engine(model: Any, **options: Any) -> megatrain.Engine:
    """Our engine on a copy of a stock model, with the reference's settings."""
    optimizer = options.pop("optimizer", None) or megatrain.AdamW(lr=1e-3, weight_decay=0.1)
    options.setdefault("max_grad_norm", 0.5)
    options.setdefault("device", "cpu")
    options.setdefault("memory", {"gpu": "1GiB", "host": "1GiB"})
    return megatrain.Engine(copy.deepcopy(model), optimizer=optimizer, **options)


def check_training(
    model: nn.Module,
    steps: list[list[dict[str, Tensor]]],
    *,
    reference: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[megatrain.Engine, Run]:
    """Trains a model in our engine and by the reference in fp32 and fp64, and compares losses, norms, gradients, weights
    and moments. Returns our engine and the fp64 run."""
    settings = reference or {}
    exact = run_reference(model, steps, dtype=torch.float64, **settings)
    plain = run_reference(model, steps, dtype=torch.float32, **settings)
    ours = engine(model, **options)
    outputs = [ours.step(step) for step in steps]
    for found, wanted, near in (
        ([o.loss for o in outputs], exact.losses, plain.losses),
        ([o.grad_norm for o in outputs], exact.norms, plain.norms),
    ):
        for a, b, c in zip(found, wanted, near, strict=True):
            assert abs(a - b) <= max(1e-5, 3 * abs(c - b) / b) * b, (found, wanted)
    exact_weights, plain_weights = dict(exact.model.named_parameters()), dict(plain.model.named_parameters())
    assert_equal(dict(ours.state_dict()), exact_weights, plain_weights, "weight")
    trained = list(exact.gradients)
    if ours.update == "just_in_time":
        gradients = {name: ours.gradient(name) for name in trained}
        assert_equal(gradients, exact.gradients, plain.gradients, "gradient")
    for moment in ("exp_avg", "exp_avg_sq"):
        assert_equal(
            {name: ours.optimizer_state(name)[moment] for name in trained},
            {name: exact.optimizer.state[exact_weights[name]][moment] for name in trained},
            {name: plain.optimizer.state[plain_weights[name]][moment] for name in trained},
            moment,
        )
    assert {ours.optimizer_state(name)["step"] for name in trained} == {len(steps)}
    return ours, exact
