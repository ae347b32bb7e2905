"""Before anything is allocated: budgets, the split into micro-batches, the plan, and whether it all fits.

    megatrain plan CONFIG.yaml            what a run would do, on this machine
    megatrain plan MODEL --machine FILE   or on one that was described

`plan_run` is also what a run itself starts with, so that what `plan` prints is what is allocated. The split of a step
into micro-batches follows from configuration, model and kind of device by a fixed rule, and shrinks only when the plan
would not fit: it changes rounding, so it must depend neither on measured rates nor on what happens to be free.
"""

import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from megatrain.config import Config, NvmeConfig, constraints
from megatrain.config.paths import check_state_folder
from megatrain.errors import ConfigError, DoesNotFit
from megatrain.planning import calibrate, remedies
from megatrain.planning.optimizer_groups import optimizer_for
from megatrain.system import hardware as facts
from megatrain.system.hardware import Machine

if TYPE_CHECKING:
    from megatrain.engine.cuts import Cut
    from megatrain.models.decoder import Decoder

log: logging.Logger = logging.getLogger("megatrain")

MICRO_BATCH_TOKENS: dict[str, tuple[int, ...]] = {"cuda": (32768, 16384, 8192), "cpu": (4096,)}
"""Tokens of a micro-batch that are compared, where nothing is asked for: of the first as many as fill the device while
weights cross the link seldom, of the last so few that the activations of one micro-batch can all be kept."""

_ALIKE = 1.03
"""Step times that differ by less than this factor are alike: predictions are no better."""

_ALIKE_IN_KIND = 1.01
"""The same for plans of which all or none leave something to the host: what predictions miss, they miss of both."""

_LARGEST_SEARCHED = 1 << 14


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """Everything about a run that is decided before it starts."""

    device: Literal["cuda", "cpu"]
    precision: Literal["bf16", "fp32"]
    machine: Machine
    micro_batch: tuple[int, int]
    """(rows, tokens a row) of the largest micro-batch."""
    micro_batches: int
    """Most micro-batches of a step."""
    budget: dict[str, int]
    """Bytes: device, host, and disk where `memory.nvme` names one."""
    rates: dict[str, float]
    """`adamw_gparams` is that of the host's AdamW over the moments of this run."""
    measured: bool
    """Whether the rates were measured; else they are those of usual machines."""
    request: dict[str, Any]
    """What the core was asked."""
    plan: dict[str, Any]
    """As the core made it."""
    options: dict[str, Any]
    """`plan` of the engine: numbers asked for, switches, threads, and `correction`."""
    correction: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What `safer` has added after an earlier part of the run had run out of memory."""
    disk: NvmeConfig | None = None
    """Where optimizer state, weights and layer inputs may be kept on disk."""

    def engine_options(self) -> dict[str, Any]:
        """Keywords for `Engine`."""
        memory: dict[str, Any] = {"gpu": self.budget["device"], "host": self.budget["host"]}
        if self.disk is not None:
            memory["nvme"] = {"path": self.disk.paths, "size": self.budget["disk"]}
        # a limit that was given is kept to, for whoever shares the card
        held = self.device == "cuda" and self.budget["device"] < self.machine.gpu_budget()
        return {
            "memory": memory,
            "plan": self.options | ({"hold_torch": True} if held else {}),
            "micro_batch": self.micro_batch,
            "micro_batches": self.micro_batches,
            "rates": self.rates,
        }


def choose_device(config: Config, machine: Machine) -> Literal["cuda", "cpu"]:
    """`device` of the configuration on this machine. Raises ConfigError when there is no usable card."""
    if config.device == "cpu":
        return "cpu"
    if machine.gpu is not None:
        return "cuda"
    if config.device == "cuda":
        raise ConfigError(facts.no_card(machine.gpu_reason))
    return "cpu"


def choose_precision(config: Config, device: str, machine: Machine) -> Literal["bf16", "fp32"]:
    """`train.precision` on this device. Raises ConfigError when the card has no native bf16."""
    return constraints.choose_precision(
        config.train.precision,
        device,
        native_bf16=machine.gpu is not None and machine.gpu.capability >= (8, 0),
        card=machine.gpu.name if machine.gpu else "the card",
        key="train.precision",
    )


def choose_matmul(config: Config, precision: str, device: str, machine: Machine) -> str:
    """`train.matmul` on this device. Raises ConfigError where the card, or the precision, does not go with fp8."""
    constraints.check_matmul(config.train.matmul, precision, "train.")
    if config.train.matmul == "fp8" and device == "cuda" and machine.gpu is not None:
        constraints.refuse_float8(machine.gpu.capability, machine.gpu.name, "train.")
    return config.train.matmul


def budgets(config: Config, device: str, machine: Machine) -> dict[str, int]:
    """Bytes that a run may use: device, host, and disk where `memory.nvme` names one. Raises ConfigError when that is
    no folder that can be written."""
    gpu, host, disk = config.memory.gpu, config.memory.host, _state_disk(config, machine)
    found = machine.budget(device, None if gpu == "auto" else gpu, None if host == "auto" else host)
    if disk is None:
        return found
    for path in disk.paths if not machine.described else ():
        check_state_folder(Path(path))
    return found | {"disk": machine.state_disk(disk.paths, disk.size, found["host"])}


def _state_disk(config: Config, machine: Machine) -> NvmeConfig | None:
    """Where optimizer state may be kept on disk: `memory.nvme`, or the drives of a described machine, which need no
    folder to be planned with."""
    if config.memory.nvme is None and machine.state_drives:
        return NvmeConfig(path=tuple(f"drive {number}" for number in range(machine.state_drives)))
    return config.memory.nvme


def plan_run(
    config: Config,
    decoder: "Decoder",
    *,
    device: Literal["cuda", "cpu"],
    machine: Machine,
    rows: int,  # most sequences of a step
    saved: dict[str, Any] | None = None,  # the numerics key that a resumed run was computed under
    correction: dict[str, Any] | None = None,  # see `safer`; what the configuration asks for comes first
) -> RunPlan:
    """Decides the micro-batches by what fits on the machine when nothing else runs on it, and makes the plan for what
    is free now. Raises DoesNotFit with the sum."""
    if device == "cuda":
        machine = machine.with_free_memory()
    rates, measured = calibrate.rates(machine, device)
    asked = engine_plan(config, device, machine)
    first, size, options = _by_rule(config, decoder, device, machine, rates, rows, asked, saved, correction)
    planner = SplitPlanner(config, decoder, device, machine, rates, options)
    try:
        request, plan, cut = planner.fit(size, -(-rows // size))
    except DoesNotFit as error:
        settled = facts.settled(machine)
        if settled is not None:
            return plan_run(
                config, decoder, device=device, machine=settled, rows=rows, saved=saved, correction=correction
            )
        if "state_on_device" not in options and remedies.exceeds_by_state(error, planner.budget):
            error = planner.refusal(size, -(-rows // size), state_on_device=0) or error
        ways = remedies.ways_that_fit(
            config,
            machine,
            rows,
            lambda other, where: _fits(other, decoder, device, where, rates),
            lambda other, where: _planned(other, decoder, device, where, rates),
        )
        raise remedies.explained(error, config, device, machine, planner.budget, ways) from None
    if size != first:
        log.info(
            "micro-batches of %d rows do not fit, so %d rows are used; this is part of the numerics key", first, size
        )
    return RunPlan(
        device=device,
        precision=decoder.precision,  # type: ignore[arg-type]
        machine=machine,
        micro_batch=(size, config.data.seq_len),
        micro_batches=-(-rows // size),
        budget=planner.budget,
        rates=planner.rates,
        measured=measured,
        request=request,
        plan=plan,
        options=options | cut.options,
        correction=dict(correction or {}),
        disk=_state_disk(config, machine),
    )


def _by_rule(
    config: Config,
    decoder: "Decoder",
    device: str,
    machine: Machine,
    rates: dict[str, float],
    rows: int,
    options: dict[str, Any],
    saved: dict[str, Any] | None = None,
    correction: dict[str, Any] | None = None,
) -> tuple[int, int, dict[str, Any]]:
    """What must not depend on what is free now, since it changes rounding: rows of a micro-batch by the rule, as many
    of them as the idle machine has room for, and `options` with how the model is cut there. What a run was computed
    with is kept where it fits. Other arguments are those of `plan_run`."""
    idle, cut_before = machine.idle(), dict[str, Any]()
    if saved and (saved.get("device") == "cpu") == (device == "cpu"):
        before = {"loss_chunk": saved.get("loss_chunk"), "compile": saved.get("compiled")}
        options = {key: value for key, value in before.items() if value is not None} | options
        cut_before = _cut_of(saved)
    nominal = SplitPlanner(config, decoder, device, idle, calibrate.nominal(machine, device), options)
    first = _first_split(config, device, rows, saved, nominal)
    options = (correction or {}) | options
    if options.keys() & {"fragments", "mlp_tiles", "expert_groups"}:
        cut_before = {key: value for key, value in cut_before.items() if key == "kept_tensors"}
    for kept in (cut_before, {}) if cut_before else ({},):
        roomiest = SplitPlanner(config, decoder, device, idle, rates, kept | options)
        size = first if config.plan.micro_batch is not None else _largest_that_fits(roomiest, first, rows)
        cut = roomiest.cut(size, -(-rows // size))
        if cut is not None:
            return first, size, options | cut.options
    return first, size, options


def _cut_of(saved: dict[str, Any]) -> dict[str, Any]:
    """Options for how the model was cut under a numerics key."""
    tiles = saved.get("mlp_tiles") or 1
    kept = {"kept_tensors": saved.get("kept_tensors") or "least"} if saved.get("compiled") else {}
    if saved.get("fragments") == "experts":
        return {"fragments": "experts", **kept}
    if tiles > 1 or saved.get("fragments"):
        return {"fragments": "halves", "mlp_tiles": tiles, **kept}
    return {"fragments": "whole", **kept} if saved.get("compiled") else {"mlp_tiles": 1}


def safer(config: Config, decoder: "Decoder", run_plan: RunPlan, shortfall: int) -> dict[str, Any] | None:
    """What to change in a plan under which torch ran out of memory by `shortfall` bytes, as options of the engine's
    plan: room for what was measured, and where that does not free as much, recomputed activations and smaller groups
    of micro-batches, then layers in halves and in tiles, unless the configuration asks for others. The split of a step
    stays, and with it the numerics key unless layers are cut. None where no such plan needs less."""
    from megatrain.engine.cuts import cuts

    size, _ = run_plan.micro_batch
    more = run_plan.correction.get("more_workspace", 0) + shortfall
    planned = run_plan.plan["totals"]["device"] - run_plan.correction.get("more_workspace", 0)
    best: tuple[int, dict[str, Any]] = (0, {})
    changes: list[dict[str, Any]] = [
        {},
        {"activation": "recompute"},
        {"activation": "recompute", "group": 1},
        {"group": 1},
    ]
    asked = {key: getattr(config.plan, key) for key in ("fragments", "mlp_tiles", "expert_groups", "sent_experts")}
    ways = [cut.options for cut in cuts(decoder, asked, math.prod(run_plan.micro_batch))]
    present = [all(run_plan.options.get(key) == value for key, value in way.items()) for way in ways]
    changes += ways[present.index(True) + 1 :] if any(present) else []
    for change in changes:
        if "activation" in change and config.plan.offload:
            continue
        if any(getattr(config.plan, key) not in (None, "auto", value) for key, value in change.items()):
            continue
        correction = run_plan.correction | {"more_workspace": more} | change
        planner = SplitPlanner(
            config, decoder, run_plan.device, run_plan.machine, run_plan.rates, run_plan.options | correction
        )
        with contextlib.suppress(DoesNotFit, ConfigError):
            plan = planner.fit(size, run_plan.micro_batches).plan
            freed = planned - (plan["totals"]["device"] - more)
            if freed > best[0]:
                best = freed, correction
            if freed >= max(1, shortfall):
                break
    return best[1] or None


def _fits(config: Config, decoder: "Decoder", device: str, machine: Machine, rates: dict[str, float]) -> bool:
    """Whether `_planned` finds a plan."""
    rows, machine = nominal_rows(config), _unasked(machine)
    planner = SplitPlanner(config, decoder, device, machine, rates, engine_plan(config, device, machine))
    size = min(rows, config.plan.micro_batch or 1)
    if planner.fits(size, -(-rows // size)):
        # Split and cut follow from the idle machine; a split that is not asked for is halved until it fits there.
        return machine == machine.idle() or _planned(config, decoder, device, machine, rates) is not None
    if config.plan.micro_batch is not None:
        return False
    # More rows may fit where one does not: a step of a single micro-batch has no fp32 sums of layers' gradients on the
    # device (with bf16 gradients, and MLPs that are not tiled). Embedding and head have theirs in any case.
    whole = rows * config.data.seq_len <= MICRO_BATCH_TOKENS[device][0] and planner.fits(rows, 1)
    return whole and _planned(config, decoder, device, machine, rates) is not None


def _planned(
    config: Config, decoder: "Decoder", device: str, machine: Machine, rates: dict[str, float]
) -> dict[str, Any] | None:
    """The plan of a run with these settings, as `plan_run` makes it; None where it does not fit."""
    rows, machine = nominal_rows(config), _unasked(machine)
    asked = engine_plan(config, device, machine)
    _, size, options = _by_rule(config, decoder, device, machine, rates, rows, asked)
    return SplitPlanner(config, decoder, device, machine, rates, options).plan(size, -(-rows // size))


def _unasked(machine: Machine) -> Machine:
    """A machine of which no folder is looked for: a way to fit may name one that is not there."""
    return dataclasses.replace(machine, described=True)


def _largest_that_fits(planner: "SplitPlanner", first: int, rows: int) -> int:
    """Rows of a micro-batch: `first`, or the largest of its halves that fits; 1 where none does."""
    if first == 1 or planner.fits(first, -(-rows // first)):
        return first
    if not planner.fits(1, rows):  # nothing needs less
        return 1
    size = -(-first // 2)
    while size > 1 and not planner.fits(size, -(-rows // size)):
        size = -(-size // 2)
    return size


def engine_plan(config: Config, device: str, machine: Machine) -> dict[str, Any]:
    """The engine's `plan`: what the configuration asks for, and how many optimizer threads leave room for the rest."""
    if config.train.check_every is not None:
        train = config.train
        constraints.refuse_unrepeatable(train.update, device, train.deterministic, "train.check_every", "train.")
    if config.plan.compile and device == "cpu":
        raise ConfigError("plan.compile is for CUDA, and this is the CPU, which runs layers as they are; leave it null")
    # Two processors stay with the launching thread and autograd's; on the CPU torch's own threads compute meanwhile.
    threads = max(1, machine.cpus - 2 if device == "cuda" else machine.cpus // 2)
    asked = {field.name: getattr(config.plan, field.name) for field in dataclasses.fields(config.plan)}
    del asked["micro_batch"]  # an argument of its own
    return {"threads": threads} | {key: value for key, value in asked.items() if value not in (None, "auto")}


def largest_micro_batch(config: Config, decoder: "Decoder", run_plan: RunPlan) -> int:
    """The most rows that could be computed at a time, by trying."""
    other = ["group", "large_group"]  # of several micro-batches
    if config.plan.kept_tensors == "auto":
        other.append("kept_tensors")
    options = {key: value for key, value in run_plan.options.items() if key not in other}
    planner = SplitPlanner(config, decoder, run_plan.device, run_plan.machine, run_plan.rates, options)

    def fits(rows: int) -> bool:
        return planner.fits(rows, 1)

    low = run_plan.micro_batch[0] if fits(run_plan.micro_batch[0]) else 1
    high = low * 2
    while high < _LARGEST_SEARCHED and fits(high):
        low, high = high, high * 2
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def nominal_rows(config: Config) -> int:
    """Sequences of a step: with packing windows, else as many as there are when every row is as long as it may be."""
    return config.train.batch_size or max(1, (config.train.batch_tokens or 1) // config.data.seq_len)


def _even_parts(rows: int, tokens: int, seq_len: int) -> int:
    """Rows of a micro-batch of at most `tokens` tokens, in even parts of a step."""
    return -(-rows // -(-rows // max(1, tokens // seq_len)))


def _first_split(config: Config, device: str, rows: int, saved: dict[str, Any] | None, nominal: "SplitPlanner") -> int:
    """Rows of a micro-batch by the fixed rule: what is asked for, else what the run had, else the even parts of a step
    that `nominal`, which knows neither measured rates nor what is free now, expects to be fastest. Of those alike, the
    ones that leave nothing to the host, if there are any; of these, unless one is faster still, what launches layers at
    once, then what makes nothing again (`cuts.keeping`), then the largest."""
    asked = config.plan.micro_batch
    before = (saved or {}).get("micro_batch")
    if asked is not None:
        if before and before[0] != asked:
            log.info("plan.micro_batch: %d → %d: results agree closely from here on, not bit for bit", before[0], asked)
        return min(asked, rows)
    if before:
        return min(int(before[0]), rows)
    sizes = list(dict.fromkeys(_even_parts(rows, t, config.data.seq_len) for t in MICRO_BATCH_TOKENS[device]))
    if len(sizes) == 1:
        return sizes[0]
    fitted = {size: nominal.fitted(size, -(-rows // size)) for size in sizes}
    found = {size: fit for size, fit in fitted.items() if fit is not None}
    if not found:
        return sizes[0]
    seconds = {size: float(fit.plan["estimate"]["expected_step_s"]) for size, fit in found.items()}
    on_device = {size: all(unit["state"] == "device" for unit in fit.plan["units"]) for size, fit in found.items()}
    alike = [size for size in found if seconds[size] <= min(seconds.values()) * _ALIKE]
    alike = [size for size in alike if on_device[size]] or alike
    fastest = min(seconds[size] for size in alike)
    alike = [size for size in alike if seconds[size] <= fastest * _ALIKE_IN_KIND]
    return max(alike, key=lambda size: (found[size].plan["graphs"], not found[size].cut.least, size))


class Fitted(NamedTuple):
    """A plan that fits."""

    request: dict[str, Any]
    """What the core was asked."""
    plan: dict[str, Any]
    cut: "Cut"
    """How it cuts the model into units and tiles."""


class SplitPlanner:
    """Plans one configuration for splits of different sizes, or with other numbers asked for (`options`)."""

    def __init__(
        self,
        config: Config,
        decoder: "Decoder",
        device: str,
        machine: Machine,
        rates: dict[str, float],
        options: dict[str, Any],
    ) -> None:
        self.config: Config = config
        self.decoder: Decoder = decoder
        self.device: str = device
        self.rates: dict[str, float] = calibrate.of_state(rates, config.train.moments)
        self.options: dict[str, Any] = options
        self.budget: dict[str, int] = budgets(config, device, machine)
        self.card_bytes: int | None = machine.gpu.total_bytes if device == "cuda" and machine.gpu is not None else None
        names = [t.name for t in decoder.tensors.values() if t.role == "trainable"]
        optimizer_for(config, names)  # refuses patterns that match nothing

    def plan(self, rows: int, micro_batches: int) -> dict[str, Any] | None:
        """The plan; None where there is none that fits."""
        fitted = self.fitted(rows, micro_batches)
        return None if fitted is None else fitted.plan

    def fitted(self, rows: int, micro_batches: int) -> Fitted | None:
        """As `fit`; None where there is no plan that fits."""
        cut = self.cut(rows, micro_batches)
        return self._planned(cut, rows, micro_batches) if cut is not None else None

    def fits(self, rows: int, micro_batches: int) -> bool:
        """Whether `fit` finds a plan: far sooner known than the plan itself."""
        return self.cut(rows, micro_batches) is not None

    def refusal(self, rows: int, micro_batches: int, **options: Any) -> DoesNotFit | None:
        """Why a plan with these numbers asked for besides does not fit; None where it does."""
        asked, self.options = self.options, self.options | options
        try:
            self.fit(rows, micro_batches)
        except DoesNotFit as error:
            return error
        finally:
            self.options = asked
        return None

    def fit(self, rows: int, micro_batches: int) -> Fitted:
        """The plan for the first way of cutting the model that fits. Raises DoesNotFit."""
        return self._planned(self.cut(rows, micro_batches), rows, micro_batches)

    def cut(self, rows: int, micro_batches: int) -> "Cut | None":
        """The way of cutting the model that is planned with; None where none fits. Where the size of micro-batches is
        not asked for, several rows are not tiled, and their layers are halved only where those of a single row must be:
        a smaller micro-batch does as well."""
        from megatrain.engine.cuts import first_that_fits, keeping

        def asked(cut: "Cut") -> dict[str, Any]:
            return self._request(cut, rows, micro_batches)

        found = self._cuts(rows)
        with _asked_for():
            if rows > 1 and self.config.plan.micro_batch is None and len(found) > 1:
                if first_that_fits(found[:1], asked):
                    return keeping(found[0], asked)
                if first_that_fits(found[:1], lambda cut: self._request(cut, 1, rows * micro_batches)):
                    return None
                found = [cut for cut in found if cut.tiles == found[0].tiles]
            return keeping(first_that_fits(found, asked), asked)

    def _cuts(self, rows: int) -> "list[Cut]":
        from megatrain.engine.cuts import cuts

        return cuts(self.decoder, self.options, rows * self.config.data.seq_len)

    def _planned(self, cut: "Cut | None", rows: int, micro_batches: int) -> Fitted:
        from megatrain.engine.cuts import planned

        with _asked_for():
            chosen, request, plan = planned(self._cuts(rows), cut, lambda cut: self._request(cut, rows, micro_batches))
        return Fitted(request, json.loads(plan), chosen)

    def _request(self, cut: "Cut", rows: int, micro_batches: int) -> dict[str, Any]:
        from megatrain.engine.profile import plan_request
        from megatrain.weights.state_format import StateFormat

        state_format = StateFormat(self.config.train.moments, self.config.train.master)
        state_format.check_precision(self.decoder.precision)
        return plan_request(
            cut.decoder,
            tiles=cut.tiles,
            routed=cut.sent == "routed",
            least=cut.least,
            micro_batch=(rows, self.config.data.seq_len),
            micro_batches=micro_batches,
            grad_precision=self.config.train.sent_in(self.decoder.precision),
            state_format=state_format,
            update=self.config.train.update,
            budget=self.budget,
            device=self.device,
            card_bytes=self.card_bytes,
            requests=self.options,
            rates=self.rates,
            loss_chunk=self.options.get("loss_chunk"),
        )


@contextlib.contextmanager
def _asked_for() -> Iterator[None]:
    """Turns what the core says of numbers that were asked for, and contradict each other or the model, into
    ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from None


def items_by_tier(plan: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]], int]]:
    """(tier, items, total) of a plan; disk only where it has state there."""
    for tier in ("device", "host", "disk") if plan["totals"]["disk"] else ("device", "host"):
        yield tier, [item for item in plan["items"] if item["tier"] == tier], plan["totals"][tier]
