"""Measures plans beside the automatic one: what it is of the best found, and what was predicted of each. JSON lines.

    python benches/sweep.py --model qwen2.5-7b --batch 64 --gpu-memory 24GiB --max-grad-norm 1.0 --steps 4 --minutes 9
    python benches/sweep.py … --plan-only [--machine H100,host.memory=128GiB]

Candidates are all combinations of micro-batch, group, kept layers and units whose state is on the card that fit, each
planned with those numbers asked for; of two that ask for the same plan, one is left. The automatic plan, with none of
them asked for, is measured first. The others follow by predicted time in rounds: the fastest of each micro-batch and
group, then the second of each, and so on, so that the likely best come first and no kind of plan is left out. At the
end, the best one found and the automatic plan are measured again. All are measured in this process, as many as fit in
the time: what was not is counted. Of a pair, the first is predicted and the second measured. Further arguments are
those of `megatrain bench`; keys that they fix are not varied.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatrain import _core
from megatrain.cli import bench
from megatrain.cli import parser as cli
from megatrain.cli.bench_request import BenchRequest, bench_request, configuration
from megatrain.cli.commands import described_machine
from megatrain.errors import ConfigError, DoesNotFit, MegatrainError
from megatrain.planning import calibrate, planner
from megatrain.system import hardware
from megatrain.system.hardware import Machine
from megatrain.training.setup import ModelSetup, prepare_model

WANTED = 0.97
"""The automatic plan's speed over that of the best found."""
HOPELESS = 1.2
"""A plan predicted to take this many times the fastest prediction is not measured."""
TOKENS = (2048, 32768)
"""Fewest and most tokens of a micro-batch, where no sizes are given."""
START_S = 30.0
"""Guess of an engine's start and compilation, until one was seen."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """Plan keys that are asked for; None: the planner decides."""

    micro_batch: int | None = None
    group: int | None = None
    keep: int | None = None
    state_on_device: int | None = None

    def keys(self) -> dict[str, int]:
        """Those that are asked for."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}


AUTOMATIC = Candidate()


@dataclasses.dataclass(slots=True)
class Planned:
    """A candidate and what came of it."""

    candidate: Candidate
    micro_batch: int
    plan: dict[str, Any]
    measured: list[float] = dataclasses.field(default_factory=list)
    """Seconds a step, of each time it ran."""
    error: str | None = None

    @property
    def predicted(self) -> float:
        """Seconds a step."""
        return float(self.plan["estimate"]["expected_step_s"])

    @property
    def seconds(self) -> float:
        """Measured, the mean."""
        return statistics.mean(self.measured)

    @property
    def kind(self) -> tuple[int, int]:
        """Micro-batch and group."""
        return self.micro_batch, int(self.plan["group"])

    @property
    def decisions(self) -> str:
        """Equal for plans that are the same."""
        chosen = {key: value for key, value in self.plan.items() if key not in ("items", "totals", "estimate")}
        return json.dumps([self.micro_batch, chosen], sort_keys=True)

    def facts(self) -> dict[str, Any]:
        """What the plan decides, in numbers."""
        units = self.plan["units"]
        kept = [unit["activation"] for unit in units[1:-1]]
        return {
            "asked": self.candidate.keys(),
            "micro_batch": self.micro_batch,
            "group": self.plan["group"],
            "keep": kept.count("keep"),
            "offload": kept.count("offload"),
            "recompute": kept.count("recompute"),
            "state_on_device": sum(unit["state"] == "device" for unit in units),
            "updates_on_device": sum(unit["state"] == "host" and unit["update"] == "device" for unit in units),
            "predicted_s": round(self.predicted, 4),
        }


def sizes(batch: int, seq: int) -> list[int]:
    """Rows of a micro-batch that are tried: powers of two that divide a step, and the whole step."""
    powers = [1 << power for power in range(batch.bit_length())]
    fits = [size for size in {*powers, batch} if batch % size == 0 and TOKENS[0] <= size * seq <= TOKENS[1]]
    return sorted(fits) or [batch]


def spread(whole: int) -> list[int]:
    """None of `whole`, half of it and all of it."""
    return [0, whole // 2, whole]


def candidates(
    batch: int,
    layers: int,
    micro_batches: Sequence[int],
    groups: Sequence[int],  # empty: 1, 2, 4 and all of a step
    keeps: Sequence[int],
    states: Sequence[int],
    fixed: Mapping[str, Any],  # keys that are not varied, and their values
) -> list[Candidate]:
    """Every combination, the planner's own choice of each number among them."""
    found = []
    for size in [None] if "micro_batch" in fixed else micro_batches:
        parts = -(-batch // (size or fixed["micro_batch"]))
        tried = [number for number in groups or (1, 2, 4, parts) if number <= parts]
        axes = {"group": list(dict.fromkeys(tried)), "keep": [None, *keeps], "state_on_device": [None, *states]}
        values = [[None] if key in fixed else axis for key, axis in axes.items()]
        found += [Candidate(size, *numbers) for numbers in itertools.product(*values)]
    return [one for one in found if one.keep is None or one.keep <= layers]


def ordered(found: Iterable[Planned], automatic: Planned) -> list[Planned]:
    """The order in which they are measured, the automatic plan first; without what is the same plan or hopeless."""
    others: dict[str, Planned] = {}
    for one in sorted(found, key=lambda one: (one.predicted, len(one.candidate.keys()))):
        others.setdefault(one.decisions, one)
    others.pop(automatic.decisions, None)
    fastest = min(one.predicted for one in (automatic, *others.values()))
    kinds: dict[tuple[int, int], list[Planned]] = defaultdict(list)
    for one in others.values():
        if one.predicted <= HOPELESS * fastest:
            kinds[one.kind].append(one)
    rounds = itertools.zip_longest(*kinds.values())
    return [automatic, *(one for each in rounds for one in each if one is not None)]


class Sweep:
    """One model, step and budget on one machine."""

    def __init__(self, request: BenchRequest, machine: Machine, end: float) -> None:
        self.request, self.machine, self.end = request, machine, end
        self.config = configuration(request)
        self.setup: ModelSetup = prepare_model(self.config, machine, plan_only=True)
        self.free = machine.with_free_memory() if self.setup.device == "cuda" else machine
        self.rates, _ = calibrate.rates(self.free, self.setup.device)
        self.start_s = START_S

    def requested(self, candidate: Candidate) -> BenchRequest:
        """The request of `megatrain bench` with the candidate's keys."""
        settings = dict(self.request.settings)
        settings["plan"] = settings.get("plan", {}) | candidate.keys()
        return dataclasses.replace(self.request, settings=settings)

    def automatic(self) -> Planned:
        """The plan with nothing asked for. Raises DoesNotFit."""
        run_plan = planner.plan_run(
            self.config,
            self.setup.decoder,
            device=self.setup.device,
            machine=self.machine,
            rows=self.request.batch,
        )
        return Planned(AUTOMATIC, run_plan.micro_batch[0], run_plan.plan)

    def asked(self, candidate: Candidate) -> tuple[int, str] | None:
        """(rows of a micro-batch, what the core is asked); None where the model or the device does not allow it."""
        device = self.setup.device
        try:
            config = configuration(self.requested(candidate))
            options = planner.engine_plan(config, device, self.free)
            split = planner.SplitPlanner(config, self.setup.decoder, device, self.free, self.rates, options)
            rows = min(config.plan.micro_batch or self.request.batch, self.request.batch)
            micro_batches = -(-self.request.batch // rows)
            cut = split.cut(rows, micro_batches)
            return None if cut is None else (rows, json.dumps(split._request(cut, rows, micro_batches)))
        except ConfigError:
            return None

    def all_planned(self, found: Sequence[Candidate]) -> list[Planned]:
        """Those that fit. The core plans on all processors, since one plan may take a second; what it is asked is made
        by one thread, since layers are traced for it."""
        asked = [(candidate, self.asked(candidate)) for candidate in found]

        def plan(candidate: Candidate, rows: int, request: str) -> Planned | None:
            with contextlib.suppress(ValueError, DoesNotFit):  # a number that this model or device does not have
                return Planned(candidate, rows, json.loads(_core.plan(request))) if _core.fits(request) else None
            return None

        with concurrent.futures.ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
            running = [pool.submit(plan, candidate, *what) for candidate, what in asked if what is not None]
        return [one for one in (each.result() for each in running) if one is not None]

    def time_for(self, one: Planned, reserve: float = 0.0) -> bool:
        """Whether it will end in time."""
        return time.monotonic() + self.needs(one) + reserve < self.end

    def needs(self, one: Planned) -> float:
        """Seconds that a measurement will take."""
        return self.start_s + 1.3 * one.predicted * (self.request.warmup + self.request.steps)

    def measure(self, one: Planned) -> None:
        """Runs it and prints its line."""
        start = time.monotonic()
        found: dict[str, Any] = {}
        try:
            found = self._timed(one)
        except (MegatrainError, torch.cuda.OutOfMemoryError) as error:
            one.error = " ".join(str(error).split())[:300]
            found = {"error": one.error}
        else:
            steps = self.request.warmup + self.request.steps
            self.start_s = max(1.0, time.monotonic() - start - one.measured[-1] * steps)
        # nothing of this engine may take memory from the next one
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        torch._dynamo.reset()
        print(json.dumps(one.facts() | found), flush=True)

    def _timed(self, one: Planned) -> dict[str, Any]:
        start = time.monotonic()
        with bench.opened(self.requested(one.candidate)) as opened:
            opened_s = time.monotonic() - start
            answer = bench.measure(opened)
            one.plan = opened.run_plan.plan  # as it ran: memory that is free may differ by a little
        one.measured.append(answer["step_s"])
        estimate = one.plan["estimate"]
        return {
            "measured_s": round(answer["step_s"], 4),
            "predicted_of_measured": round(one.predicted / answer["step_s"], 3),
            "tokens_s": answer["tokens_s"],
            "bound": [estimate["bound"], answer["bound"]],
            "lanes_s": {
                lane: [round(estimate["lanes"].get(lane, 0.0), 3), round(seconds, 3)]
                for lane, seconds in answer["lanes_s"].items()
            },
            "gpu_peak_gib": answer["gpu_peak_gib"],
            "opened_s": round(opened_s, 1),
        }

    def run(self, found: Sequence[Planned]) -> None:
        """Measures in order while there is time, then the best one and the automatic plan again."""
        automatic = found[0]
        for one in found:
            again = 0.0 if fastest(found) in (None, automatic) else 2 * self.needs(automatic)
            if one is automatic or self.time_for(one, again):
                self.measure(one)
        # one lucky measurement is not the best plan: it is the best when it was so twice
        while (best := fastest(found)) is not None and automatic.measured:
            again = next((one for one in (best, automatic) if len(one.measured) < 2), None)
            if best is automatic or again is None or not self.time_for(again):
                break
            self.measure(again)


def fastest(found: Iterable[Planned]) -> Planned | None:
    """The one with the shortest measured step."""
    return min((one for one in found if one.measured), key=lambda one: one.seconds, default=None)


def result(found: Sequence[Planned]) -> dict[str, Any]:
    """The last line: the automatic plan beside the best one, and how far predictions were off."""
    automatic, best = found[0], fastest(found)
    if best is None or not automatic.measured:
        return {"error": automatic.error or "nothing was measured", "candidates": len(found)}
    errors = [abs(one.predicted / seconds - 1) for one in found for seconds in one.measured]
    ratio = best.seconds / automatic.seconds
    return {
        "automatic_of_best": round(ratio, 4),
        "wanted": WANTED,
        "reached": ratio >= WANTED,
        "automatic": automatic.facts() | {"measured_s": [round(s, 4) for s in automatic.measured]},
        "best": best.facts() | {"measured_s": [round(s, 4) for s in best.measured]},
        "candidates": len(found),
        "measured": sum(bool(one.measured) for one in found),
        "failed": sum(one.error is not None for one in found),
        "prediction_error": {"median": round(statistics.median(errors), 3), "worst": round(max(errors), 3)},
        "within_10_percent": f"{sum(error <= 0.1 for error in errors)} of {len(errors)}",
    }


def table(found: Iterable[Planned]) -> Iterator[str]:
    """Markdown, the fastest first."""
    yield "| micro-batch, group | keep, offload, recompute | state, updates on card | predicted | measured | ratio |"
    yield "|---|---|---|---|---|---|"
    for one in sorted(found, key=lambda one: one.seconds if one.measured else 1e9 + one.predicted):
        it = one.facts()
        name = "**automatic** " if one.candidate == AUTOMATIC else ""
        seconds = f"{one.seconds:.4g}" if one.measured else (one.error or "–")[:60]
        ratio = f"{one.predicted / one.seconds:.3f}" if one.measured else ""
        yield (
            f"| {name}{it['micro_batch']}, {it['group']} | {it['keep']}, {it['offload']}, {it['recompute']} | "
            f"{it['state_on_device']}, {it['updates_on_device']} | {one.predicted:.4g} | {seconds} | {ratio} |"
        )


def numbers(text: str) -> list[int]:
    """A comma-separated list of whole numbers."""
    return [int(word) for word in text.split(",") if word.strip()]


def parse(words: list[str] | None = None) -> tuple[argparse.Namespace, BenchRequest]:
    """What is swept, and the request it varies. Keys are not abbreviated: bench has `--keep` and `--micro-batch`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--micro-batches", type=numbers, default=[], metavar="ROWS,…", help="default: powers of two")
    parser.add_argument("--groups", type=numbers, default=[], metavar="N,…", help="default: 1, 2, 4 and all")
    parser.add_argument("--keeps", type=numbers, default=None, metavar="N,…", help="default: no layer, half, all")
    parser.add_argument("--states", type=numbers, default=None, metavar="N,…", help="default: no unit, half, all")
    parser.add_argument("--minutes", type=float, default=9.0, help="the whole call's (default %(default)s)")
    parser.add_argument("--plan-only", action="store_true", help="predict, and measure nothing")
    parser.add_argument("--machine", default=None, metavar="NAME|FILE", help="with --plan-only: as in megatrain plan")
    given, rest = parser.parse_known_args(words)
    if given.machine and not given.plan_only:
        parser.error("--machine describes a machine that is not this one: it needs --plan-only")
    return given, bench_request(cli.build().parse_args(["bench", *rest]))


def main(words: list[str] | None = None) -> None:
    start = time.monotonic()
    try:
        given, request = parse(words)
        machine = hardware.read()
        if given.machine:
            machine = described_machine(given.machine)
        sweep = Sweep(request, machine, start + given.minutes * 60)
        automatic = sweep.automatic()
    except MegatrainError as error:
        sys.exit(f"{error}")
    layers = sum(unit["name"].startswith("layers.") for unit in automatic.plan["units"])
    tried = candidates(
        request.batch,
        layers,
        given.micro_batches or sizes(request.batch, request.seq),
        given.groups,
        spread(layers) if given.keeps is None else given.keeps,
        spread(len(automatic.plan["units"])) if given.states is None else given.states,
        request.settings["plan"],
    )
    found = ordered(sweep.all_planned(tried), automatic)
    name = machine.gpu.name if sweep.setup.device == "cuda" and machine.gpu else "cpu"
    print(
        json.dumps(
            {
                "model": request.model,
                "card": name,
                "budget": request.settings["memory"]["gpu"],
                "step_tokens": request.batch * request.seq,
                "tried": len(tried),
                "different": len(found),
                "planned_s": round(time.monotonic() - start, 1),
            }
        ),
        flush=True,
    )
    if given.plan_only:
        for one in found:
            print(json.dumps(one.facts()), flush=True)
    else:
        sweep.run(found)
        print(json.dumps({"result": request.model, **result(found)}), flush=True)
    print("\n" + "\n".join(table(found)))


if __name__ == "__main__":
    main()
