"""What may be asked for together, and within which bounds: one rule each, for the engine's arguments and for the
configuration alike. Needs neither torch nor a card."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from megatrain.errors import ConfigError
from megatrain.units import is_count

_LAUNCHED = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""How torchrun, Open MPI and MPICH tell a process how many there are."""

MOST_FP32 = (2 - 2.0**-23) * 2.0**127
"""The largest number of fp32, in which updates are computed."""
MOST_SEED = 2**64 - 1
_SMALLEST_NORMAL = 2.0**-126
_EPS_MARGIN = 256


_SMALLEST_MEMORY = 1 << 16


def check_memory(size: int, key: str) -> None:
    """Raises ConfigError for a limit of a memory that has lost its unit."""
    if 0 < size < _SMALLEST_MEMORY:
        raise ConfigError(f"{key} is {size} bytes; write a unit, such as {size}GiB, or at least 64KiB")


def choose_precision(
    asked: str,
    device: str,  # cuda or cpu
    *,
    native_bf16: bool,  # whether the card computes in bf16 itself: compute capability 8.0 or later
    card: str,  # its name, for the message
    key: str,  # what the precision is called where it was asked for, for the message
) -> Literal["bf16", "fp32"]:
    """The precision of compute: `auto` is bf16 on CUDA and fp32 on the CPU. Raises ConfigError for another word, and
    for bf16 on a card that does not compute in it."""
    if asked not in ("auto", "bf16", "fp32"):
        raise ConfigError(f"{key} must be auto, bf16 or fp32, not {asked!r}")
    precision = asked if asked != "auto" else "bf16" if device == "cuda" else "fp32"
    if precision == "bf16" and device == "cuda" and not native_bf16:
        raise ConfigError(
            f"{key} is {asked} and {card} has no native bf16 (compute capability 8.0); write {key}: fp32, or "
            "device: cpu"
        )
    return "bf16" if precision == "bf16" else "fp32"


MATMULS = ("bf16", "fp8")
"""In what the linear layers within decoder layers may multiply."""
FLOAT8_CAPABILITY = (8, 9)
"""Compute capability of the first cards that multiply in float8."""


def check_matmul(matmul: Any, precision: str, section: str = "") -> None:
    """Raises ConfigError for another word than `MATMULS`, and for fp8 with a compute precision other than bf16, where
    that is known. `section`: what goes before the keys in the message."""
    if matmul not in MATMULS:
        raise ConfigError(f"{section}matmul must be bf16 or fp8, not {matmul!r}")
    if matmul == "fp8" and precision == "fp32":
        raise ConfigError(
            f"{section}matmul: fp8 is for bf16 compute, and here weights and activations are fp32; write "
            f"{section}precision: bf16, or leave {section}matmul out"
        )


def refuse_float8(
    capability: tuple[int, int],  # the card's compute capability
    card: str,  # its name
    section: str = "",  # what goes before the key in the message
) -> None:
    """Raises ConfigError for a card that does not multiply in float8: compute capability below 8.9."""
    if capability < FLOAT8_CAPABILITY:
        raise ConfigError(
            f"{section}matmul is fp8, and {card} (compute capability {capability[0]}.{capability[1]}) does not "
            f"multiply in float8, which begins with 8.9 (RTX 40, L40, H100); write {section}matmul: bf16, or leave it "
            "out"
        )


FRAGMENTS = ("auto", "whole", "halves", "experts")
"""Whether layers are units, or halves of them."""

KEPT_TENSORS = ("auto", "least", "usual")
"""What compiled layers keep for backward."""

SENT_EXPERTS = ("auto", "all", "routed")
"""Which experts of a group are sent to the device."""

_LEAST = {
    "micro_batch": 1,
    "slots": 1,
    "slabs": 1,
    "group": 1,
    "large_group": 1,
    "large_keep": 0,
    "keep": 0,
    "offload": 0,
    "state_on_device": 0,
    "updates_on_device": 0,
    "state_on_disk": 0,
    "weights_on_disk": 0,
    "inputs_on_disk": 0,
    "stage_buffers": 2,  # one is filled while another is emptied
    "parts": 1,
    "loss_chunk": 1,
    "threads": 1,
    "mlp_tiles": 1,
    "expert_groups": 2,
}
"""What the numbers of a plan must be at least."""
_MOST = {"threads": 4096}
"""What some may be at most; the others 2³¹ - 1."""
_SWITCHES = ("accumulate", "compile", "graphs", "huge_pages", "poison", "synchronous", "trace")
_WORDS = {
    "activation": ("keep", "offload", "recompute"),
    "inputs": ("device", "host", "disk"),
    "isa": ("auto", "scalar", "avx2", "avx512"),
}
_MAY_BE_AUTO = ("mlp_tiles", "expert_groups", "state_on_device", "updates_on_device")


def check_plan(plan: Mapping[str, Any]) -> None:
    """Raises ConfigError for a number of a plan that no model can be planned with, and for numbers that contradict each
    other whatever the model."""
    for name, least in _LEAST.items():
        value, most = plan.get(name), _MOST.get(name, 2**31 - 1)
        may_be_auto = name in _MAY_BE_AUTO
        if value is None or (may_be_auto and value == "auto"):
            continue
        if not is_count(value, least):
            whole = isinstance(value, int) and not isinstance(value, bool)
            wanted = f"at least {least}" if whole else f"a whole number of at least {least}"
            raise ConfigError(f"plan.{name} is {value!r}; it must be {'auto or ' * may_be_auto}{wanted}")
        if value > most:
            raise ConfigError(f"plan.{name} is {value}; it must be at most {most}")
    for name in _SWITCHES:
        if not isinstance(plan.get(name), bool | None):
            raise ConfigError(f"plan.{name} is {plan[name]!r}; it must be true or false, and no text")
    for name, words in _WORDS.items():
        if plan.get(name) is not None and plan[name] not in words:
            raise ConfigError(f"plan.{name} must be {', '.join(words[:-1])} or {words[-1]}, not {plan[name]!r}")
    fragments, tiles = plan.get("fragments") or "auto", plan.get("mlp_tiles")
    if fragments not in FRAGMENTS:
        raise ConfigError(f"plan.fragments must be auto, whole, halves or experts, not {fragments!r}")
    kept = plan.get("kept_tensors") or "auto"
    if kept not in KEPT_TENSORS:
        raise ConfigError(f"plan.kept_tensors must be auto, least or usual, not {kept!r}")
    sent = plan.get("sent_experts") or "auto"
    if sent not in SENT_EXPERTS:
        raise ConfigError(f"plan.sent_experts must be auto, all or routed, not {sent!r}")
    if sent != "auto" and fragments != "experts" and plan.get("expert_groups") in (None, "auto"):
        raise ConfigError(
            f"plan.sent_experts is {sent}, which is about experts in groups, and plan.fragments is {fragments}; write "
            "plan.fragments: experts, or leave it out"
        )
    if fragments in ("whole", "experts") and tiles not in (None, "auto", 1):
        raise ConfigError(
            f"plan.mlp_tiles is {tiles}, which tiles the MLP halves of layers, and plan.fragments is {fragments}; "
            "leave one of them out"
        )
    groups = plan.get("expert_groups")
    if groups not in (None, "auto") and (fragments in ("whole", "halves") or tiles not in (None, "auto", 1)):
        other = f"fragments is {fragments}" if fragments in ("whole", "halves") else f"mlp_tiles is {tiles}"
        raise ConfigError(
            f"plan.expert_groups is {groups}, which spreads the experts of a layer over so many units, and "
            f"plan.{other}; leave one of them out"
        )
    for name, other in (("group", "large_group"), ("large_keep", "keep")):
        value, limit = plan.get(name), plan.get(other)
        if value is not None and limit is not None and value > limit:
            raise ConfigError(f"plan.{name} is {value}, and plan.{other} is {limit}, which must be at least as many")
    if plan.get("keep") and plan.get("activation") == "recompute":
        raise ConfigError(
            f"plan.keep is {plan['keep']}, which keeps activations, and plan.activation is recompute, which keeps "
            "none; leave one of them out"
        )
    if plan.get("offload") and plan.get("activation"):
        raise ConfigError(
            f"plan.offload is {plan['offload']}, and plan.activation is {plan['activation']}, which is about all "
            "units; leave one of them out"
        )


def refuse_slabs(slabs: int | None, update: str, section: str = "") -> None:
    """Raises ConfigError for a number of slabs with just-in-time updates. `section`: what goes before `update` in the
    message."""
    if slabs is not None and update == "just_in_time":
        raise ConfigError(
            f"plan.slabs is {slabs}, and with {section}update: just_in_time every gradient waits in a slab of its own; "
            f"leave it out, or write {section}update: immediate"
        )


def refuse_clipped_immediate(update: str, max_grad_norm: float | None, section: str = "") -> None:
    """Raises ConfigError for immediate updates with clipping. `section`: what goes before the keys in the message."""
    if update == "immediate" and max_grad_norm is not None:
        raise ConfigError(
            f"{section}update: immediate cannot clip, since it changes weights before the gradient norm is known, and "
            f"{section}max_grad_norm is {max_grad_norm} (1.0 is its default); set max_grad_norm to null (None), or "
            "update to just_in_time"
        )


def refuse_unrepeatable(update: str, device: str, deterministic: bool, key: str, section: str = "") -> None:
    """Raises ConfigError where a step's gradients cannot be computed twice and compared bit for bit. `key`: what asks
    for that, `section`: what goes before the other keys in the message."""
    if update == "immediate":
        raise ConfigError(
            f"{key} compares a step's gradients before they change any weight, and with {section}update: immediate "
            f"they do as they arrive; write {section}update: just_in_time, or leave it out"
        )
    if device == "cuda" and not deterministic:
        raise ConfigError(
            f"{key} compares a step's gradients bit for bit, and on a card they are the same in every pass only with "
            f"{section}deterministic: true; set it, or leave {key} out"
        )


def refuse_processes() -> None:
    """Raises ConfigError where a launcher has started more than one process."""
    for name in _LAUNCHED:
        count = os.environ.get(name, "")
        if count not in ("", "1"):
            raise ConfigError(f"{name} is {count}: more than one process is not supported yet; start a single one")


def refuse_beyond_fp32(value: float, key: str) -> None:
    """Raises ConfigError for a setting of AdamW that its arithmetic would make infinite."""
    if value > MOST_FP32:
        raise ConfigError(f"{key} is {value:g}; updates are computed in fp32, whose largest number is {MOST_FP32:.3g}")


def smallest_eps(beta2: float) -> float:
    """The smallest `eps` with which AdamW's update is that of torch.optim.AdamW for every gradient.

    A second moment below the smallest normal fp32 number is stored as 0 (subnormal numbers make the optimizer several
    times slower), so that the update of an element whose gradients stay below x = sqrt(2^-126 / (1 - beta2)) is
    lr·m/eps instead of lr·m/(sqrt(v) + eps). The difference is at most (x / eps)^2 of lr: below 2e-5 from 256 x on,
    where with eps = 0 it would be infinite. 8.8e-16 for torch's default beta2 of 0.999.
    """
    return _EPS_MARGIN * math.sqrt(_SMALLEST_NORMAL / (1.0 - beta2))


def check_eps(eps: float, betas: Sequence[Any], key: str) -> None:
    """Raises ConfigError for an `eps` below `smallest_eps`."""
    least = smallest_eps(float(betas[1]))
    if eps < least:
        raise ConfigError(
            f"{key} is {eps:g}; with betas[1] {betas[1]:g} it must be at least {least:.2g}, since second moments below "
            "1.2e-38 are stored as 0 and a smaller eps would divide by almost 0. torch's default is 1e-8"
        )


def check_draws(max_new_tokens: int, temperature: float, top_p: float) -> None:
    """Refuses numbers with which no text can be drawn from a model. Raises ConfigError."""
    if max_new_tokens < 1 or not 0 <= temperature < math.inf or not 0 < top_p <= 1:
        raise ConfigError(
            f"max_new_tokens must be at least 1, temperature not negative and top_p in (0, 1], not {max_new_tokens}, "
            f"{temperature} and {top_p}"
        )
