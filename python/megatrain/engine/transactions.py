"""Passes over a model's units, and the gradients that wait for their update: where each begins and ends.

Every pass and every `apply` runs in an `InterruptGuard`, so that an interrupt leaves the state of a finished step. Just
in time, the interrupted step is dropped, or finished if `apply` was already called; with immediate updates it is always
finished first."""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatrain import _core
from megatrain.engine import numerics, repeat_check
from megatrain.engine.default_device import on_cpu, on_present_default
from megatrain.engine.embed_head import HeadTemplate, LossFn, LossOptions
from megatrain.engine.inputs import LEAST_DIVISOR, MOST_DIVISOR, InputPreprocessor, StepInputs
from megatrain.engine.interrupt_guard import InterruptGuard, under_way
from megatrain.engine.options import positive
from megatrain.engine.runtime import Runtime
from megatrain.engine.step import Pass, random_key
from megatrain.errors import ConfigError, EngineBroken, MegatrainError
from megatrain.models.moe import RouterLoss
from megatrain.models.support import refuse_global_hooks

log: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Result of one optimizer step."""

    loss: float
    """Mean over the supervised tokens of the step, before its update, weighted where it has weights; 0 where there are
    none."""
    grad_norm: float
    """Norm of all gradients before clipping."""
    num_tokens: int
    """Supervised tokens."""
    skipped: bool = False
    """Whether nothing was updated."""
    clip: float = 1.0
    """The factor that clipping multiplied the gradients by."""
    reason: str = ""
    """Why nothing was updated."""
    aux_loss: float | None = None
    """The router's auxiliary loss over all tokens of the step, where the model has one; `loss` contains it times its
    coefficient."""
    total_weight: float | None = None
    """Sum of the supervised tokens' weights (`loss_weights`), which the loss is divided by; None without weights."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvalOutput:
    """Result of an evaluation."""

    loss: float
    """Mean over the supervised tokens, weighted where they have weights."""
    accuracy: float
    """Share of the supervised tokens that the model finds the likeliest ones, weighted likewise."""
    num_tokens: int
    """Supervised tokens."""
    total_weight: float | None = None
    """Sum of their weights (`loss_weights`); None without weights."""

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is too large."""
        return math.inf if self.loss >= _MOST_EXP else math.exp(self.loss)


_MOST_EXP = 709.0
"""exp of this is finite."""


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """Gradients that have been formed and not been applied."""

    micro_batches: int = 0
    loss: float = 0.0
    tokens: int = 0
    weight: float = 0.0
    weighted: bool = False
    """Whether a micro-batch had weights, so that `weight` is their sum and not the number of tokens."""
    aux_loss: float | None = None
    seen: bool = False
    """Whether a micro-batch had an image."""
    normalizer: float | None = None
    """What the sum was divided by; None: the supervised tokens of the one pass, or the sum of their weights."""


class Passes:
    """Forward, backward and update of one engine."""

    def __init__(
        self,
        runtime: Runtime,
        preparer: InputPreprocessor,
        *,
        max_grad_norm: float | None,
        immediate: bool,
        label_smoothing: float,
        z_loss: float,
        deterministic: bool,
        seed: int,
        router: RouterLoss | None,
    ) -> None:
        self._runtime, self._preparer = runtime, preparer
        self.max_grad_norm: float | None = max_grad_norm
        self.immediate: bool = immediate
        self._label_smoothing, self._z_loss = label_smoothing, z_loss
        self._deterministic, self._seed = deterministic, seed
        self._router = router
        self._math_reported = False
        self.guard: InterruptGuard = InterruptGuard(runtime.device, runtime.busy)
        self.waiting: Waiting | None = None
        """None where no pass has been made since the last update."""
        self.num_steps: int = 0
        """Optimizer steps done."""

    def check(self) -> None:
        """Raises EngineBroken, with the cause, after a close and once something has failed. First waits for a step that
        still runs after an interrupt."""
        self.guard.settle()
        self._runtime.check()

    def numerics(self) -> dict[str, Any]:
        """The numerics key (`numerics.py`)."""
        runtime = self._runtime
        return numerics.key(
            self._preparer.decoder,
            runtime.device,
            micro_batch=runtime.nominal[0],
            micro_batches=runtime.nominal[1],
            grad_precision=runtime.grad_precision,
            state_format=runtime.state_format,
            loss_chunk=runtime.settings.get("loss_chunk"),
            compiled=runtime.compiled,
            deterministic=self._deterministic,
            fragments=runtime.cut.fragments,
            mlp_tiles=runtime.cut.tiles,
            least=runtime.cut.least,
        )

    def train(
        self,
        prepared: StepInputs,
        loss_fn: LossFn | None,
        normalizer: float | None,
        *,
        apply: bool,
        check: bool = False,
    ) -> StepOutput | float:
        """Forward and backward, and the loss. With `apply` also the update, and the step's result instead. With `check`
        forward and backward run twice and are compared; see `repeat_check.py`."""
        self._refuse_loss(loss_fn)
        if loss_fn is not None:
            loss_fn = on_present_default(loss_fn)
        with on_cpu():
            return self._train_prepared(prepared, loss_fn, normalizer, apply, check)

    def _train_prepared(
        self, prepared: StepInputs, loss_fn: LossFn | None, normalizer: float | None, apply: bool, check: bool
    ) -> StepOutput | float:
        if normalizer is not None and not positive(normalizer):
            raise ConfigError(f"normalizer must be positive and finite, not {normalizer!r}")
        normalizer = None if normalizer is None else float(normalizer)
        self._refuse_other(normalizer)
        waiting = self.waiting
        # a loss_fn weights what it sums up itself
        weight = float(prepared.num_tokens) if loss_fn is not None else prepared.total_weight
        divisor = weight if normalizer is None else normalizer
        if prepared.empty:
            log.warning("micro-batches %s have no supervised token and add nothing", prepared.empty)
        if not prepared.micro_batches:
            self.waiting = self.waiting or Waiting()
            return self._apply() if apply else 0.0
        if not divisor:
            raise ConfigError("a step with loss_fn and no labels needs a normalizer")
        if not LEAST_DIVISOR <= divisor <= MOST_DIVISOR:
            raise ConfigError(
                f"normalizer is {divisor:g}; fp32 can divide a loss by {LEAST_DIVISOR:g} to {MOST_DIVISOR:g}"
            )
        with self._runtime.planning(prepared):
            if not apply and not self.num_waiting:
                self._runtime.plan_sums()
            if loss_fn is not None:
                self._runtime.plan_loss_fn(not self.num_waiting)
            core = self._runtime.ready(prepared, not self.num_waiting)
        options = LossOptions(
            scale=1.0 / divisor,
            chunk=self._runtime.settings.get("loss_chunk"),
            label_smoothing=self._label_smoothing,
            z_loss=self._z_loss,
            loss_fn=loss_fn,
        )

        def body() -> StepOutput | float:
            if self._runtime.core is not core or self.waiting is not waiting:  # another thread was faster
                raise under_way()
            run = self._train_twice(core, prepared, options) if check else self._train(core, prepared, options)
            loss = run.loss_sum / divisor
            aux_loss = None
            if run.aux_loss is not None and self._router is not None:
                aux_loss = float(run.aux_loss)
                loss += self._router.coefficient * aux_loss
            before = self.waiting or Waiting()
            self.waiting = Waiting(
                before.micro_batches + len(prepared.micro_batches),
                before.loss + loss,
                before.tokens + prepared.num_tokens,
                before.weight + weight,
                before.weighted or (prepared.weighted and loss_fn is None),
                aux_loss,
                before.seen or prepared.seen,
                normalizer,
            )
            return self._apply() if apply else loss

        return self._run(body, finish=self.immediate)

    def _refuse_loss(self, loss_fn: LossFn | None) -> None:
        """Raises ConfigError for a loss function that cannot be called, or that makes a setting meaningless, and for
        none where the model's own loss is not the built-in one."""
        if loss_fn is None:
            self._runtime.decoder.refuse_other_loss()
            return
        if not callable(loss_fn):
            raise ConfigError(f"loss_fn must be a function of (hidden, head, batch), not {loss_fn!r}")
        for name, value in (("label_smoothing", self._label_smoothing), ("z_loss", self._z_loss)):
            if value:
                raise ConfigError(
                    f"{name} is {value} and applies to the built-in loss only; for loss_fn create the engine without"
                )

    def _refuse_other(self, normalizer: float | None) -> None:
        """Raises ConfigError where the gradients of earlier calls were divided by something else; they are kept."""
        before = self.waiting
        if before is None or not before.micro_batches or (before.normalizer == normalizer and normalizer is not None):
            return
        if before.normalizer is None:
            own = f"its own {before.tokens} tokens"
            if before.weighted:
                own = f"the sum of its own weights, {before.weight:g}"
            had = f"was called without normalizer, so its gradients were divided by {own}"
        else:
            had = f"was called with normalizer {before.normalizer:g}"
        now = "without one" if normalizer is None else f"with {normalizer:g}"
        raise ConfigError(
            f"forward_backward {had}, and again {now}: gradients add up to those of one step only if all calls before "
            "an optimizer_step have the same normalizer, such as the supervised tokens of all of them. Those of the "
            "earlier calls still wait; call optimizer_step, or go on with their normalizer if they had one"
        )

    def refuse_more(self) -> None:
        """Raises ConfigError where gradients wait to which no others can be added; they are kept."""
        if not self.num_waiting:
            return
        if self.immediate:
            raise ConfigError("update: immediate has updated the weights already, so gradients cannot be added up")
        if not self._runtime.settings.get("accumulate"):
            raise ConfigError(
                "forward_backward was called again before optimizer_step, but no store for such sums was planned; "
                "create the engine with plan={'accumulate': True}"
            )
        if self._router is not None:
            raise ConfigError(
                "the router's auxiliary loss is taken over all tokens of a step, so a step is one call of "
                "forward_backward; give it all micro-batches, or set output_router_logits to false"
            )

    def require(self, call: str) -> None:
        """Raises ConfigError, which names the `call`, where no gradients wait for it."""
        if self.waiting is None:
            raise ConfigError(f"{call} was called without forward_backward; call that first")

    def apply(self) -> StepOutput:
        """Clips and applies the gradients that wait, or skips the step when one or the loss is not finite."""
        waiting = self.waiting

        def body() -> StepOutput:
            if self.waiting is not waiting:  # another thread was faster
                raise under_way()
            return self._apply()

        return self._run(body, finish=self.immediate)

    def discard(self) -> None:
        """Drops the gradients that wait, because the weights they belong to have been replaced."""
        if self.num_waiting and self.immediate:
            self.apply()  # has happened already, but for its report
        elif self.num_waiting:
            self._run(self._drop, finish=False)
        self.waiting = None

    def _drop(self) -> None:
        if self.num_waiting:
            self._runtime.core.abandon()
            self.waiting = None

    def evaluate(
        self,
        prepared: StepInputs,
        collect: Callable[[HeadTemplate, Tensor], Tensor] | None = None,
        largest: tuple[int, int] = (0, 0),
    ) -> Pass:
        """A pass without backward, and its results. `largest`: (batch, seq) of the batches to evaluate after it."""
        core = self._runtime.ready(prepared, not self.num_waiting, largest)
        options = LossOptions(scale=1.0, chunk=self._runtime.settings.get("loss_chunk"))

        @torch.inference_mode(False)
        def body() -> Pass:
            if self._runtime.core is not core:  # another thread has planned again
                raise under_way()
            run = self._pass(prepared, options, training=False, collect=collect)
            with numerics.arithmetic(self._runtime.device, self._deterministic):
                try:
                    core.begin("eval", len(prepared.micro_batches), self._stream())
                    run.run(core, check=self.guard.check)
                except BaseException:
                    self._abandon(core)
                    raise
            return run

        return self._run(body, finish=False)

    def _run(self, body: Callable[[], T], *, finish: bool) -> T:
        """What `body` returns, run by the guard. Raises ConfigError where hooks of all modules would see it."""
        refuse_global_hooks()
        try:
            return self.guard.run(body, finish=finish)
        except ValueError:
            self._runtime.check()  # raises a better error if another thread has closed the engine meanwhile
            raise

    @property
    def num_waiting(self) -> int:
        """Micro-batches whose gradients wait."""
        return self.waiting.micro_batches if self.waiting is not None else 0

    def _train_twice(self, core: _core.Engine, prepared: StepInputs, options: LossOptions) -> Pass:
        """The second of two gradient passes that agree bit for bit. Raises EngineBroken where they do not; the engine
        is broken then, since nothing that it computes can be trusted."""
        decoder = self._runtime.decoder
        found = []
        try:
            for synchronous in (False, True):
                run = self._train(core, prepared, options, synchronous=synchronous)
                began = time.perf_counter()
                found.append(repeat_check.record(decoder, core, run, self.guard.check))
                if not synchronous:
                    core.abandon()
        except BaseException:
            self._abandon(core)
            raise
        difference = repeat_check.difference(decoder, *found)
        if difference:
            self._abandon(core)
            self.guard.broken = (
                f"two gradient passes of step {self.num_steps + 1} do not agree bit for bit: {difference}. Nothing was "
                "updated. This is a race of ours or faulty memory: plan.synchronous: true avoids the first, a memory "
                "test finds the second"
            )
            raise EngineBroken(self.guard.broken)
        log.info(
            "step %d: two gradient passes agree bit for bit in all %d trained tensors (reading them took %.3g s twice)",
            self.num_steps + 1,
            len(found[0].gradients),
            time.perf_counter() - began,
        )
        return run

    @torch.inference_mode(False)
    def _train(
        self, core: _core.Engine, prepared: StepInputs, options: LossOptions, *, synchronous: bool = False
    ) -> Pass:
        self._warn_about_math(prepared)
        graphs = not (synchronous or self._runtime.settings.get("synchronous"))
        run = self._pass(prepared, options, training=True, graphs=graphs)
        immediate = self.immediate
        groups, idle = self._runtime.core_groups(prepared.seen)
        with numerics.arithmetic(self._runtime.device, self._deterministic):
            try:
                core.begin(
                    "train",
                    len(prepared.micro_batches),
                    self._stream(),
                    groups=groups if immediate else None,
                    idle=idle,
                    accumulate=self.num_waiting > 0,
                    rows=run.looked_up() if immediate else None,
                    synchronous=synchronous,
                )
                run.run(core, _refuse_nonfinite if immediate else None, self.guard.check)
            except BaseException:
                self.waiting = None  # those of earlier passes have gone with this one's
                self._abandon(core)
                raise
        return run

    def _warn_about_math(self, prepared: StepInputs) -> None:
        """Warns once when a deterministic run on a card cannot use the attention kernel that it asks for."""
        if self._math_reported or not self._deterministic or self._runtime.device.type != "cuda":
            return
        reason = numerics.why_math(self._preparer.decoder, self._preparer.masked(prepared))
        if reason is not None:
            self._math_reported = True
            log.warning("deterministic: %s", reason)

    def _apply(self) -> StepOutput:
        waiting = self.waiting
        if waiting is None or not waiting.micro_batches:
            self.waiting = None
            reason = "no micro-batch has a supervised token"
            log.warning("%s: nothing was changed", reason)
            return StepOutput(loss=0.0, grad_norm=0.0, num_tokens=0, skipped=True, reason=reason)
        core = self._runtime.core
        if not (self.immediate or math.isfinite(waiting.loss)):
            # gradients may be finite all the same, of a sum that was too large
            grad_norm = core.gradient_norm()
            core.abandon()
            self.waiting = None
            self.num_steps += 1
            return StepOutput(
                loss=waiting.loss,
                grad_norm=grad_norm,
                num_tokens=waiting.tokens,
                skipped=True,
                reason="the loss is not finite",
                aux_loss=waiting.aux_loss,
                total_weight=waiting.weight if waiting.weighted else None,
            )
        groups, idle = self._runtime.core_groups(waiting.seen)
        outcome = core.apply(groups, self.max_grad_norm, idle)
        self.waiting = None
        self.num_steps += 1
        return StepOutput(
            loss=waiting.loss,
            grad_norm=outcome.grad_norm,
            num_tokens=waiting.tokens,
            skipped=outcome.skipped,
            clip=outcome.clip,
            reason="a gradient is not finite" if outcome.skipped else "",
            aux_loss=waiting.aux_loss,
            total_weight=waiting.weight if waiting.weighted else None,
        )

    def _abandon(self, core: _core.Engine) -> None:
        with contextlib.suppress(MegatrainError):
            core.abandon()

    def _pass(self, prepared: StepInputs, options: LossOptions, *, training: bool, **more: Any) -> Pass:
        templates = self._runtime.templates
        templates.train(training)
        # micro-batches of a step that was begun earlier have numbers of their own
        seed = random_key(self._seed, self.num_waiting)
        return Pass(
            templates, prepared, self._preparer, options, training=training, seed=seed, step=self.num_steps, **more
        )

    def _stream(self) -> int:
        device = self._runtime.device
        return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _refuse_nonfinite(loss: Tensor) -> None:
    """Immediate updates cannot be taken back, so a loss that is not finite stops the step before its backward."""
    if not bool(torch.isfinite(loss)):
        raise EngineBroken(
            f"the loss is {float(loss)}; with update: immediate the step cannot be undone, so it stops here"
        )
