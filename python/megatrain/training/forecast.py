"""What a plan means for a run: step time and what bounds it, disk, what is given up, and the numerics key.

`megatrain plan`, the dry run and the start of a run all report it from here.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.config import Config, Duration
from megatrain.config.data_size import BYTES_PER_TOKEN, data_bytes
from megatrain.planning import alternatives, calibrate, disk_space, planner
from megatrain.planning.alternatives import Alternative
from megatrain.planning.planner import RunPlan
from megatrain.system import hardware as facts
from megatrain.system.hardware import Machine

if TYPE_CHECKING:
    from megatrain.data import Dataset
    from megatrain.models.decoder import Decoder
    from megatrain.models.flops import ModelCount
    from megatrain.training.setup import ModelSetup

GIVEN_UP_BY_IMMEDIATE = (
    "a non-finite gradient or an interrupt that arrives after some units were updated cannot be undone: the first "
    "stops the run with exit code 4, naming the last checkpoint, and the second waits until the step is finished"
)
"""What `train.update: immediate` costs."""


FEW_STEPS = 10
"""A run of fewer steps, of which some are warm-up, hardly changes a model: the batch is too large for the data."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateOnDisk:
    """What a step does with optimizer state and weights whose home is a disk, and with layer inputs that wait there."""

    bytes: int
    """On the disk; `weights` of them are weights, and `inputs` layer inputs."""
    weights: int
    inputs: int
    """With the activations of these layers where those are offloaded; places that the next group of micro-batches uses
    again."""
    bytes_read: int
    """In a step: everything once, layer inputs of each micro-batch, and weights each time that they are sent to the
    device too."""
    bytes_written: int
    """In a step: everything once, layer inputs of each micro-batch."""
    seconds: float
    """That the slower of reading and writing takes; both run at once, and beside computing."""
    bytes_written_a_day: float
    """At the expected step time: what the drive's endurance is compared with."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What to expect of a run by its plan."""

    config: Config
    decoder: "Decoder"
    run_plan: RunPlan
    timed: RunPlan
    """The plan of the step that is timed: `run_plan`, except where rows are not packed, then one of full rows, and
    where an epoch has fewer rows than a step may take, then one of those."""
    numerics: dict[str, Any]
    disk: dict[str, int | None]
    """Bytes: `checkpoint`, `checkpoints` (all that exist at one time), `export`, `cache` (tokenized data; None when
    no data was read), `free` (on the disk of the run's folder; None when unknown)."""
    total_steps: int | None
    """Optimizer steps of the run; None when they follow from data that was not read."""
    flops_per_token: float
    step_tokens: int
    """Of a full step; fewer than asked for where an epoch of the data that were read has no more."""
    micro_batches: int
    """Most micro-batches of a step of the data that were read, or of any data where none were."""
    free_clipping_tokens: int | None
    estimate: dict[str, Any]
    """Of a step in steady state: step_s, bound, lanes; a lower bound of the time."""

    @property
    def expected_step_s(self) -> float:
        """Predicted seconds of a step: at the measured rates, or at those of a usual machine."""
        return max(float(self.timed.plan["estimate"]["expected_step_s"]), self.step_s)

    @property
    def step_s(self) -> float:
        """Lower bound of a step's seconds: the busiest lane's time, and at least the arithmetic at the matmul rate."""
        rates = lower_bound_rates(self.timed)
        arithmetic = self.flops_per_token * self.step_tokens / (rates["matmul_tflops"] * 1e12)
        if self.decoder.matmul == "fp8":
            from megatrain.engine.profile import float8_share

            arithmetic *= float8_share(rates, self.run_plan.device)
        return max(float(self.estimate["step_s"]), arithmetic)

    @property
    def bound(self) -> str:
        """The lane that the predicted step waits for most."""
        return str(self.timed.plan["estimate"]["bound"])

    @property
    def update(self) -> str:
        """`train.update`."""
        return self.config.train.update

    @property
    def largest_micro_batch(self) -> int:
        """The most rows that could be computed at a time; found by planning, which takes a moment."""
        return planner.largest_micro_batch(self.config, self.decoder, self.run_plan)

    @property
    def runners_up(self) -> list[Alternative]:
        """Plans with one decision changed, the fastest first; found by planning, which takes a moment."""
        return alternatives.runners_up(self.config, self.decoder, self.timed)

    @property
    def expected_tokens_per_s(self) -> float:
        """Predicted tokens per second."""
        return self.step_tokens / self.expected_step_s

    @property
    def run_tokens(self) -> int | None:
        """Tokens of the whole run: of its steps, or as many as the files of its data are likely to hold, where these
        were not read. None where neither is known."""
        if self.total_steps is not None:
            return self.total_steps * self.step_tokens
        size = data_bytes(self.config)
        return None if size is None else round((self.config.train.epochs or 1) * size / BYTES_PER_TOKEN)

    @property
    def run_s(self) -> float | None:
        """Predicted seconds of the whole run, evaluations and checkpoints not counted; None where `run_tokens` is."""
        return None if self.run_tokens is None else self.run_tokens / self.expected_tokens_per_s

    @property
    def checkpoint_s(self) -> float | None:
        """Seconds to write a checkpoint at the disk's measured rate; None when it was not measured."""
        rate, size = self.run_plan.rates.get("disk_write_gbs"), self.disk["checkpoint"]
        return size / (rate * 1e9) if rate and size is not None else None

    @property
    def state_on_disk(self) -> StateOnDisk | None:
        """Traffic of optimizer state, weights and layer inputs with the disk; None where none are kept there."""
        plan, rates = self.timed.plan, self.timed.rates
        size = int(plan["totals"]["disk"])
        if not size:
            return None
        read, written = int(plan["estimate"]["disk_read"]), int(plan["estimate"]["disk_written"])
        of = {item["what"]: int(item["bytes"]) for item in plan["items"] if item["tier"] == "disk"}
        return StateOnDisk(
            bytes=size,
            weights=of.get("weights", 0),
            inputs=of.get("activations", 0),
            bytes_read=read,
            bytes_written=written,
            seconds=max(read / (rates["state_read_gbs"] * 1e9), written / (rates["state_write_gbs"] * 1e9)),
            bytes_written_a_day=written * 86400 / self.expected_step_s,
        )

    @property
    def checkpoint_stall_s(self) -> float | None:
        """Seconds that a step waits for the checkpoint being written: each unit's bytes go out before its next update,
        through buffers of a few MiB, so what does not fit beside one step holds up the next. None where the disk was
        not measured."""
        return None if self.checkpoint_s is None else max(0.0, self.checkpoint_s - self.expected_step_s)

    @property
    def checkpoint_bytes_per_day(self) -> float | None:
        """Bytes of checkpoints written in a day of training, for a disk's rated endurance. None where the disk was not
        measured, and without `output.save_every`, when a run saves once, at its end."""
        every, size = self.config.output.save_every, self.disk["checkpoint"]
        if every is None or self.checkpoint_s is None or self.checkpoint_stall_s is None or size is None:
            return None
        if isinstance(every, Duration):
            seconds = max(every.seconds, self.expected_step_s, self.checkpoint_s)
        else:
            seconds = every * self.expected_step_s + self.checkpoint_stall_s
        return size * 86400 / seconds

    @property
    def given_up(self) -> str | None:
        """What `train.update` gives up; None for just-in-time updates, which give up nothing."""
        return GIVEN_UP_BY_IMMEDIATE if self.update == "immediate" else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        run_plan = self.run_plan
        return {
            "device": run_plan.device,
            "machine": run_plan.machine.name,
            "parameters": self.decoder.num_parameters,
            "trainable": self.decoder.num_trainable,
            "precision": run_plan.precision,
            "update": self.update,
            "given_up": self.given_up,
            "micro_batch": list(run_plan.micro_batch),
            "micro_batches": run_plan.micro_batches,
            "largest_micro_batch": self.largest_micro_batch,
            "budget": run_plan.budget,
            "plan": run_plan.plan,
            "step_s": self.step_s,
            "expected_step_s": self.expected_step_s,
            "tokens_per_s": self.step_tokens / self.step_s if self.step_s else None,
            "expected_tokens_per_s": self.expected_tokens_per_s,
            "steps": self.total_steps,
            "run_tokens": self.run_tokens,
            "run_hours": None if self.run_s is None else self.run_s / 3600,
            "runners_up": [dataclasses.asdict(one) for one in self.runners_up],
            "assumed": run_plan.machine.assumed or None,
            "bound": self.estimate["bound"],
            "lanes": self.estimate["lanes"],
            "rates": run_plan.rates,
            "rates_measured": run_plan.measured,
            "free_clipping_tokens": self.free_clipping_tokens,
            "numerics": self.numerics,
            "disk": self.disk,
            "checkpoint_s": self.checkpoint_s,
            "state_on_disk": None if self.state_on_disk is None else dataclasses.asdict(self.state_on_disk),
            "checkpoint_stall_s": self.checkpoint_stall_s,
            "checkpoint_bytes_per_day": self.checkpoint_bytes_per_day,
        }


def without_data(config: Config, machine: Machine) -> Forecast:
    """Plans a run without reading its data or weights. Raises DoesNotFit with the sum."""
    from megatrain.training.setup import prepare_model

    model_setup = prepare_model(config, machine, plan_only=True)
    rows = planner.nominal_rows(config)
    run_plan = planner.plan_run(
        config, model_setup.decoder, device=model_setup.device, machine=model_setup.machine, rows=rows
    )
    return forecast(model_setup, run_plan)


def forecast(
    model_setup: "ModelSetup",
    run_plan: RunPlan,
    saved: dict[str, Any] | None = None,  # the numerics key that a resumed run was computed under
    data: "tuple[Dataset | None, ...]" = (),  # the data sets, where they were read
    total_steps: int | None = None,  # of the run, where it is known
    numerics: dict[str, Any] | None = None,  # the numerics key in force; None before there is an engine
) -> Forecast:
    """What to expect of a planned run."""
    config, decoder, machine, count = model_setup.config, model_setup.decoder, run_plan.machine, model_setup.count
    rows, timed, train = planner.nominal_rows(config), run_plan, data[0] if data else None
    size, most = run_plan.micro_batch[0], run_plan.micro_batches
    if train is not None:
        rows = min(rows, _full_rows(config, train))
        most = min(most, -(-sum(train.epoch_sequences) // size))
    if -(-rows // size) != run_plan.micro_batches:  # planned for steps of many short rows, or of more than there are
        if config.plan.micro_batch is None:
            saved = {**(saved or {}), "micro_batch": run_plan.micro_batch}
        timed = planner.plan_run(config, decoder, device=run_plan.device, machine=machine, rows=rows, saved=saved)
    needed = disk_space.disk_needed(config, decoder, run_plan.precision)
    place, free = config.output.dir, machine.disk_free
    if place is not None and not machine.described:
        free = facts.SYSTEM_PROBE.disk_free(Path(place))
    return Forecast(
        config=config,
        decoder=decoder,
        run_plan=run_plan,
        timed=timed,
        numerics=_numerics_key(config, decoder, run_plan) if numerics is None else numerics,
        disk={**needed, "cache": sum(one.num_bytes for one in data if one is not None) if data else None, "free": free},
        total_steps=total_steps if total_steps is not None else config.train.steps,
        flops_per_token=count.flops_per_token(config.data.seq_len),
        step_tokens=rows * config.data.seq_len,
        free_clipping_tokens=_clipping_is_free_from(timed, count),
        estimate=_estimate(timed),
        micro_batches=most,
    )


def _full_rows(config: Config, train: "Dataset") -> int:
    """Rows of an epoch, where a step takes rows; where it takes tokens of rows of any length, as many full rows as
    have these tokens."""
    count = sum(train.epoch_sequences)
    if config.data.packing or config.train.batch_size is not None:
        return count
    return max(1, math.ceil(count * train.num_tokens / train.num_sequences / config.data.seq_len))


PROBE_MARGIN = 1.25
"""How much faster a machine may be than its probe measured: others used it at the time, or the probe's sizes did not
suit it."""


def _clipping_is_free_from(run_plan: RunPlan, count: "ModelCount") -> int | None:
    """Tokens per step from which the next forward hides the host's updates, so that clipping costs no time."""
    trained: int = sum(
        math.prod(tensor["shape"])
        for asked, planned in zip(run_plan.request["units"], run_plan.plan["units"], strict=True)
        for tensor in asked["tensors"]
        if tensor["role"] == "trainable" and planned["update"] == "host"
    )
    speed, arithmetic = run_plan.rates.get("adamw_gparams"), run_plan.rates.get("matmul_tflops")
    if not trained or not speed or not arithmetic:
        return None
    forward = count.flops_per_token(run_plan.micro_batch[1]) / 3 / (arithmetic * 1e12)
    return round(trained / (speed * 1e9) / forward)


def lower_bound_rates(run_plan: RunPlan) -> dict[str, float]:
    """Rates that no run exceeds: those measured on a card, with a margin; otherwise rates above any machine's, since on
    the CPU a probe shares the processors with whatever else runs."""
    if run_plan.measured and run_plan.device == "cuda":
        return {name: rate * PROBE_MARGIN for name, rate in run_plan.rates.items()}
    rates = run_plan.rates | calibrate.fastest(run_plan.machine, run_plan.device)
    return calibrate.of_state(rates, run_plan.request["state"]["moments"])


def _estimate(run_plan: RunPlan) -> dict[str, Any]:
    from megatrain import _core

    rates = lower_bound_rates(run_plan)
    wanted = {key: rates[key] for key in run_plan.request["rates"]}
    found: dict[str, Any] = json.loads(
        _core.simulate(json.dumps(run_plan.request), json.dumps(run_plan.plan), json.dumps(wanted))
    )
    return found


def _numerics_key(config: Config, decoder: "Decoder", run_plan: RunPlan) -> dict[str, Any]:
    """The numerics key of a planned run, with its card's name whether or not that card is in this machine."""
    import torch

    from megatrain.engine import numerics
    from megatrain.weights.state_format import StateFormat

    cuda = run_plan.device == "cuda"
    key = numerics.key(
        decoder,
        torch.device("cpu"),
        micro_batch=run_plan.micro_batch,
        micro_batches=run_plan.micro_batches,
        grad_precision=config.train.sent_in(run_plan.precision),
        state_format=StateFormat(config.train.moments, config.train.master),
        loss_chunk=run_plan.options.get("loss_chunk"),
        compiled=bool(run_plan.options.get("compile", cuda)),
        deterministic=config.train.deterministic,
        fragments=run_plan.options["fragments"],
        mlp_tiles=run_plan.options.get("mlp_tiles", 1),
        least=run_plan.options.get("kept_tensors") != "usual",
    )
    if cuda:
        from megatrain.engine.loss import default_chunk

        gpu = run_plan.machine.gpu
        key["device"] = gpu.name if gpu else "cuda"
        key["threads"] = None
        key["packed_rows"] = decoder.packed_rows("cuda")
        key["attention"] = numerics.attention(decoder, "cuda", config.train.deterministic)
        chunk = default_chunk(decoder.vocab_size, "cuda", gpu.total_bytes if gpu else None)
        key["loss_chunk"] = run_plan.options.get("loss_chunk") or chunk
    return key
