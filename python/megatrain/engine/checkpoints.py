"""Checkpoints of an engine: the one that is being written, and what a load replaces."""

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.checkpoint.load import load
from megatrain.checkpoint.save import PendingCheckpoint, begin_save
from megatrain.engine import numerics
from megatrain.engine import options as arguments
from megatrain.engine.runtime import Runtime
from megatrain.engine.transactions import Passes
from megatrain.errors import CheckpointError, ConfigError
from megatrain.models.decoder import Decoder
from megatrain.weights.state_format import StateFormat

if TYPE_CHECKING:
    from megatrain import _core

log: logging.Logger = logging.getLogger(__name__)


class Checkpoints:
    """What an engine saves and restores; see `Engine.begin_save` and `Engine.load`."""

    def __init__(
        self,
        runtime: Runtime,
        passes: Passes,
        *,
        tokenizer: Any,
        tokenizer_dir: str | Path | None,
        model_dir: str | Path | None,
    ) -> None:
        self._runtime = runtime
        self._passes = passes
        self._tokenizer, self._tokenizer_dir, self._model_dir = tokenizer, tokenizer_dir, model_dir
        self._pending: PendingCheckpoint | None = None

    @property
    def decoder(self) -> Decoder:
        """The model, cut into units as the native engine has it."""
        return self._runtime.decoder

    @property
    def state_format(self) -> StateFormat:
        """How moments and masters are stored."""
        return self._runtime.state_format

    @property
    def core(self) -> "_core.Engine":
        """The native engine; planned and allocated here where it is not yet."""
        return self._runtime.core

    def begin_save(self, folder: str | Path, state: Mapping[str, Any] | None, step: int | None) -> PendingCheckpoint:
        """Begins a checkpoint of what the finished steps left."""
        passes = self._passes
        if passes.num_waiting and passes.immediate:
            raise ConfigError("update: immediate has updated the weights already; call optimizer_step before a save")
        if self._pending is not None and not self._pending.over:
            raise ConfigError(f"{self._pending.folder} is still being written; call its finish or cancel first")
        arguments.mapping("state", state)
        own = {"step": passes.num_steps, "lr": self._runtime.optimizer.lr, "numerics": passes.numerics()}
        self._pending = begin_save(
            arguments.folder(folder),
            self,
            {"engine": own, "run": dict(state or {})},
            step=passes.num_steps if step is None else step,
            tokenizer=self._tokenizer,
            tokenizer_dir=self._tokenizer_dir,
            model_dir=self._model_dir,
        )
        if passes.num_waiting:
            self._pending.finish()  # the pass that would carry it begins after their update
        return self._pending

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Restores a checkpoint and returns the `state` it was saved with."""
        runtime, passes = self._runtime, self._passes
        before, runtime.undefined = runtime.undefined, ""
        begun = threading.Event()

        def begin(state: Mapping[str, Any]) -> None:
            self._check_lr(folder, state)
            begun.set()

        try:
            passes.check()
            saved = load(arguments.folder(folder), self, begin=begin)
            passes.discard()
            own = saved.get("engine", {})
            if "lr" in own:
                self._set_lr(folder, own["lr"])
            passes.num_steps = int(own.get("step", 0))
        except BaseException as error:
            why = "found it damaged" if isinstance(error, CheckpointError) else "was cut off"
            mixed = f"loading {folder} {why}, so weights of two states are mixed; load a checkpoint"
            runtime.undefined = mixed if begun.is_set() else before
            raise
        changed = numerics.differences(own.get("numerics", {}), passes.numerics())
        if changed:
            log.warning("the numerics key has changed, so results agree closely but not bit for bit: %s", changed)
        return dict(saved.get("run", {}))

    def _check_lr(self, folder: str | Path, state: Mapping[str, Any]) -> None:
        """Raises ConfigError where the engine's optimizer cannot take the learning rate that was saved."""
        own = state.get("engine", {})
        if "lr" not in own:
            return
        try:
            self._runtime.optimizer.checked_lr(own["lr"])
        except ConfigError as error:
            raise ConfigError(
                f"{folder} was saved with learning rate {own['lr']!r}, which the engine's optimizer cannot take: "
                f"{error}. Call engine.set_optimizer with an AdamW whose lr is above 0, then load it"
            ) from None

    def _set_lr(self, folder: str | Path, lr: float) -> None:
        optimizer = self._runtime.optimizer
        before = optimizer.lr
        optimizer.set_lr(lr)
        if optimizer.lr != before:
            groups = ", and in proportion those of its groups" if len(optimizer.groups) > 1 else ""
            log.info(
                "learning rate %g -> %g, which %s was saved with%s; it stays until it is set again, "
                "as a schedule does before each step",
                before,
                optimizer.lr,
                folder,
                groups,
            )

    def release(self) -> None:
        """Lets go of the last checkpoint, which refers to the core. Raises ConfigError while it is being written."""
        if self._pending is not None and not self._pending.over:
            raise ConfigError(f"{self._pending.folder} is still being written; call its finish or cancel first")
        self._pending = None

    def cancel(self) -> None:
        """Cancels the checkpoint that is being written, if there is one, and removes what was written of it."""
        if self._pending is not None:
            self._pending.cancel()
