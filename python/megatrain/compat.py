"""What megatrain runs on: the table of the README in numbers, and the sentence for everything that is not on it.

What lies below the oldest of a range, or is another kind of system altogether, is refused by name: the interpreter and
the system when the package is imported, torch and transformers when a model is read. What is newer than the newest that
the tests run is not refused, since most releases change nothing here; `megatrain doctor` says that nobody tried it.

Read before anything else by whatever Python there is, so that an old one gets a sentence rather than a syntax error:
nothing here needs more than Python 3.8 to be read, and nothing but the standard library.
"""

import os
import platform
import re
import sys
from typing import NamedTuple, Tuple  # noqa: UP035 (Python 3.8 cannot subscript `tuple`)

Version = Tuple[int, ...]  # noqa: UP006


class Span(NamedTuple):
    """Releases that work, as far as we know."""

    oldest: Version
    newest: Version = ()
    """The newest that the tests run; empty where newer ones are not expected to matter."""
    below: Version = ()
    """The first that is refused; empty where none is."""


PYTHON = Span((3, 10), newest=(3, 13))
PACKAGES = {
    "torch": Span((2, 9), newest=(2, 15)),
    "transformers": Span((5, 17), newest=(5, 24), below=(6,)),
    "safetensors": Span((0, 8)),
    "numpy": Span((1, 26)),
    "PyYAML": Span((6,)),
    "rich": Span((13,)),
    "jinja2": Span((3, 1)),
}
"""What a run cannot do without. The same floors stand in pyproject.toml."""
GLIBC = (2, 34)
"""The oldest C library: no symbol that the native module needs is newer."""
MACHINE = "x86_64"


class Platform(NamedTuple):
    """The facts that decide whether the native module can be loaded."""

    python: Version
    implementation: str
    free_threaded: bool
    system: str
    machine: str
    bits: int
    glibc: Version
    """Empty where the C library is another one."""


def this_platform() -> Platform:
    """Facts about this process."""
    return Platform(
        python=tuple(sys.version_info[:3]),
        implementation=platform.python_implementation(),
        free_threaded="t" in getattr(sys, "abiflags", ""),
        system=platform.system(),
        machine=platform.machine(),
        bits=64 if sys.maxsize > 1 << 32 else 32,
        glibc=_glibc(),
    )


def refusal(facts: Platform) -> str:
    """Why megatrain does not run there, what was found and what is needed; empty where it does."""
    python = dotted(facts.python)
    if facts.implementation != "CPython":
        return f"megatrain runs on CPython; this is {facts.implementation} {python}"
    if facts.python < PYTHON.oldest:
        return f"megatrain needs Python {dotted(PYTHON.oldest)} or newer; this is {python}"
    if facts.free_threaded:
        return f"megatrain runs on CPython with its global lock; this is the free-threaded build of {python}"
    if (facts.system, facts.machine, facts.bits) != ("Linux", MACHINE, 64):
        found = f"{facts.system} on {facts.machine} with a {facts.bits}-bit Python"
        return f"megatrain runs on 64-bit Linux on x86-64; this is {found}"
    if not facts.glibc:
        return f"megatrain needs the GNU C library, {dotted(GLIBC)} or newer; this system has another one"
    if facts.glibc < GLIBC:
        return f"megatrain needs glibc {dotted(GLIBC)} or newer; this system has {dotted(facts.glibc)}"
    return ""


def check_platform() -> None:
    """Refuses an interpreter or a system that the native module is not built for, before it is loaded.

    Raises `ImportError` with the sentence of `refusal`.
    """
    reason = refusal(this_platform())
    if reason:
        raise ImportError(reason)


def package_refusal(name: str, version: str) -> str:
    """Why an installed release of a required package is refused, and how to get one that works; empty if it does."""
    span, found = PACKAGES[name], numbers(version)
    if found >= span.oldest and not (span.below and found >= span.below):
        return ""
    oldest = dotted(span.oldest)
    wanted = f"{oldest} up to, not including, {dotted(span.below)}" if span.below else f"{oldest} or newer"
    return f"{name} {version} is installed; megatrain works with {wanted}: pip install '{requirement(name)}'"


def untried(version: str, span: Span) -> str:
    """One clause where a release is newer than what the tests run; empty where it is not."""
    if not span.newest or numbers(version)[: len(span.newest)] <= span.newest:
        return ""
    return f"newer than {dotted(span.newest)}, the newest that the tests run: expected to work, not tried"


def requirement(name: str) -> str:
    """What to ask pip for."""
    span = PACKAGES[name]
    return f"{name}>={dotted(span.oldest)}" + (f",<{dotted(span.below)}" if span.below else "")


def numbers(version: str) -> Version:
    """`2.9.0+cu128` as (2, 9, 0); empty where it starts with no number."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def dotted(version: Version) -> str:
    """(2, 9) as `2.9`."""
    return ".".join(map(str, version))


def _glibc() -> Version:
    try:
        name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
    except (AttributeError, ValueError, OSError):
        return ()
    return numbers(version) if name == "glibc" else ()
