"""Random sequences of what an engine can be asked for, on two engines under two plans.

One engine does what changes the state: steps, accumulated steps, steps whose gradients are not finite. The other one
does the same, and between it everything that must leave no trace: evaluations, saves, loads, restarts under yet another
plan, losses that fail, gradients that are formed and dropped, steps that are checked. Both must hold the same bits.
"""

import dataclasses
import random
from pathlib import Path
from typing import Any

import torch

import megatrain
from support import families
from support.reference import batches, packed

FAMILIES = (
    "llama3", "qwen2", "gemma2", "phi", "gpt2", "olmo2", "bloom", "gpt-neox", "mistral", "qwen3-moe", "deepseek-v3",
    "mixtral", "lfm2", "falcon",
)  # fmt: skip
LARGEST = (3, 32)  # rows, seq
SHAPES = (LARGEST, (2, 48), (1, 64), (1, 16), (3, 8))
MOST = 2  # micro-batches of a step
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
VOCAB = 96
TRACELESS = (
    "evaluate", "logprobs", "save", "begin_save", "reload", "restart", "failing_loss", "failing_backward", "dropped",
)  # fmt: skip


@dataclasses.dataclass
class Case:
    """One draw: a model as it is stored and frozen, and what is asked of it."""

    number: int
    family: str
    changes: dict[str, Any]
    precision: str
    freeze: list[str]
    frozen_dtypes: dict[str, torch.dtype]
    accumulates: bool
    """Whether gradients of several passes are added up, whose store is on the host."""
    options: dict[str, Any]
    asked: list[str]
    """Operations in order; those of `TRACELESS` are for the second engine alone."""


def drawn(number: int) -> Case:
    """The case of a number, always the same."""
    rng = random.Random(number)
    family = rng.choice(FAMILIES)
    changes = {"resid_pdrop": 0.1, "attn_pdrop": rng.choice([0.0, 0.1])} if family == "gpt2" else {}
    names = [name for name, _ in families.build(family, **changes).named_parameters()]
    layers = [name for name in names if ".0." in name or ".1." in name]
    freeze = rng.choice([[], [n for n in layers if ".1." in n], rng.sample(layers, 3), names[:1]])
    immediate = rng.random() < 0.25
    accumulates = not immediate and rng.random() < 0.7
    changing = ["step", *["checked", "not_finite"] * (not immediate), *["accumulated"] * accumulates]
    traceless = [a for a in TRACELESS if not immediate or a not in ("failing_backward", "dropped")]
    asked = [rng.choice(changing if rng.random() < 0.5 else traceless) for _ in range(10)]
    return Case(
        number=number,
        family=family,
        changes=changes,
        precision=rng.choice(["bf16", "fp32"]),
        freeze=freeze,
        frozen_dtypes={name: rng.choice(DTYPES) for name in freeze if rng.random() < 0.7},
        accumulates=accumulates,
        options={"update": "immediate", "max_grad_norm": None} if immediate else {"max_grad_norm": 0.5},
        asked=[*asked, "step"],
    )


def plan(rng: random.Random, case: Case) -> dict[str, Any]:
    """A plan; none of it may show."""
    return {
        "slots": rng.choice([2, 3]),
        "group": rng.choice([1, MOST]),
        "stage_buffers": rng.choice([2, 3]),
        "state_on_device": 0 if case.accumulates else rng.choice([0, 1]),
        "activation": rng.choice(["keep", "offload", "recompute"]),
        "inputs": rng.choice(["device", "host"]),
        "threads": rng.choice([1, 2]),
        "poison": True,
        "accumulate": case.accumulates,
    }


def made(case: Case, chosen: dict[str, Any]) -> megatrain.Engine:
    """An engine of the case with its initial weights."""
    model = families.build(case.family, **case.changes).train()
    decoder = megatrain.Decoder(model, freeze=case.freeze, precision=case.precision, frozen_dtypes=case.frozen_dtypes)
    return megatrain.Engine(
        decoder,
        device="cpu",
        optimizer=megatrain.AdamW(lr=1e-2, weight_decay=0.1),
        micro_batch=LARGEST,
        micro_batches=MOST,
        memory={"gpu": "1GiB", "host": "1GiB"},
        plan=chosen,
        **case.options,
    )


def state(ours: megatrain.Engine) -> dict[str, torch.Tensor]:
    """Every weight, moment and count."""
    found = {}
    for name, ref in ours.decoder.tensors.items():
        found[name] = ours.weight(name)
        if ref.role == "trainable":
            moments = ours.optimizer_state(name)
            found |= {f"{plane} of {name}": torch.as_tensor(value) for plane, value in moments.items()}
    return found


class _Failing(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        del ctx
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        del ctx
        raise ArithmeticError("the caller's own")


def _infinite(hidden: torch.Tensor, *_: Any) -> torch.Tensor:
    return hidden.float().sum() * float("inf")


def _failing(*_: Any) -> torch.Tensor:
    raise ArithmeticError("the caller's own")


def _failing_in_backward(hidden: torch.Tensor, *_: Any) -> torch.Tensor:
    return _Failing.apply(hidden).float().sum()  # type: ignore[no-any-return, no-untyped-call]


class Traced:
    """The engine that does everything, restarts included."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.rng = random.Random(-1 - case.number)
        self.engine = made(case, plan(self.rng, case))
        self.saves = 0
        self.running: Any = None

    def leave_no_trace(self, what: str, given: list[dict[str, torch.Tensor]]) -> None:
        """Does one operation of `TRACELESS`."""
        getattr(self, f"_{what}")(given)

    def _evaluate(self, given: list[dict[str, torch.Tensor]]) -> None:
        self.engine.evaluate(given)

    def _logprobs(self, given: list[dict[str, torch.Tensor]]) -> None:
        self.engine.logprobs(given)

    def _save(self, _: list[dict[str, torch.Tensor]]) -> Path:
        if self.running is not None:
            self.running.finish()
            self.running = None
        self.saves += 1
        path = self.folder / f"{self.saves}"
        self.engine.save(path)
        return path

    def _begin_save(self, _: list[dict[str, torch.Tensor]]) -> None:
        if self.running is not None:
            self.running.finish()
        self.saves += 1
        self.running = self.engine.begin_save(self.folder / f"{self.saves}")

    def _reload(self, given: list[dict[str, torch.Tensor]]) -> None:
        self.engine.load(self._save(given))

    def _restart(self, given: list[dict[str, torch.Tensor]]) -> None:
        path = self._save(given)
        self.close()
        self.engine = made(self.case, plan(self.rng, self.case))
        self.engine.load(path)

    def _failing_loss(self, given: list[dict[str, torch.Tensor]]) -> None:
        self._fails(given, _failing)

    def _failing_backward(self, given: list[dict[str, torch.Tensor]]) -> None:
        self._fails(given, _failing_in_backward)

    def _fails(self, given: list[dict[str, torch.Tensor]], loss_fn: Any) -> None:
        try:
            self.engine.step(given, loss_fn=loss_fn, normalizer=1.0)
        except ArithmeticError:
            return
        raise AssertionError("the loss function's error was lost")

    def _dropped(self, given: list[dict[str, torch.Tensor]]) -> None:
        path = self._save(given)
        self.engine.forward_backward(given, normalizer=7.0)
        self.engine.load(path)

    def close(self) -> None:
        if self.running is not None:
            self.running.finish()
            self.running = None
        self.engine.close()


def check(case: Case, folder: Path) -> None:
    """Raises AssertionError, with the case and the operation, where the two engines differ."""
    rng = random.Random(case.number)
    plain, traced = made(case, plan(rng, case)), Traced(case, folder)
    try:
        for at, what in enumerate(case.asked):
            given = _micro_batches(rng)
            if what in TRACELESS:
                traced.leave_no_trace(what, given)
                continue
            ours, theirs = (
                _changed(engine, what, given, check=what == "checked" and engine is traced.engine)
                for engine in (plain, traced.engine)
            )
            assert ours == theirs, f"{what} ({at}) gives {theirs} where {ours} is right: {case}"
        left, right = state(plain), state(traced.engine)
        different = [name for name in left if not torch.equal(left[name], right[name])]
        assert not different, f"{different[:4]} of {len(left)} differ: {case}"
        assert plain.num_steps == traced.engine.num_steps
    finally:
        plain.close()
        traced.close()


def _changed(engine: megatrain.Engine, what: str, given: list[dict[str, torch.Tensor]], *, check: bool) -> Any:
    """What an operation that changes the state returns, as text: NaN is to equal itself."""
    if what == "accumulated":
        losses = [engine.forward_backward([one], normalizer=40.0) for one in given]
        return repr((losses, engine.optimizer_step()))
    if what == "not_finite":
        return repr(engine.step(given, loss_fn=_infinite, normalizer=1.0))
    return repr(engine.step(given, check=check))


def _micro_batches(rng: random.Random) -> list[dict[str, torch.Tensor]]:
    made = []
    for _ in range(rng.choice(range(1, MOST + 1))):
        (rows, seq), seed = rng.choice(SHAPES), rng.randrange(1 << 30)
        if rng.random() < 0.25:
            cut = rng.randint(1, seq - 1)
            made.append(packed([[cut, seq - cut]] * rows, seed=seed, vocab=VOCAB))
        else:
            made += batches(1, seed=seed, rows=rows, seq=seq, padded=rng.random() < 0.25 and seq > 12, vocab=VOCAB)
    return made
