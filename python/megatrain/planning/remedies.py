"""The refusal of a plan that does not fit: its sum, where the budgets come from, and ways that would fit."""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, cast

from megatrain.config import Config, NvmeConfig
from megatrain.errors import ConfigError, DoesNotFit
from megatrain.system.hardware import GIB, Machine, format_bytes

_MOST_SHOWN = 3
"""Ways that are named."""
_SHORTEST = 256
"""Tokens of the shortest sequences that are suggested."""
_IMMEDIATE = "train.update=immediate train.max_grad_norm=null"
_FOLDER = "DIR"
"""Stands for a folder on a fast disk."""

# What one can buy: host memory and cards in GiB, a drive in 10⁹ bytes.
_HOSTS = tuple(size << shift for shift in range(8) for size in (32, 48, 64)[: 3 if shift == 7 else 2])
_CARDS = (8, 12, 16, 24, 32, 48, 80, 96, 141, 180)
_DRIVES = (500, 1000, 2000, 4000, 8000, 16000)
_MOST_LARGER = 4
"""Memory that is more times as large belongs to another kind of machine, and is not suggested."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to make a run fit that was refused."""

    settings: str = ""
    """`section.key=value` words for the command line; empty where only the machine changes."""
    machine: str = ""
    """`key=value` words for `--machine`; empty where the machine stays."""
    spilled: int = 0
    """Bytes that are then on a disk."""
    stored: tuple[str, ...] = ("optimizer state",)
    """What they are: optimizer state, weights, layer inputs."""
    moved: tuple[int, int] | None = None
    """Bytes that a step reads and writes there, where that is not only optimizer state."""

    def __str__(self) -> str:
        words = self.settings
        if self.machine:
            words = f"{words} with {self.machine}".strip().replace(",", " and ")
        if not self.spilled:
            return words
        disk = f"{_FOLDER} on a fast disk: " if _FOLDER in words else ""
        what, traffic = _listed(self.stored), "read and written once per step"
        if self.moved is not None:
            read, written = map(format_bytes, self.moved)
            traffic = f"{read} read and {written} written per step"
        return f"{words}  ({disk}{format_bytes(self.spilled)} of {what}, {traffic})"


@dataclasses.dataclass(frozen=True, slots=True)
class _Tried:
    """A changed request: kinds of change in the order of their cost, and what they make of it."""

    kinds: frozenset[str]
    words: tuple[str, ...]
    config: Config
    machine: Machine
    hardware: tuple[str, ...] = ()


class Refusal(DoesNotFit):
    """A plan that does not fit, with ways that would."""

    ways: tuple[Way, ...] = ()


Fits = Callable[[Config, Machine], bool]
"""Whether these settings can be planned on this machine."""
_Wanted = Callable[[frozenset[str]], bool]
"""Whether a way of these kinds of change would be new: none contains a cheaper one that was found."""


def ways_that_fit(
    config: Config,
    machine: Machine,
    rows: int,  # sequences of a step
    fits: Fits,
    planned: Callable[[Config, Machine], dict[str, Any] | None],  # the plan itself; None where there is none
) -> list[Way]:
    """Up to three ways in which a run fits, the cheapest first: settings that leave results and time as they are, then
    the disk that is there, then what changes training (clipping, tokens of a step, length), two or three of these
    together, and last other hardware. Each was planned; none contains a cheaper one."""
    start = _Tried(frozenset(), (), config, machine)
    found: list[Way] = []
    kinds: list[frozenset[str]] = []
    search = _Search(rows, _remembered(fits), lambda new: not any(cheaper <= new for cheaper in kinds))
    for tried in itertools.chain(_settings(start, search), _hardware(start, search)):
        if not search.wanted(tried.kinds) or not search.fits(tried.config, tried.machine):
            continue
        plan = planned(tried.config, tried.machine)
        if plan is not None:
            kinds.append(tried.kinds)
            words, hardware, spilled = " ".join(tried.words), ",".join(tried.hardware), int(plan["totals"]["disk"])
            way = Way(settings=words, machine=hardware, spilled=spilled)
            if spilled:
                way = dataclasses.replace(way, stored=_stored(plan), moved=_moved(plan))
            found.append(way)
            if len(found) == _MOST_SHOWN:
                break
    return found


def _listed(words: tuple[str, ...]) -> str:
    """The words as a sentence lists them."""
    return " and ".join([*([", ".join(words[:-1])] if words[1:] else []), *words[-1:]])


def _stored(plan: dict[str, Any]) -> tuple[str, ...]:
    """What a plan has on disk, in words."""
    units = plan["units"]
    stored = {
        "optimizer state": any(unit["state"] == "disk" for unit in units),
        "weights": any(unit.get("weights_on_disk", False) for unit in units),
        "layer inputs": any(unit["input"] == "disk" for unit in units),
    }
    return tuple(what for what, there in stored.items() if there)


def _moved(plan: dict[str, Any]) -> tuple[int, int] | None:
    """Bytes that a step reads from disk and writes there, where that is not only optimizer state."""
    if _stored(plan) in ((), ("optimizer state",)):
        return None
    return int(plan["estimate"]["disk_read"]), int(plan["estimate"]["disk_written"])


@dataclasses.dataclass(frozen=True, slots=True)
class _Search:
    """What every part of the search asks."""

    rows: int
    fits: Fits
    wanted: _Wanted


def _remembered(fits: Fits) -> Fits:
    """The same, asked once for equal requests."""
    answers: list[tuple[Config, Machine, bool]] = []

    def remembered(config: Config, machine: Machine) -> bool:
        for asked, where, answer in answers:
            if (asked, where) == (config, machine):
                return answer
        answers.append((config, machine, fits(config, machine)))
        return answers[-1][2]

    return remembered


def _settings(start: _Tried, search: _Search) -> Iterator[_Tried]:
    """Changes of settings, by their cost."""
    yield from _free(start, search)
    modes = list(_modes(start))
    yield from (mode for mode in modes if len(mode.kinds) == 1)
    for mode in [start, *modes]:
        if len(mode.kinds) > 1:
            yield mode
        if search.wanted(mode.kinds):
            yield from _smaller(mode, search)


def _free(start: _Tried, search: _Search) -> Iterator[_Tried]:
    """What costs neither time nor training: numbers that were asked for and could be derived, and the split."""
    plan = start.config.plan
    asked = {
        field.name: field.default
        for field in dataclasses.fields(plan)
        if field.default in (None, "auto")
        and field.name != "micro_batch"
        and getattr(plan, field.name) != field.default
    }
    for changes in [*({key: value} for key, value in asked.items()), *([asked] if len(asked) > 1 else [])]:
        words = [f"plan.{key}={'null' if value is None else value}" for key, value in changes.items()]
        yield from _changed(start, "plan", words, plan=dataclasses.replace(plan, **cast("Any", changes)))
    # A step of one micro-batch needs no fp32 sums of layers' gradients on the device; small ones need the least
    # activations.
    # Where the size is derived, it follows from the idle card, so that smaller ones may fit beside what others hold.
    split = []
    for size in (search.rows >> shift for shift in range(search.rows.bit_length())):
        if size != plan.micro_batch:
            smaller = dataclasses.replace(plan, micro_batch=size)
            split += _changed(start, "micro_batch", [f"plan.micro_batch={size}"], plan=smaller)
    yield from split[:1]
    if split[1:] and search.fits(split[-1].config, split[-1].machine):
        yield from split[1:]


def _modes(start: _Tried) -> Iterator[_Tried]:
    """State on the disk that is there, smaller states, immediate updates, and combinations of these."""
    config, machine = start.config, start.machine
    disks = [start]
    if config.memory.nvme is None and not machine.state_drives and (machine.disk_free or not machine.described):
        # Of this machine no folder is known yet: the way says how much is needed there.
        disk = NvmeConfig(path=_FOLDER, size=None if machine.described else 1 << 50)
        memory = dataclasses.replace(config.memory, nvme=disk)
        disks += _changed(start, "disk", [f"memory.nvme.path={_FOLDER}"], memory=memory)
    for one in disks:
        if one is not start:
            yield one
        smaller = _smaller_states(one)
        yield from smaller
        for other in [one, *smaller]:
            if config.train.update != "immediate":
                immediate = dataclasses.replace(other.config.train, update="immediate", max_grad_norm=None)
                yield from _changed(other, "immediate", [_IMMEDIATE], train=immediate)


def _smaller_states(start: _Tried) -> list[_Tried]:
    """8-bit moments, and a 24-bit master where compute is in bf16; nothing where both were asked for."""
    train = start.config.train
    on_card = start.machine.gpu is not None and start.config.device != "cpu"
    asked = {"moments": "8bit"}
    if train.precision == "bf16" or (train.precision == "auto" and on_card):
        asked["master"] = "24bit"
    words = [f"train.{key}={value}" for key, value in asked.items() if getattr(train, key) != value]
    if not words:
        return []
    return _changed(start, "states", words, train=dataclasses.replace(train, **cast("dict[str, Any]", asked)))


def _smaller(start: _Tried, search: _Search) -> Iterator[_Tried]:
    """The largest number of tokens of a step, and the longest sequences, that fit; none where the smallest do not."""
    data, train, rows = start.config.data, start.config.train, search.rows
    fewer = []
    for shift in range(1, rows.bit_length()):
        if train.batch_size is not None:
            size = train.batch_size >> shift
            fewer += _changed(
                start, "batch", [f"train.batch_size={size}"], train=dataclasses.replace(train, batch_size=size)
            )
        else:
            tokens = (rows >> shift) * data.seq_len
            smaller = dataclasses.replace(train, batch_tokens=tokens)
            fewer += _changed(start, "batch", [f"train.batch_tokens={tokens}"], train=smaller)
    short_rows = _lengths(start, rows, one=True) if rows > 1 else []
    for sizes in (fewer, _lengths(start, rows), short_rows):
        if not sizes or not search.wanted(sizes[-1].kinds) or not search.fits(sizes[-1].config, sizes[-1].machine):
            continue
        yield sizes[_first_that_fits(sizes, search)]
        if sizes is fewer:
            short_rows.clear()


def _lengths(start: _Tried, rows: int, *, one: bool = False) -> list[_Tried]:
    """Shorter sequences, the longest first; a step keeps its tokens or, with `one` or where it has one row, is one of
    them."""
    data, train, shorter = start.config.data, start.config.train, []
    length = data.seq_len // 2
    while length >= _SHORTEST:
        words = [f"data.seq_len={length}"]
        changes: dict[str, Any] = {}
        if one and train.batch_size is not None:
            words, changes["batch_size"] = [*words, "train.batch_size=1"], 1
        elif (one or rows == 1) and train.batch_tokens is not None:
            words, changes["batch_tokens"] = [*words, f"train.batch_tokens={length}"], length
        elif train.batch_size is not None and rows > 1:
            changes["batch_size"] = train.batch_size * data.seq_len // length
            words.append(f"train.batch_size={changes['batch_size']}")
        sections = {"data": dataclasses.replace(data, seq_len=length), "train": dataclasses.replace(train, **changes)}
        found = _changed(start, "length", words, **sections)
        shorter += [dataclasses.replace(tried, kinds=tried.kinds | {"batch"}) for tried in found] if one else found
        length //= 2
    return shorter


def _hardware(start: _Tried, search: _Search) -> Iterator[_Tried]:
    """The smallest drive, host memory and card with which a run fits as it is, or else with cheap settings."""
    machine = start.machine
    kinds: dict[str, list[tuple[str, Machine]]] = {}
    if start.config.memory.nvme is None and not machine.state_drives and machine.described and not machine.disk_free:
        kinds["disk"] = [
            (f"disk.count=1,disk.free={size}GB", dataclasses.replace(machine, state_drives=1, disk_free=size * 10**9))
            for size in _DRIVES
        ]
    if start.config.memory.host == "auto":
        kinds["host"] = [
            (f"host.memory={size}GiB", _with_host(machine, size * GIB))
            for size in _HOSTS
            if machine.memory_limit < size * GIB <= _MOST_LARGER * machine.memory_limit
        ]
    if start.config.memory.gpu == "auto" and machine.gpu is not None:
        kinds["card"] = [
            (f"gpu.memory={size}GiB", _with_card(machine, size * GIB))
            for size in _CARDS
            if machine.gpu.total_bytes < 0.97 * size * GIB <= _MOST_LARGER * machine.gpu.total_bytes
        ]
    left = dict(kinds)
    for mode in (start, *_modes(start)):
        for kind, sizes in list(left.items()):
            sized = _least(mode, kind, sizes, search) if search.wanted(mode.kinds | {kind}) else None
            if sized is not None:
                del left[kind]
                yield sized


def _least(mode: _Tried, kind: str, sizes: list[tuple[str, Machine]], search: _Search) -> _Tried | None:
    """The smallest of these machines on which `mode` fits, with fewer tokens in a step where it must; None where it
    does not fit on the largest."""
    if not sizes:
        return None
    words, machine = sizes[-1]
    largest = dataclasses.replace(mode, kinds=mode.kinds | {kind}, machine=machine, hardware=(words,))
    for chosen in itertools.chain([largest], _smaller(largest, search)):
        if not search.fits(chosen.config, chosen.machine):
            continue
        on = [dataclasses.replace(chosen, machine=machine, hardware=(words,)) for words, machine in sizes]
        return on[_first_that_fits(on, search)]
    return None


def _first_that_fits(tried: list[_Tried], search: _Search) -> int:
    """The index of the first that fits, of ever more room or ever less to fit into it, of which the last one fits."""
    return bisect.bisect_left(tried, True, hi=len(tried) - 1, key=lambda one: search.fits(one.config, one.machine))


def _with_host(machine: Machine, size: int) -> Machine:
    total = max(size, machine.memory_total)
    return dataclasses.replace(machine, memory_total=total, memory_limit=size, memory_available=size)


def _with_card(machine: Machine, size: int) -> Machine:
    cards = tuple(dataclasses.replace(gpu, total_bytes=size) for gpu in machine.gpus)
    return dataclasses.replace(machine, gpus=cards)


def _changed(start: _Tried, kind: str, words: list[str], **sections: Any) -> list[_Tried]:
    """`start` with these sections; nothing where they contradict another setting."""
    try:
        config = dataclasses.replace(start.config, **sections)
    except ConfigError:
        return []
    return [dataclasses.replace(start, kinds=start.kinds | {kind}, words=(*start.words, *words), config=config)]


def exceeds_by_state(error: DoesNotFit, budget: dict[str, int]) -> bool:
    """Whether the sum of a refusal exceeds the card by optimizer state, which could as well be on the host. Of such a
    sum nobody learns how much host memory is missing."""
    device = [item for item in error.items if item["tier"] == "device"]
    state = sum(item["bytes"] for item in device if "optimizer state" in item["what"])
    return bool(state > 0 and sum(item["bytes"] for item in device) > budget["device"])


def explained(
    error: DoesNotFit,
    config: Config,
    device: str,
    machine: Machine,
    budget: dict[str, int],
    ways: list[Way],
) -> Refusal:
    """The refusal with its whole sum, what is missing, where the budgets come from, and `ways` that would fit."""
    names = {
        "device": "device memory" if device == "cuda" else "memory that stands in for a device's",
        "host": "host memory",
        "disk": "disk space for optimizer state and weights",
    }
    sums = {tier: sum(item["bytes"] for item in error.items if item["tier"] == tier) for tier in names}
    allowed = {"disk": 0} | budget
    short = [tier for tier, needed in sums.items() if needed > allowed[tier]]
    if device == "cpu" and budget["device"] == budget["host"]:  # one memory, of which each may have all
        short = [tier for tier in short if tier == "disk"]
    over = [_missing(sums[tier], allowed[tier], names[tier]) for tier in short]
    both = sums["device"] + sums["host"]
    if device == "cpu" and both > budget["host"] and not {"device", "host"} & set(short):
        over.insert(0, _missing(both, budget["host"], "host memory"))
    lines = [f"  {format_bytes(item['bytes']):>12}  {item['tier']:<6}  {item['what']}" for item in error.items]
    lines += [f"  {format_bytes(needed):>12}  {tier:<6}  in all" for tier, needed in sums.items() if needed]
    explained = Refusal(
        "\n".join(
            [
                f"this does not fit: {'; '.join(over)}",
                *lines,
                *_limits(config, device, machine, budget),
                *_advice(ways),
            ]
        )
    )
    explained.items = error.items
    explained.ways = tuple(ways)
    return explained


def _missing(needed: int, allowed: int, memory: str) -> str:
    short = format_bytes(max(0, needed - allowed))
    return f"{format_bytes(needed)} of {memory} are needed and {format_bytes(allowed)} allowed, {short} too little"


def _limits(config: Config, device: str, machine: Machine, budget: dict[str, int]) -> Iterator[str]:
    """Where each budget comes from."""
    if config.memory.host == "auto":
        yield (
            f"host memory: {format_bytes(budget['host'])} of {format_bytes(machine.memory_available)} available "
            f"({machine.memory_source}, limit {format_bytes(machine.memory_limit)})"
        )
    else:
        yield f"host memory: {format_bytes(budget['host'])} (memory.host)"
    if machine.host_reserved:
        yield machine.reservation
    if device == "cpu" and config.device == "auto" and not machine.described:
        yield "no card is usable here, so the CPU is planned for; for a card that you do not have: --machine rtx4090"
    if config.memory.gpu != "auto":
        yield f"device memory: {format_bytes(budget['device'])} (memory.gpu)"
    elif device == "cuda" and machine.gpu is not None:
        gpu = machine.gpu
        yield f"device memory: {format_bytes(budget['device'])} of {format_bytes(gpu.total_bytes)} of {gpu.name}"
        if gpu.held_bytes:
            yield f"  {format_bytes(gpu.held_bytes):>12}  device  held by other programs and other tensors"


def _advice(ways: list[Way]) -> Iterator[str]:
    if ways:
        yield "Each of these lines alone would fit:"
        yield from (f"  {way}" for way in ways)
    else:
        yield (
            "No shorter sequence and no smaller batch would fit. Use a smaller model, freeze parameters, or give "
            "more memory"
        )
