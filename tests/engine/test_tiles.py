"""The MLP halves of layers in tiles of tokens: close to plain PyTorch, the same bits under every plan, less memory."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.engine import cuts as cutting
from megatrain.engine.cuts import Cut, cuts, first_that_fits
from megatrain.engine.profile import plan_request
from megatrain.errors import ConfigError
from megatrain.models.token_wise import TOKENS, why_not_token_wise
from megatrain.weights.state_format import StateFormat
from support.families import CASES, build
from support.reference import batches, check_training, engine
from support.resume import batches as rows
from support.resume import same, started, state

TILED = [case for case in CASES if not isinstance(megatrain.Decoder(build(*case)).splits[-1], str)]


def steps(number: int) -> list[list[dict[str, torch.Tensor]]]:
    return [batches(2, seed=seed, rows=2, seq=16, padded=True, vocab=96) for seed in range(number)]


@pytest.mark.parametrize(("name", "experts"), TILED)
def test_two_tiled_steps_equal_plain_pytorch(name: str, experts: str | None) -> None:
    ours, _ = check_training(build(name, experts), steps(2), splits=True, plan={"mlp_tiles": 3})
    assert ours.decoder.untiled == {}
    assert len(ours._runtime.templates.tiles) == ours.decoder.num_layers


@pytest.mark.parametrize(("precision", "accumulation"), [("bf16", 1), ("bf16", 2), ("fp32", 1)])
@pytest.mark.parametrize("update", ["just_in_time", "immediate"])
def test_no_plan_shows_under_one_number_of_tiles(
    tmp_path: Path, precision: str, accumulation: int, update: str
) -> None:
    mode = {"update": update, "max_grad_norm": 0.5 if update == "just_in_time" else None}
    found = []
    tiers: list[dict[str, Any]] = [{}, {"state_on_device": 4}, {"updates_on_device": 2}, {"state_on_disk": 4}]
    for tier, (activation, inputs) in itertools.product(
        tiers, [("keep", "device"), ("offload", "device"), ("recompute", "host"), ("offload", "host")]
    ):
        plan = {"mlp_tiles": 5, "activation": activation, "inputs": inputs, "poison": True, "slots": 2, **tier}
        memory = {"gpu": "1GiB", "host": "1GiB", "nvme": {"path": tmp_path}}
        ours = started(precision, True, accumulation=accumulation, plan=plan, memory=memory, **mode)
        outs = [ours.step(rows(step, accumulation)) for step in range(2)]
        found.append(([(out.loss, out.grad_norm) for out in outs], state(ours)))
        ours.close()
    assert all(losses == found[0][0] and same(left, found[0][1]) for losses, left in found)


def test_weight_gradients_of_tiles_are_summed_in_fp32() -> None:
    """One micro-batch of one tile a token: a bf16 sum of as many gradients would be off by several per cent."""

    def gradients(tiles: int) -> dict[str, torch.Tensor]:
        ours = started("bf16", False, accumulation=1, plan={"fragments": "halves", "mlp_tiles": tiles})
        ours.forward_backward(rows(0, 1))
        names = [n for n in ours.decoder.tensors if "mlp" in n]
        return {name: ours.gradient(name) for name in names}

    whole, tiled = gradients(1), gradients(24)
    errors = [float((tiled[n] - whole[n]).norm() / whole[n].norm()) for n in whole]
    assert max(errors) < 1e-3


def test_evaluation_and_log_probabilities_are_tiled_too() -> None:
    plain, tiled = (engine(build("qwen3"), plan={"fragments": "halves", "mlp_tiles": n}) for n in (1, 4))
    batch = batches(1, rows=2, seq=16, vocab=96)
    assert tiled.evaluate(batch) == pytest.approx(plain.evaluate(batch), rel=1e-6)
    assert torch.allclose(tiled.logprobs(batch)[0], plain.logprobs(batch)[0], atol=1e-5)


def test_the_number_of_tiles_is_part_of_the_numerics_key_and_halves_are_not_without_compiling() -> None:
    keys = []
    for plan in ({}, {"fragments": "halves"}, {"mlp_tiles": 4}):
        ours = engine(build("llama3"), plan=plan)
        ours.step(steps(1)[0])
        keys.append(ours._passes.numerics())
    assert keys[0] == keys[1]
    assert {name for name in keys[0] if keys[0][name] != keys[2][name]} == {"mlp_tiles"}
    assert keys[2]["mlp_tiles"] == 4


def test_tiles_are_counted_in_the_plan() -> None:
    decoder = megatrain.Decoder(build("llama3", intermediate_size=1024, max_position_embeddings=4096)).halves
    sizes: dict[str, Any] = {
        "micro_batch": (1, 4096),
        "micro_batches": 1,
        "grad_precision": "bf16",
        "state_format": StateFormat(),
        "update": "just_in_time",
        "budget": {"device": 1 << 40, "host": 1 << 40},
        "device": "cpu",
    }
    one, four, sixteen = (plan_request(decoder, tiles=tiles, **sizes) for tiles in (1, 4, 16))
    mlp = next(i for i, unit in enumerate(one["units"]) if unit["name"] == "layers.0.mlp")
    assert four["units"][mlp]["kept_bytes"] == four["units"][mlp]["input_bytes"] < one["units"][mlp]["kept_bytes"] / 4
    assert four["late_workspace_bytes"] < one["late_workspace_bytes"] / 2
    assert sixteen["late_workspace_bytes"] < four["late_workspace_bytes"]
    # forward, backward and forward again: four forwards, where three are what a unit's flops stand for
    assert four["units"][mlp]["flops"] == pytest.approx(one["units"][mlp]["flops"] * 4 / 3, rel=1e-3)
    assert (one["sum_layers"], four["sum_layers"]) == (False, True)


def test_whole_layers_are_tried_first_then_halves_then_tiles() -> None:
    decoder = megatrain.Decoder(build("llama3"))

    def tried(tokens: int, **asked: Any) -> list[tuple[bool, int]]:
        return [(cut.decoder is decoder, cut.tiles) for cut in cuts(decoder, asked, tokens)]

    assert tried(2047) == [(True, 1), (False, 1)]
    assert tried(8192) == [(True, 1), (False, 1), (False, 2), (False, 4), (False, 8)]
    assert tried(8192, fragments="whole") == [(True, 1)]
    assert tried(8192, fragments="halves", mlp_tiles=1) == [(False, 1)]
    assert tried(8192, mlp_tiles=5) == [(False, 5)]


GIB = 1 << 30


def request(cut: Cut, whole: int, tiled: int, device: str = "cuda") -> dict[str, Any]:
    """What `first_that_fits` reads of a request: a layer works in `whole` bytes, in tiles in no less than `tiled`."""
    work = max(whole // cut.tiles, tiled)
    sizes = {"workspace_bytes": work // 2, "late_workspace_bytes": work, "budget": {"device": 80 * GIB}}
    return {"device": device, "tiles": cut.tiles, "halves": cut.fragments == "halves", **sizes}


@pytest.mark.parametrize("least", [1, 2, 3, 8, 32, 64])
def test_few_numbers_of_tiles_are_tried_for_the_first_that_fits(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = megatrain.Decoder(build("llama3"))
    found = cuts(decoder, {}, 64 << 10)
    tried: list[dict[str, Any]] = []

    def fits(asked: dict[str, Any]) -> bool:
        tried.append(asked)
        return bool(asked["halves"]) and asked["tiles"] >= least

    def first(suits: Callable[[dict[str, Any]], bool]) -> Cut | None:
        monkeypatch.setattr(cutting, "_fits", lambda asked, **_: suits(asked))
        return first_that_fits(found, lambda cut: request(cut, GIB, GIB))

    cut = first(fits)
    assert len(tried) <= 6
    assert cut == Cut(decoder.halves, next(cut.tiles for cut in found if cut.tiles >= least))
    assert first(lambda _: False) is None
    assert first(lambda _: True) == found[0]


@pytest.mark.parametrize(
    ("whole", "tiled", "device", "tiles"),
    [
        (20, 2, "cuda", 0),  # whole layers leave room
        (21, 2, "cuda", 4),  # a quarter of the card is 20 GiB; tiles are to leave half of that
        (50, 2, "cuda", 8),
        (50, 24, "cuda", 4),  # attention alone needs more than that: as little as can be
        (50, 26, "cuda", 0),  # tiles would not need half of it
        (50, 2, "cpu", 0),
    ],
)
def test_tiles_are_preferred_where_a_whole_layer_takes_much_of_the_card(
    whole: int, tiled: int, device: str, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = megatrain.Decoder(build("llama3"))
    monkeypatch.setattr(cutting, "_fits", lambda _: True)
    asked = cuts(decoder, {}, 64 << 10)
    cut = first_that_fits(asked, lambda cut: request(cut, whole * GIB, tiled * GIB, device))
    assert cut == (Cut(decoder.halves, tiles) if tiles else Cut(decoder))
    # where tiles do not fit, room is no reason to refuse what does
    monkeypatch.setattr(cutting, "_fits", lambda asked: not asked["halves"])
    assert first_that_fits(asked, lambda cut: request(cut, whole * GIB, tiled * GIB, device)) == Cut(decoder)


@pytest.mark.parametrize(
    ("width", "inner", "seq", "step", "wanted"),
    [(256, 256, 16, 256 << 10, [(4, 1), (6, 1)]), (32, 1024, 2048, 4 << 20, [(4, 1), (6, 2)])],
)
def test_an_engine_whose_layers_do_not_fit_whole_is_cut_into_halves_and_tiles(
    width: int, inner: int, seq: int, step: int, wanted: list[tuple[int, int]]
) -> None:
    model = build("llama3", hidden_size=width, intermediate_size=inner, max_position_embeddings=2048)
    batch = batches(1, rows=1, seq=seq, vocab=96)

    def found(limit: int) -> tuple[int, int]:
        options = {"micro_batch": (1, seq), "micro_batches": 1, "plan": {"state_on_device": 0}}
        ours = engine(model, memory={"gpu": limit, "host": "1GiB"}, **options)
        ours.step(batch)
        cut = ours._runtime.cut
        ours.close()
        return len(cut.decoder.units), cut.tiles

    cuts_made: list[tuple[int, int]] = []
    for limit in range(32 * step, 0, -step):
        try:
            cuts_made.append(found(limit))
        except megatrain.errors.DoesNotFit:
            break
    assert list(dict.fromkeys(cuts_made)) == wanted


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"mlp_tiles": 0}, "plan.mlp_tiles is 0; it must be auto or at least 1"),
        ({"mlp_tiles": 2.5}, "plan.mlp_tiles is 2.5; it must be auto or a whole number of at least 1"),
        ({"slots": "2"}, "plan.slots is '2'; it must be a whole number of at least 1"),
        ({"state_on_device": True}, "plan.state_on_device is True; it must be auto or a whole number of at least 0"),
        ({"slabs": 2}, "plan.slabs is 2, and with update: just_in_time every gradient waits in a slab of its own"),
        ({"mlp_tiles": 2, "fragments": "whole"}, "plan.mlp_tiles is 2, which tiles the MLP halves"),
        ({"fragments": "thirds"}, "plan.fragments must be auto, whole, halves or experts, not 'thirds'"),
        ({"kept_tensors": "most"}, "plan.kept_tensors must be auto, least or usual, not 'most'"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_at_once(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(build("llama3"), plan=plan)


def test_tiles_of_layers_that_have_none_are_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match="mlp_tiles is 2, but no layer of CohereForCausalLM can be split: it does not"
    ):
        engine(build("cohere"), plan={"mlp_tiles": 2}).core  # noqa: B018
    routed = build("mixtral", output_router_logits=True)
    with pytest.raises(
        ConfigError, match=r"mlp_tiles is 2, but no MLP of .* can be tiled: its router has an auxiliary"
    ):
        engine(routed, plan={"mlp_tiles": 2}).core  # noqa: B018


class Centred(nn.Module):
    """Takes the mean over tokens away, so that each token sees all others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.linear(hidden - hidden.mean(1, keepdim=True))


class Crowded(nn.Module):
    """Drops what is beyond the capacity of a gate, as switch transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(hidden).argmax(-1, keepdim=True) == 0
        return hidden * (chosen & (chosen.cumsum(1) <= 1))


@pytest.mark.parametrize("half", [Centred(), Crowded()])
def test_a_half_whose_tokens_see_each_other_is_not_tiled(half: nn.Module) -> None:
    hidden = torch.randn(1, TOKENS, 16, generator=torch.Generator().manual_seed(0))
    assert why_not_token_wise(half, (), {}, hidden) == "its tokens depend on each other"
