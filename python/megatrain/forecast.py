"""What a plan means for a run: step time and what bounds it, disk, what is given up, and the numerics key.

`megatrain plan` and the dry run say the same, from here.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain import machine as facts
from megatrain import planning, probe
from megatrain.config import Config
from megatrain.machine import Machine
from megatrain.planning import Settled

if TYPE_CHECKING:
    from megatrain.assembly import Blueprint
    from megatrain.data import Dataset
    from megatrain.metrics import ModelCount
    from megatrain.model import Decoder

GIVEN_UP_BY_IMMEDIATE = (
    "a non-finite gradient or an interrupt that is met after some units were updated cannot be taken back: the first "
    "stops the run with exit code 4, naming the last checkpoint, and the second waits for the step's end"
)
"""What `train.update: immediate` costs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What a run will be, by its plan."""

    settled: Settled
    timed: Settled
    """The step that is timed: as `settled`, except where rows are not packed; then of full rows."""
    update: str
    """`train.update`."""
    num_parameters: int
    num_trainable: int
    largest_micro_batch: int
    numerics: dict[str, Any]
    disk: dict[str, int | None]
    """Bytes: `checkpoint`, `checkpoints` (all that exist at one time), `export`, `cache` (tokenized data; None where
    they were not read), `free` (where the run's folder is or would be; None where that is not known)."""
    output_dir: str | None
    """`output.dir`."""
    flops_per_token: float
    step_tokens: int
    free_clipping_tokens: int | None
    estimate: dict[str, Any]
    """Of a step in steady state: step_s, bound, lanes; a lower bound of the time."""

    @property
    def expected_step_s(self) -> float:
        """A step's seconds at the rates that are usually sustained, of this machine where it was measured."""
        return max(float(self.timed.plan["estimate"]["expected_step_s"]), self.step_s)

    @property
    def step_s(self) -> float:
        """Lower bound of a step's seconds: what the lanes take, and at least the arithmetic at the matmul rate."""
        arithmetic = self.flops_per_token * self.step_tokens / (lower_bound_rates(self.timed)["matmul_tflops"] * 1e12)
        return max(float(self.estimate["step_s"]), arithmetic)

    @property
    def checkpoint_s(self) -> float | None:
        """Seconds that writing a checkpoint takes at the measured rate of a disk; None where none was measured."""
        rate, size = self.settled.rates.get("disk_write_gbs"), self.disk["checkpoint"]
        return size / (rate * 1e9) if rate and size is not None else None

    @property
    def given_up(self) -> str | None:
        """What `train.update` gives up; None where that is nothing."""
        return GIVEN_UP_BY_IMMEDIATE if self.update == "immediate" else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        settled = self.settled
        return {
            "device": settled.device,
            "machine": settled.machine.name,
            "parameters": self.num_parameters,
            "trainable": self.num_trainable,
            "precision": settled.precision,
            "update": self.update,
            "given_up": self.given_up,
            "micro_batch": list(settled.micro_batch),
            "micro_batches": settled.micro_batches,
            "largest_micro_batch": self.largest_micro_batch,
            "budget": settled.budget,
            "plan": settled.plan,
            "step_s": self.step_s,
            "expected_step_s": self.expected_step_s,
            "tokens_per_s": self.step_tokens / self.step_s if self.step_s else None,
            "bound": self.estimate["bound"],
            "lanes": self.estimate["lanes"],
            "rates": settled.rates,
            "rates_measured": settled.measured,
            "free_clipping_tokens": self.free_clipping_tokens,
            "numerics": self.numerics,
            "disk": self.disk,
            "checkpoint_s": self.checkpoint_s,
        }


def without_data(config: Config, machine: Machine) -> Forecast:
    """Plans a run without its data and its weights. Raises DoesNotFit with the sum."""
    from megatrain.assembly import draw_up

    blueprint = draw_up(config, machine, plan_only=True)
    rows = planning.nominal_rows(config)
    settled = planning.settle(config, blueprint.decoder, device=blueprint.device, machine=machine, rows=rows)
    return forecast(blueprint, settled)


def forecast(
    blueprint: "Blueprint",
    settled: Settled,
    saved: dict[str, Any] | None = None,  # the numerics key that a resumed run was computed under
    data: "tuple[Dataset | None, ...]" = (),  # what was read for it
) -> Forecast:
    """What a run that was planned will be."""
    config, decoder, machine, count = blueprint.config, blueprint.decoder, settled.machine, blueprint.count
    rows, timed = planning.nominal_rows(config), settled
    if -(-rows // settled.micro_batch[0]) != settled.micro_batches:  # planned for more rows than a step has, all short
        timed = planning.settle(config, decoder, device=settled.device, machine=machine, rows=rows, saved=saved)
    needed = planning.disk_needed(config, decoder, settled.precision)
    place, free = config.output.dir, machine.disk_free
    if place is not None and not machine.described:
        free = facts.READERS.disk_free(Path(place))
    return Forecast(
        settled=settled,
        timed=timed,
        update=config.train.update,
        num_parameters=decoder.num_parameters,
        num_trainable=decoder.num_trainable,
        largest_micro_batch=planning.largest_micro_batch(config, decoder, settled),
        numerics=_numerics_key(config, decoder, settled),
        disk={**needed, "cache": sum(one.num_bytes for one in data if one is not None) if data else None, "free": free},
        output_dir=place,
        flops_per_token=count.flops_per_token(config.data.seq_len),
        step_tokens=rows * config.data.seq_len,
        free_clipping_tokens=_clipping_is_free_from(timed, decoder, count),
        estimate=_estimate(timed),
    )


PROBE_MARGIN = 1.25
"""How much faster than a probe saw it a machine may be: others used it meanwhile, or sizes did not suit it."""


def _clipping_is_free_from(settled: Settled, decoder: "Decoder", count: "ModelCount") -> int | None:
    """Tokens a step from which the host's updates hide beneath the next forward, so that clipping costs nothing."""
    places = {unit["name"]: unit["update"] for unit in settled.plan["units"]}
    trained = sum(
        math.prod(t.shape)
        for unit in decoder.units
        for t in unit.tensors
        if t.role == "trainable" and places.get(unit.name) == "host"
    )
    speed, arithmetic = settled.rates.get("adamw_gparams"), settled.rates.get("matmul_tflops")
    if not trained or not speed or not arithmetic:
        return None
    forward = count.flops_per_token(settled.micro_batch[1]) / 3 / (arithmetic * 1e12)
    return round(trained / (speed * 1e9) / forward)


def lower_bound_rates(settled: Settled) -> dict[str, float]:
    """Rates that a run does not pass: those measured on a card and a little more; else those of no machine, since on
    the CPU a probe and a run share the processors with whatever else there is."""
    if settled.measured and settled.device == "cuda":
        return {name: rate * PROBE_MARGIN for name, rate in settled.rates.items()}
    return settled.rates | probe.fastest(settled.machine, settled.device)


def _estimate(settled: Settled) -> dict[str, Any]:
    from megatrain import _core

    rates = lower_bound_rates(settled)
    wanted = {key: rates[key] for key in settled.request["rates"]}
    found: dict[str, Any] = json.loads(
        _core.simulate(json.dumps(settled.request), json.dumps(settled.plan), json.dumps(wanted))
    )
    return found


def _numerics_key(config: Config, decoder: "Decoder", settled: Settled) -> dict[str, Any]:
    """The numerics key of a run that was planned, its card named whether or not it is here."""
    import torch

    from megatrain import numerics

    cuda = settled.device == "cuda"
    key = numerics.key(
        decoder,
        torch.device("cpu"),
        micro_batch=settled.micro_batch,
        micro_batches=settled.micro_batches,
        grad_precision=config.train.sent_in(settled.precision),
        loss_chunk=settled.options.get("loss_chunk"),
        compiled=bool(settled.options.get("compile", cuda)),
        deterministic=config.train.deterministic,
    )
    if cuda:
        from megatrain.loss import default_chunk

        key["device"] = settled.machine.gpu.name if settled.machine.gpu else "cuda"
        key["threads"] = None
        key["packed_rows"] = decoder.packed_rows("cuda")
        key["attention"] = numerics.attention(decoder, "cuda", config.train.deterministic)
        key["loss_chunk"] = settled.options.get("loss_chunk") or default_chunk(decoder.vocab_size, "cuda")
    return key
