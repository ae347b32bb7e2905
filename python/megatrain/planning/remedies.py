"""The refusal of a plan that does not fit: its sum, where the budgets come from, and changes that would fit."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from megatrain.config import Config
from megatrain.errors import ConfigError, DoesNotFit
from megatrain.system.hardware import Machine, format_bytes

_MOST_SHOWN = 3
"""Changes that are named."""
_SHORTEST = 256
"""Tokens of the shortest sequences that are suggested."""


def changes_that_fit(config: Config, rows: int, fits: Callable[[Config], bool]) -> list[str]:
    """Up to three changes of settings with which a plan fits, as `section.key=value` words for the command line; of
    each kind the smallest change. `rows`: sequences of a step. `fits`: whether a configuration can be planned."""
    found: dict[str, str] = {}
    for words, sections in _changes(config, rows):
        kind = words.partition("=")[0]
        if kind in found:
            continue
        try:
            changed = dataclasses.replace(config, **sections)
        except ConfigError:  # contradicts another setting
            continue
        if fits(changed):
            found[kind] = words
            if len(found) == _MOST_SHOWN:
                break
    return list(found.values())


def _changes(config: Config, rows: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Words for the command line and the sections they change; those that cost a run least come first."""
    plan, data, train = config.plan, config.data, config.train
    for field in dataclasses.fields(plan):
        # Numbers that were asked for and could be derived.
        if field.default is None and field.name != "micro_batch" and getattr(plan, field.name) is not None:
            changed: dict[str, Any] = {field.name: None}
            yield f"plan.{field.name}=null", {"plan": dataclasses.replace(plan, **changed)}
    # A step of one micro-batch needs no fp32 sums of gradients on the device; small ones need the least activations.
    # Where the size is derived, it follows from the idle card, so that smaller ones may fit beside what others hold.
    for size in [rows, *(rows >> shift for shift in range(1, rows.bit_length()))]:
        if size != plan.micro_batch:
            yield f"plan.micro_batch={size}", {"plan": dataclasses.replace(plan, micro_batch=size)}
    length = data.seq_len // 2
    while length >= _SHORTEST:
        batch = train.batch_size and train.batch_size * data.seq_len // length  # a step keeps its tokens
        sections = {"data": dataclasses.replace(data, seq_len=length)}
        yield f"data.seq_len={length}", sections | {"train": dataclasses.replace(train, batch_size=batch)}
        length //= 2
    if train.update != "immediate":
        immediate = dataclasses.replace(train, update="immediate", max_grad_norm=None)
        yield "train.update=immediate train.max_grad_norm=null", {"train": immediate}
    for shift in range(1, rows.bit_length()):
        if train.batch_size is not None:
            size = train.batch_size >> shift
            yield f"train.batch_size={size}", {"train": dataclasses.replace(train, batch_size=size)}
        else:
            tokens = (rows >> shift) * data.seq_len
            yield f"train.batch_tokens={tokens}", {"train": dataclasses.replace(train, batch_tokens=tokens)}


def explained(
    error: DoesNotFit,
    config: Config,
    device: str,
    machine: Machine,
    budget: dict[str, int],
    changes: list[str],
    spilled: int | None = None,  # bytes of optimizer state on a disk with which it would fit as it is
) -> DoesNotFit:
    """The refusal with its whole sum, what is missing, where the budgets come from, and `changes` that would fit."""
    names = {
        "device": "device memory" if device == "cuda" else "memory that stands in for a device's",
        "host": "host memory",
        "disk": "disk space for optimizer state",
    }
    sums = {tier: sum(item["bytes"] for item in error.items if item["tier"] == tier) for tier in names}
    allowed = {"disk": 0} | budget
    over = [
        _missing(needed, allowed[tier], names[tier]) for tier, needed in sums.items() if needed > allowed[tier]
    ] or [
        _missing(sums["device"] + sums["host"], budget["host"], "host memory")
    ]  # of the CPU, where both tiers share it
    lines = [f"  {format_bytes(item['bytes']):>12}  {item['tier']:<6}  {item['what']}" for item in error.items]
    lines += [f"  {format_bytes(needed):>12}  {tier:<6}  in all" for tier, needed in sums.items() if needed]
    explained = DoesNotFit(
        "\n".join(
            [
                f"this does not fit: {'; '.join(over)}",
                *lines,
                *_limits(config, device, machine, budget),
                *_advice(changes),
                *_disk_advice(spilled),
            ]
        )
    )
    explained.items = error.items
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
    if config.memory.gpu != "auto":
        yield f"device memory: {format_bytes(budget['device'])} (memory.gpu)"
    elif device == "cuda" and machine.gpu is not None:
        gpu = machine.gpu
        yield f"device memory: {format_bytes(budget['device'])} of {format_bytes(gpu.total_bytes)} of {gpu.name}"
        if gpu.held_bytes:
            yield f"  {format_bytes(gpu.held_bytes):>12}  device  held by other programs and other tensors"


def _disk_advice(spilled: int | None) -> Iterator[str]:
    if spilled:
        yield (
            f"Or name a folder on a fast disk as memory.nvme.path: {format_bytes(spilled)} of optimizer state would be "
            "kept there, read once and written once per step"
        )


def _advice(changes: list[str]) -> Iterator[str]:
    if changes:
        yield "Each of these changes alone would fit:"
        yield from (f"  {words}" for words in changes)
    else:
        yield (
            "No shorter sequence and no smaller batch would fit. Use a smaller model, freeze parameters, or give "
            "more memory"
        )
