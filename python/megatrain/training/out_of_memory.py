"""Out-of-memory errors of torch and of the interpreter, in words that say what to change.

What torch allocates is planned from measured sizes of a layer's activations, so it can be exceeded: by a sequence
longer than any that was measured, by another program on the card, by fragmentation. The user can act on that; it is no
defect to report.
"""

import re
import sys
from typing import TYPE_CHECKING

from megatrain.errors import first_line
from megatrain.system.hardware import format_bytes
from megatrain.units import parse_size

if TYPE_CHECKING:
    from megatrain.planning.planner import RunPlan

_MESSAGES = (
    "out of memory",  # "CUDA out of memory", and the driver's "CUDA error: out of memory"
    "can't allocate memory",  # torch's DefaultCPUAllocator
    "not enough memory: you tried to allocate",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?(?:[KMGT]i?B|bytes))")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out. Does not import torch."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _MESSAGES)


def explain(error: BaseException, phase: str, run_plan: "RunPlan | None" = None) -> str:
    """One sentence for an error of `is_out_of_memory`: the phase, the bytes wanted and planned, and what to change."""
    wanted = wanted_bytes(error)
    device = run_plan is not None and run_plan.device == "cuda"
    what = f"{phase}: out of {'device ' if device else ''}memory"
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
    changes.append(f"or lower {'memory.gpu' if device else 'memory.host'}, so that the plan leaves torch more room")
    return f"{what} ({_joined(facts, error)}). To go on, {', '.join(changes)}"


def wanted_bytes(error: BaseException) -> int | None:
    """Bytes of the allocation that failed, where the message says; None where it does not."""
    match = _WANTED.search(str(error))
    if match is None:
        return None
    return parse_size(match[1].replace("bytes", "B"))


def _joined(facts: list[str], error: BaseException) -> str:
    if facts:
        return "; ".join(facts)
    return first_line(error)


def _torch_peak() -> int:
    torch = sys.modules.get("torch")
    return int(torch.cuda.max_memory_allocated()) if torch is not None and torch.cuda.is_initialized() else 0
