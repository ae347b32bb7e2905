"""How a model is cut into units: whole layers, or halves of them, whose MLPs may be computed in tiles of tokens, or
have their experts spread over several units."""

import bisect
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from megatrain import _core
from megatrain.engine import expert_groups
from megatrain.errors import ConfigError, DoesNotFit
from megatrain.models.decoder import Decoder
from megatrain.models.expert_groups import Experts

Request = dict[str, Any]
"""What the core's planner is asked (`profile.plan_request`)."""

_LEAST_TILE = 1024
"""Tokens of a tile at least, where the number of tiles is not asked for: matmuls of fewer are slower."""
_EVEN = f"as many experts each, whose weights are multiples of {expert_groups.NORM_BLOCK:,} numbers"
"""What groups of experts are."""
_MOST_GROUPS = 1024
"""Units that groups of experts are at most, in all layers together, where their number is not asked for: of more, a
plan takes minutes."""
_MOST_ROUTED = 0.5
"""Only the experts that tokens are routed to are sent where a micro-batch is expected to need no larger share of them:
others are copied while what precedes them is computed."""
_MOST_WORK = 0.25
"""The share of a card's memory that torch may allocate at one time for the layer that runs before tiles are preferred,
which then leave twice as much room. How much it allocates is known to about a tenth; of more than this, a tenth is more
than plans leave free."""


_ASIDE = (
    "keep",
    "large_keep",
    "activation",
    "offload",
    "inputs",
    "inputs_on_disk",
    "state_on_device",
    "updates_on_device",
    "state_on_disk",
    "weights_on_disk",
)
"""What, if it is asked for, may leave something to the host."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """A model cut into units, and in how many tiles of tokens the MLP halves among them are computed."""

    decoder: Decoder
    tiles: int = 1
    sent: Literal["all", "routed"] = "all"
    """Which experts of a group are sent to the device: see `plan.sent_experts`."""
    keeps: Literal["auto", "least", "usual"] = "auto"
    """What compiled layers keep for backward: see `plan.kept_tensors`. auto until it is known what fits."""

    @property
    def least(self) -> bool:
        """Whether compiled layers keep as little as they can."""
        return self.keeps != "usual"

    @property
    def fragments(self) -> Literal["whole", "halves", "experts"]:
        """What units are: layers, or halves of those that can be split, or groups of experts too."""
        if self.expert_groups > 1:
            return "experts"
        return "halves" if any(unit.half is not None for unit in self.decoder.units) else "whole"

    @property
    def expert_groups(self) -> int:
        """Over how many units the experts of a layer are spread."""
        layers = [unit.layer for unit in self.decoder.units if unit.experts is not None]
        return layers.count(layers[0]) if layers else 1

    @property
    def options(self) -> dict[str, Any]:
        """What `plan` of an engine must ask for to get this cut."""
        kept = {} if self.keeps == "auto" else {"kept_tensors": self.keeps}
        if self.fragments == "experts":
            return {"fragments": "experts", "expert_groups": self.expert_groups, "sent_experts": self.sent, **kept}
        if self.fragments == "halves":
            return {"fragments": "halves", "mlp_tiles": self.tiles, **kept}
        return {"fragments": "whole", **kept}

    @property
    def tiled(self) -> dict[int, int]:
        """By unit that is computed in tiles: how many."""
        if self.tiles == 1:
            return {}
        units = enumerate(self.decoder.units)
        return {number: self.tiles for number, unit in units if self.decoder.is_tiled(unit)}


def cuts(decoder: Decoder, requests: Mapping[str, Any], tokens: int) -> list[Cut]:
    """The ways of cutting a model that are planned with, the fastest first: what `fragments`, `mlp_tiles` and
    `expert_groups` ask for, else whole layers, then halves where there are any, then more and more tiles of a
    micro-batch of `tokens`, then more and more groups of experts. Raises ConfigError for halves, tiles or groups of
    layers that have none; `constraints.check_plan` has refused everything else."""
    fragments: Any = requests.get("fragments") or "auto"
    groups: Any = requests.get("expert_groups") or "auto"
    tiles: Any = requests.get("mlp_tiles") or "auto"
    several = tiles not in ("auto", 1)
    keeps: Any = requests.get("kept_tensors") or "auto"
    halves = decoder.halves
    if halves is decoder:
        if fragments in ("halves", "experts") or several or groups != "auto":
            key = f"mlp_tiles is {tiles}" if several else f"expert_groups is {groups}"
            key = f"fragments is {fragments}" if fragments in ("halves", "experts") else key
            raise ConfigError(
                f"plan.{key}, but no layer of {type(decoder.model).__name__} can be split: "
                f"{'; '.join(_reasons(decoder.splits))}. Leave it out"
            )
        return [Cut(decoder, keeps=keeps)]
    if several and not any(map(halves.is_tiled, halves.units)):
        raise ConfigError(
            f"plan.mlp_tiles is {tiles}, but no MLP of {type(decoder.model).__name__} can be tiled: "
            f"{'; '.join(_reasons(decoder.untiled.values()))}. Leave it out"
        )
    if several:
        return [Cut(halves, tiles, keeps=keeps)]
    if fragments == "whole":
        return [Cut(decoder, keeps=keeps)]
    spread = [] if fragments == "halves" else _expert_groups(halves, groups, asked=fragments == "experts")
    sent: Any = requests.get("sent_experts") or "auto"
    experts = [Cut(cut, sent=_sent(cut, tokens) if sent == "auto" else sent, keeps=keeps) for cut in spread]
    if fragments == "experts" or groups != "auto":
        return experts
    counts = [2**power for power in range(1, tokens.bit_length()) if tiles == "auto" and tokens >> power >= _LEAST_TILE]
    return [
        *([Cut(decoder, keeps=keeps)] if fragments == "auto" else []),
        Cut(halves, keeps=keeps),
        *(Cut(halves, count, keeps=keeps) for count in counts if any(map(halves.is_tiled, halves.units))),
        *experts,
    ]


def _sent(spread: Decoder, tokens: int) -> Literal["all", "routed"]:
    """Which experts are sent: where few are needed, the copies of those are shorter than what they wait for."""
    needed = [experts.share(tokens) for experts in spread.experts if isinstance(experts, Experts)]
    return "routed" if max(needed) <= _MOST_ROUTED else "all"


def _expert_groups(halves: Decoder, groups: Any, asked: bool) -> list[Decoder]:
    """`halves` with the experts of its layers spread over `groups` units, or where that is auto, over more and more.
    Raises ConfigError where they cannot be spread so, unless nothing of the kind was `asked` for."""
    found = expert_groups.find(halves)
    counts = expert_groups.group_counts(halves, found)
    if not counts and (asked or groups != "auto"):
        key = "fragments is experts" if asked else f"expert_groups is {groups}"
        raise ConfigError(
            f"plan.{key}, but no experts of {type(halves.model).__name__} can be spread over several units: "
            f"{'; '.join(_reasons(found)) or f'there are no groups with {_EVEN}'}. Leave it out"
        )
    if groups != "auto" and groups not in counts:
        raise ConfigError(
            f"plan.expert_groups is {groups}; the experts of {type(halves.model).__name__} can be divided into "
            f"{', '.join(map(str, counts))} groups, with {_EVEN}"
        )
    if groups != "auto":
        counts = [groups]
    else:  # the first whatever it is, so that there is one where one is asked for
        spread = sum(not isinstance(found[of], str) for of in halves.structure_of)
        counts = [count for count in counts if count == counts[0] or count * spread <= _MOST_GROUPS]
    return [expert_groups.cut(halves, found, count) for count in counts]


def _reasons(found: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(reason for reason in found if isinstance(reason, str)))


def first_that_fits(found: Sequence[Cut], asked: Callable[[Cut], Request]) -> Cut | None:
    """The first of these `cuts` that fits, `asked` being its request; None where none does. On a card one that leaves
    room beside the layer that runs is preferred, where there is one and it needs less than half as much."""
    whole = asked(found[0])
    spread = [cut for cut in found if cut.fragments == "experts"]
    unspread = [cut for cut in found if cut not in spread] or spread
    most = _most_work(whole, unspread, asked)

    def roomy(cut: Cut) -> bool:
        request = whole if cut is found[0] else asked(cut)
        return _work(request) <= most and _fits(request)

    def fits(cut: Cut) -> bool:
        # before and after its experts a layer is computed from one slot, which stays taken meanwhile
        return _fits(asked(cut), slots=3) if cut.fragments == "experts" else _fits(asked(cut))

    cut = _first(unspread, roomy)
    if cut is None:  # where every amount of room was enough, the others do not fit
        cut = _first(found if most < float("inf") else spread, fits)
    if cut is None:  # the last resort, which waits for every load
        cut = _first(found, lambda cut: _fits(asked(cut), slots=1))
    return cut


def keeping(cut: Cut | None, asked: Callable[[Cut], Request]) -> Cut | None:
    """`cut`, with what its compiled layers keep: what torch chooses where all state and all activations fit on the card
    then and nothing else is asked for, since that is faster; else the least."""
    if cut is None or cut.keeps != "auto":
        return cut
    request = asked(cut)
    if request["device"] == "cpu":
        return cut
    usual = dataclasses.replace(cut, keeps="usual")
    if _fits_on_card(request) and _differs(more := asked(usual), request) and _fits_on_card(more):
        return usual
    return dataclasses.replace(cut, keeps="least")


def _fits_on_card(request: Request) -> bool:
    """Whether all state and all activations fit on the card, and nothing is asked for that leaves any to the host."""
    asked = request["requests"]
    if asked.get("accumulate") or any(asked.get(key) not in (None, "auto") for key in _ASIDE):
        return False  # sums of several passes are on the host
    everything = {"keep": len(request["units"]) - 2, "state_on_device": len(request["units"])}
    return _core.fits(json.dumps(request | {"requests": asked | everything}))


def _differs(request: Request, other: Request) -> bool:
    """Whether layers keep something else: those that run as they are do not."""
    return bool(request["units"] != other["units"])


def _most_work(whole: Request, found: Sequence[Cut], asked: Callable[[Cut], Request]) -> float:
    """What one layer may need in the cut that is preferred; infinity where whole layers leave room, and where cutting
    finer would not help."""
    most = _MOST_WORK * whole["budget"]["device"]
    if whole["device"] == "cpu" or _work(whole) <= most:
        return float("inf")
    least = _work(asked(found[-1]))
    return max(most / 2, least) if 2 * least < _work(whole) else float("inf")


def _work(request: Request) -> int:
    """Bytes that torch allocates at one time for the work in progress."""
    return max(int(request["workspace_bytes"]), int(request["late_workspace_bytes"]))


def _fits(request: Request, slots: int = 2) -> bool:
    """Whether a plan fits with at least so many slots: a finer cut whose units are loaded while others are computed is
    faster than a coarser one with a single slot."""
    asked = request["requests"]
    if asked.get("slots") is None:
        request = request | {"requests": asked | {"slots": slots}}
    return _core.fits(json.dumps(request))


def _first(found: Sequence[Cut], suits: Callable[[Cut], bool]) -> Cut | None:
    """The first that suits. The more tiles or groups of experts, the less memory, so that few numbers are tried: each
    takes a measurement of its own."""
    spread = [cut for cut in found if cut.fragments == "experts"]
    tiled = [cut for cut in found if cut.tiles > 1]
    for cut in found:
        if cut.tiles == 1 and cut.fragments != "experts" and suits(cut):
            return cut
    for finer in (tiled, spread):
        if finer and suits(finer[-1]):
            return finer[bisect.bisect_left(finer, True, hi=len(finer) - 1, key=suits)]
    return None


def planned_when_idle(
    found: Sequence[Cut], idle: Callable[[Cut], Request], now: Callable[[Cut], Request]
) -> tuple[Cut, Request, str]:
    """As `planned`, for requests with the memory that is free `now`, with the cut that fits first when nothing else
    runs on the machine (`idle`): a cut may change rounding, which must not depend on what is free."""
    if len(found) == 1:
        return planned(found, keeping(found[0], idle), now)
    cut = keeping(first_that_fits(found, idle), idle)
    try:
        return planned(found, cut, now)
    except DoesNotFit as error:
        fits_now = keeping(first_that_fits(found, now), now) if cut is not None else None
        if fits_now is None:
            raise
        refusal = DoesNotFit(
            f"{error}\nIt fits when nothing else uses this machine, and layers are cut for that, so that results do "
            f"not depend on what is free now. Free some memory, or give plan={fits_now.options}, which fits now"
        )
        refusal.items = error.items
        raise refusal from None


def planned(found: Sequence[Cut], cut: Cut | None, asked: Callable[[Cut], Request]) -> tuple[Cut, Request, str]:
    """`cut`, its request and the core's plan as JSON. Where none of `found` fits, and so there is no cut, raises
    DoesNotFit: for the first of them, or for the last where that exceeds the budget by clearly less."""
    refusals: list[tuple[int, DoesNotFit]] = []
    for chosen in [cut] if cut is not None else dict.fromkeys((found[0], found[-1])):
        request = asked(chosen)
        try:
            return chosen, request, _core.plan(json.dumps(request))
        except DoesNotFit as error:
            refusals.append((_missing(request, error), error))
    (first, of_first), (last, of_last) = refusals[0], refusals[-1]
    raise of_last if last < 0.9 * first else of_first


def _missing(request: Request, error: DoesNotFit) -> int:
    """Bytes by which what is needed exceeds the budget."""
    needed = {tier: sum(item["bytes"] for item in error.items if item["tier"] == tier) for tier in request["budget"]}
    missing: int = sum(max(0, needed[tier] - allowed) for tier, allowed in request["budget"].items())
    if request["shared_memory"]:
        missing = max(missing, needed["device"] + needed["host"] - request["budget"]["host"])
    return missing
