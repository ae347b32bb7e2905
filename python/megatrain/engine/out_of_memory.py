"""The error of a pass that ran out of memory: what was computed, the bytes that were wanted, in use and planned."""

from collections.abc import Sequence

import torch

from megatrain.errors import MegatrainError
from megatrain.system.hardware import format_bytes
from megatrain.system.out_of_memory import wanted_bytes


class OutOfMemory(MegatrainError, torch.OutOfMemoryError):
    """Torch could not allocate what an operation of a pass needs. With just-in-time updates the step it belongs to has
    left nothing behind; the engine goes on."""

    def __init__(
        self,
        operation: str,
        planned: int,
        in_use: int,
        cause: BaseException,
        *,
        held: int = 0,
        lighter: Sequence[str] = (),  # values of `plan` that need less memory, such as "'group': 1"
    ) -> None:
        self.operation = operation
        """Phase, unit and micro-batch, such as "backward of layers.3, micro-batch 0"."""
        self.planned = planned
        """Bytes that the plan allows torch."""
        self.in_use = in_use
        """Bytes that torch had in use on the card when it failed; 0 where that is not counted, on the CPU."""
        self.held = max(held, in_use)
        """Bytes of the card that torch held then. What it holds and does not use lies between blocks in use, too short
        for what was wanted; whole pieces of memory without such a block have been given back."""
        self.wanted: int | None = wanted_bytes(cause)
        """Bytes of the allocation that failed; None where torch does not say."""
        facts = [f"an allocation of {format_bytes(self.wanted)} failed"] if self.wanted is not None else []
        facts.append(f"the plan allows torch {format_bytes(planned)}")
        if in_use:
            between = f" of {format_bytes(self.held)} that it held" if self.held > in_use else ""
            facts.append(f"{format_bytes(in_use)} were in use{between}")
        super().__init__(
            f"{operation}: out of memory ({'; '.join(facts)}). Use fewer rows or shorter ones, "
            f"{''.join(f'give plan={{{way}}}, ' for way in lighter)}"
            "or lower memory={'gpu': ...}, so that the plan leaves torch more room"
        )

    @property
    def shortfall(self) -> int:
        """By how many bytes torch has needed more than planned, at least: what it held and wanted beyond the plan.
        Where its use is not counted: what it wanted, or a quarter of the plan."""
        if self.held and self.wanted is not None:
            return max(0, self.held + self.wanted - self.planned)
        return self.wanted if self.wanted is not None else self.planned // 4
