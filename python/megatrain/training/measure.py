"""What one step cost: model FLOP/s, lanes, what bound it, and memory."""

import math
from typing import TYPE_CHECKING

from megatrain.training import metrics

if TYPE_CHECKING:
    from megatrain.data import StepBatch
    from megatrain.engine.engine import Engine
    from megatrain.training.metrics import StepRecord
    from megatrain.training.setup import PlannedRun


def measure(record: "StepRecord", batch: "StepBatch", engine: "Engine", planned: "PlannedRun") -> int:
    """Fills the fields of a step's record that say what it cost. `record.step_s` is known. Returns the tokens that were
    computed, padding included."""
    flops = 0.0
    for micro in batch.micro_batches:
        rows, width = micro["input_ids"].shape
        flops += planned.model_setup.count.flops_per_token(width) * rows * width
    # Padding is computed, but does not count as the model's work.
    computed = sum(micro["input_ids"].numel() for micro in batch.micro_batches)
    flops *= batch.num_tokens / max(1, computed)
    record.model_tflops = flops / record.step_s / 1e12 if record.step_s > 0 else 0.0
    stats = engine.stats()
    record.lanes = stats.lanes
    record.bound = stats.bound
    record.of_limit = _of_limit(record, computed, planned)
    record.host_peak_bytes = metrics.host_peak_bytes()
    record.gpu_peak_bytes = metrics.gpu_peak_bytes(_engine_gpu_bytes(engine, planned))
    return computed


def _of_limit(record: "StepRecord", tokens: int, planned: "PlannedRun") -> float | None:
    """See `StepRecord.of_limit`. `tokens`: those that were computed, padding included."""
    run_plan = planned.run_plan
    lane = "compute" if record.bound == "launching" else record.bound
    seconds = run_plan.plan["estimate"]["lanes"].get(lane)
    if not run_plan.measured or seconds is None or record.step_s <= 0:
        return None
    if lane == "compute":  # planned for the largest step
        seconds *= tokens / (math.prod(run_plan.micro_batch) * run_plan.micro_batches)
    return float(seconds / record.step_s)


def _engine_gpu_bytes(engine: "Engine", planned: "PlannedRun") -> int:
    if planned.run_plan.device != "cuda":
        return 0
    return sum(
        item["bytes"]
        for item in engine.plan["items"]
        if item["tier"] == "device" and not item["what"].endswith("(torch)")
    )
