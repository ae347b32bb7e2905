"""What a run says and does when memory runs out: words that say what to change, and a safer plan.

What torch allocates is planned from measured sizes of a layer's activations, so it can be exceeded: by a sequence
longer than any that was measured, by another program on the card, by fragmentation. The user can act on that; it is no
defect to report.
"""

import sys
import traceback
from typing import TYPE_CHECKING, Any

from megatrain.errors import first_line
from megatrain.system.hardware import format_bytes
from megatrain.system.out_of_memory import wanted_bytes
from megatrain.training.begin_again import BeginAgain

if TYPE_CHECKING:
    from megatrain.models.decoder import Decoder
    from megatrain.planning.planner import RunPlan


class PlanAgain(BeginAgain):
    """A step ran out of memory, and a safer plan may fit."""

    def __init__(self, correction: dict[str, Any], explanation: str, micro_batch: tuple[int, int]) -> None:
        super().__init__(explanation, micro_batch)
        self.correction = correction
        """See `planner.safer`."""

    def changes(self) -> str:
        """What is changed, in words."""
        asked = {key: value for key, value in self.correction.items() if key != "more_workspace"}
        room = f"{format_bytes(self.correction['more_workspace'])} more for torch"
        return ", ".join([room, *(f"plan.{key}: {value}" for key, value in asked.items())])


def explain(
    error: BaseException,
    phase: str,
    run_plan: "RunPlan | None" = None,  # of the run that failed, whose model is `decoder`
    decoder: "Decoder | None" = None,
) -> str:
    """One sentence for an error of `is_out_of_memory`: the phase, the bytes wanted and planned, and what to change."""
    wanted = getattr(error, "wanted", None) or wanted_bytes(error)
    device = run_plan is not None and run_plan.device == "cuda"
    operation = getattr(error, "operation", "")  # of an error of the engine's
    what = f"{phase}: {operation}{': ' * bool(operation)}out of {'device ' if device else ''}memory"
    facts = [f"an allocation of {format_bytes(wanted)} failed"] if wanted is not None else []
    if run_plan is None:
        return f"{what} ({_joined(facts, error)}). Use a smaller batch or a shorter sequence, or free memory"
    planned = sum(item["bytes"] for item in run_plan.plan["items"] if item["what"].endswith("(torch)"))
    budget = run_plan.budget["device"]
    facts.append(f"the plan allows torch {format_bytes(planned)} of {format_bytes(budget)}")
    peak = _torch_peak() if device else 0
    if peak:
        facts.append(f"torch has used up to {format_bytes(peak)}")
    rows, seq = run_plan.micro_batch
    changes = [f"lower plan.micro_batch (now {rows})"] if rows > 1 else []
    changes.append(f"{'or ' if changes else ''}lower data.seq_len (now {seq})")
    if any(unit["activation"] == "keep" for unit in run_plan.plan["units"]):
        changes.append("or keep fewer activations (plan.keep, or plan.activation: recompute)")
    tiles = run_plan.options.get("mlp_tiles", 1)
    if decoder is not None and tiles < rows * seq and _is_tiled(run_plan, decoder):
        changes.append(f"or compute MLPs in more tiles (plan.mlp_tiles, now {tiles})")
    changes.append(f"or lower {'memory.gpu' if device else 'memory.host'}, so that the plan leaves torch more room")
    return f"{what} ({_joined(facts, error)}). To go on, {', '.join(changes)}"


def _is_tiled(run_plan: "RunPlan", decoder: "Decoder") -> bool:
    """Whether layers are sent in halves, of which any can be computed in tiles."""
    halves = decoder.halves
    return run_plan.options.get("fragments") == "halves" and any(map(halves.is_tiled, halves.units))


def release(error: BaseException) -> None:
    """Lets go of what the frames of an error and of its causes refer to: activations, most of all."""
    seen: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in seen:
        seen.append(one)
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__


def _joined(facts: list[str], error: BaseException) -> str:
    if facts:
        return "; ".join(facts)
    return first_line(error)


def _torch_peak() -> int:
    torch = sys.modules.get("torch")
    return int(torch.cuda.max_memory_allocated()) if torch is not None and torch.cuda.is_initialized() else 0
