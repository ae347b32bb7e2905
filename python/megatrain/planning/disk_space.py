"""Whether the disks of a run have room for its checkpoints and its export, beside what the plan keeps there."""

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.config import Config
from megatrain.errors import StorageError
from megatrain.system import hardware as facts
from megatrain.system.hardware import format_bytes

if TYPE_CHECKING:
    from megatrain.models.decoder import Decoder
    from megatrain.planning.planner import RunPlan

log: logging.Logger = logging.getLogger("megatrain")


def disk_needed(config: Config, decoder: "Decoder", precision: str) -> dict[str, int]:
    """Bytes on disk: one checkpoint, all that exist at one time (a new one is written before an old one goes), and the
    export's weights."""
    from megatrain.checkpoint import export
    from megatrain.weights.state_format import StateFormat

    form = StateFormat(config.train.moments, config.train.master)
    tensors = decoder.tensors.values()
    weights = sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors)
    checkpoint = weights + sum(form.bytes(t.shape, precision) for t in tensors if t.role == "trainable")
    wanted = config.output.export
    exported = 0 if wanted == "never" else export.weight_bytes(decoder, wanted)
    return {"checkpoint": checkpoint, "checkpoints": kept(config) * checkpoint, "export": exported}


def kept(config: Config) -> int:
    """Checkpoints that exist at one time: a new one is written before an old one goes."""
    return config.output.keep + 1 + (1 if config.eval.keep_best else 0)


def check_disk(
    needed: dict[str, int],  # of `disk_needed`
    beside: int,  # bytes of a checkpoint, and of the export, beside their tensors
    folder: Path,
    existing: int,  # checkpoints that are there already
    config: Config,
    run_plan: "RunPlan",
) -> None:
    """Raises StorageError when the checkpoints and the export of a run cannot all be written: beside what the plan
    keeps on the same disk, and in host memory beside the plan where that is where they go."""
    free = facts.SYSTEM_PROBE.disk_free(folder)
    kind = facts.SYSTEM_PROBE.file_system(folder)
    wanted, checkpoint = kept(config), needed["checkpoint"] + beside
    exported = needed["export"] + beside if needed["export"] else 0
    total = max(0, wanted - existing) * checkpoint + exported
    state = _state_beside(folder, run_plan)
    if free is not None and total <= free < total + state:
        raise StorageError(
            f"output.dir {folder} needs {format_bytes(total)} for checkpoints and the export, and memory.nvme.path "
            f"is on the same disk and takes {format_bytes(state)}; it has {format_bytes(free)} free; free some, "
            "lower output.keep, or name another folder for one of the two"
        )
    if free is not None and total > free:
        raise StorageError(
            f"output.dir {folder} needs {format_bytes(total)} for {wanted} checkpoints of "
            f"{format_bytes(checkpoint)} and an export of {format_bytes(exported)}, and its disk has "
            f"{format_bytes(free)} free; free some, lower output.keep, or name another folder"
        )
    if kind not in facts.IN_MEMORY:
        return
    tiers = ("device", "host") if run_plan.device == "cpu" else ("host",)
    planned, available = sum(run_plan.plan["totals"][tier] for tier in tiers), run_plan.machine.memory_available
    if planned + total > available:
        raise StorageError(
            f"output.dir {folder} is in host memory ({kind}), and its checkpoints and export of {format_bytes(total)} "
            f"do not fit there beside the {format_bytes(planned)} of the plan ({format_bytes(available)} are "
            "available); name a folder on a disk"
        )
    log.warning("output.dir %s is in host memory (%s): what it holds is lost when the machine stops", folder, kind)


def _state_beside(folder: Path, run_plan: "RunPlan") -> int:
    """Bytes that the plan keeps on the disk of `folder`: optimizer state, weights, layer inputs."""
    if run_plan.disk is None:
        return 0
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    disk, paths = facts.SYSTEM_PROBE.disk(there)[0], run_plan.disk.paths
    on_it = sum(facts.SYSTEM_PROBE.disk(Path(path))[0] == disk for path in paths)
    return int(run_plan.plan["totals"]["disk"]) * on_it // len(paths)
