"""Machines by name for `megatrain plan --machine`: a card's memory by its data sheet, and a host that is assumed.

The card's rates are those of `calibrate`, which knows them by its name.
"""

import dataclasses
from collections.abc import Sequence

from megatrain.errors import ConfigError
from megatrain.names import nearest
from megatrain.system import descriptions
from megatrain.system.hardware import GIB, Gpu, Machine, format_bytes

# name: (the driver's name, GiB that it reports, compute capability)
_CARDS = {
    "rtx3090": ("NVIDIA GeForce RTX 3090", 23.6, (8, 6)),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 23.5, (8, 9)),
    "rtx5090": ("NVIDIA GeForce RTX 5090", 31.4, (12, 0)),
    "a6000": ("NVIDIA RTX A6000", 47.4, (8, 6)),
    "rtx6000ada": ("NVIDIA RTX 6000 Ada Generation", 47.4, (8, 9)),
    "l40s": ("NVIDIA L40S", 44.4, (8, 9)),
    "a100-40gb": ("NVIDIA A100-SXM4-40GB", 39.4, (8, 0)),
    "a100-80gb": ("NVIDIA A100-SXM4-80GB", 79.2, (8, 0)),
    "h100": ("NVIDIA H100 80GB HBM3", 79.1, (9, 0)),
    "h100-pcie": ("NVIDIA H100 PCIe", 79.1, (9, 0)),
    "h200": ("NVIDIA H200", 139.8, (9, 0)),
    "b200": ("NVIDIA B200", 178.4, (10, 0)),
}

_WORKSTATION, _SERVER = (128 * GIB, 16), (1024 * GIB, 64)
"""Hosts that are assumed: memory, processors."""
_IN_WORKSTATIONS = ("rtx", "a6000")


def names() -> list[str]:
    """The names of all presets."""
    return list(_CARDS)


def preset(name: str) -> Machine:
    """The machine of that name, however it is written (`RTX 4090`, `rtx-4090`). Raises ConfigError that names the
    nearest one."""
    known = {_plain(one): one for one in _CARDS}
    found = known.get(_plain(name))
    if found is None:
        near = nearest(_plain(name), known)
        hint = f"did you mean {known[near]}? " if near else ""
        raise ConfigError(
            f"--machine {name} is no file here and no known machine; {hint}known are {', '.join(_CARDS)}; "
            "`megatrain probe --out FILE` describes the machine that it runs on"
        )
    card, memory, capability = _CARDS[found]
    host, cpus = _WORKSTATION if found.startswith(_IN_WORKSTATIONS) else _SERVER
    return Machine(
        cpus=cpus,
        memory_total=host,
        memory_limit=host,
        memory_available=host,
        memory_source=f"the preset {found}",
        gpus=(Gpu(name=card, total_bytes=round(memory * GIB), capability=capability),),
        name=found,
        described=True,
        assumed=_assumed(host, cpus, ()),
    )


def changed(name: str, words: list[str], where: str) -> Machine:
    """The preset `name` with other numbers, as `key=value` words. Raises ConfigError, and ValueError naming the key."""
    machine = descriptions.from_words(words, preset(name), where)
    given = [word.partition("=")[0].strip() for word in words]
    return dataclasses.replace(machine, assumed=_assumed(machine.memory_available, machine.cpus, given))


def _assumed(host: int, cpus: int, given: Sequence[str]) -> str:
    """What a preset assumes beside its card, without what was `given` by its key; in words."""
    parts = {
        "host.memory": f"{format_bytes(host)} of host memory",
        "host.cpus": f"{cpus} processors",
        "rates": "the card's nominal rates",
    }
    shown = [text for key, text in parts.items() if not any(one.startswith(key) for one in given)]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum()).removeprefix("nvidia").removeprefix("geforce")
