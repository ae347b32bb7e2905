"""Experts sent in groups give the same bits as whole layers, wherever state and activations are, and across
checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain import AdamW, Engine
from megatrain.engine.expert_groups import Routed
from megatrain.errors import ConfigError
from megatrain.models.decoder import Decoder
from megatrain.models.expert_groups import Called
from support.resume import same, state

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.11", reason="grouped matmuls of CPUs and cards are alike only since"
)

SIZES = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
"""A group begins with a block of the gradient norm: four experts, or two, of this width."""
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
SHARED = {"n_shared_experts": 1, "topk_group": 1, "first_k_dense_replace": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 32},
    "gpt_oss": {"head_dim": 32},
    "mixtral": {},
    "glm4_moe": {"head_dim": 32, "n_group": 1, **SHARED},
    "deepseek_v3": {"num_key_value_heads": 4, "n_group": 2, **SHARED, **LATENT},
}
GROUPS = {"fragments": "experts", "expert_groups": 4}


def decoder(family: str, **changes: Any) -> Decoder:
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    for name, value in changes.items():
        setattr(config, name, value)
    return Decoder.from_config(config, precision="bf16")


def started(family: str, plan: dict[str, Any], micro_batches: int = 2, aux: bool = False, **options: Any) -> Engine:
    given = {
        "optimizer": AdamW(lr=1e-2, weight_decay=0.1),
        "device": "cpu",
        "seed": 0,
        "micro_batch": (2, 12),
        "micro_batches": micro_batches,
        "max_grad_norm": 0.5,
        "memory": {"gpu": "2GiB", "host": "2GiB"},
        "plan": {"poison": True, **plan},
    }
    return Engine(decoder(family, **({"output_router_logits": True} if aux else {})), **{**given, **options})


def batches(step: int, count: int, packed: bool = False) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    found = []
    for _ in range(count):
        ids = torch.randint(96, (2, 12), generator=generator)
        found.append({"input_ids": ids, "labels": ids.clone()})
        if packed:
            found[-1]["position_ids"] = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, 12)
    return found


def trained(engine: Engine, micro_batches: int = 2, packed: bool = False, length: int = 24) -> tuple[Any, ...]:
    """Of three steps and an evaluation; `length` is that of a micro-batch in tokens."""

    def of(step: int, count: int) -> list[dict[str, Tensor]]:
        found = batches(step, count, packed)
        return found if length == 24 else [{key: ids[:1, :length] for key, ids in each.items()} for each in found]

    outs = [engine.step(of(step, micro_batches)) for step in range(3)]
    losses = [(out.loss, out.grad_norm, out.aux_loss) for out in outs]
    found = losses, engine.evaluate(of(9, 1)), state(engine)
    engine.close()
    return found


def assert_same(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    assert found[:2] == wanted[:2]
    assert same(found[2], wanted[2])


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_experts_gives_the_same_bits(family: str, micro_batches: int) -> None:
    wanted = trained(started(family, {"fragments": "whole"}, micro_batches), micro_batches)
    for groups, activation in ((2, "recompute"), (4, "offload"), (4, "keep")):
        plan = {"fragments": "experts", "expert_groups": groups, "activation": activation, "slots": 3}
        engine = started(family, plan, micro_batches)
        names = [unit["name"] for unit in engine.plan["units"]]
        assert sum(".experts." in name for name in names) == 2 * groups - groups * (
            family in ("glm4_moe", "deepseek_v3")
        )
        assert_same(trained(engine, micro_batches), wanted)


PLACEMENTS: dict[str, dict[str, Any]] = {
    "one slot": {"plan": {"slots": 1}},
    "two slots": {"plan": {"slots": 2}},
    "inputs on the host": {"plan": {"slots": 3, "inputs": "host"}},
    "state of some on the device": {"plan": {"state_on_device": 7}},
    "state that visits the device": {"plan": {"updates_on_device": 5, "parts": 2}},
    "a micro-batch at a time": {"plan": {"group": 1}},
    "immediate updates": {"update": "immediate", "max_grad_norm": None},
    "gradients of several passes": {"plan": {"accumulate": True}},
    "gradients in fp32": {"grad_precision": "fp32"},
    "moments in 8 bits, masters in 24": {"moments": "8bit", "master": "24bit"},
    "moments in bf16": {"moments": "bf16"},
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_every_placement_gives_the_same_bits(family: str, placement: str) -> None:
    options = dict(PLACEMENTS[placement])
    plan = options.pop("plan", {})
    wanted = trained(started(family, {"fragments": "whole", **{k: plan[k] for k in plan if k == "group"}}, **options))
    assert_same(trained(started(family, {**GROUPS, **plan}, **options)), wanted)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_experts_that_are_sent_alone_give_the_same_bits(
    family: str, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight experts few micro-batches of two tokens need all; weights that were not sent are NaN."""
    options = {"micro_batch": (1, 2), **PLACEMENTS[placement]}
    plan = options.pop("plan", {})
    whole = {"fragments": "whole", **{k: plan[k] for k in plan if k == "group"}}
    wanted = trained(started(family, whole, 3, **options), 3, length=2)
    sent: list[bool] = []
    wants = Routed.wanted

    def noted(self: Routed, group: tuple[int, int]) -> list[bool]:
        sent.extend(wants(self, group))
        return wants(self, group)

    monkeypatch.setattr(Routed, "wanted", noted)
    assert_same(trained(started(family, {**GROUPS, **plan}, 3, **options), 3, length=2), wanted)
    assert any(sent)
    assert not all(sent)


def test_which_experts_are_sent_follows_the_tokens_of_a_micro_batch() -> None:
    def sent(tokens: int, **plan: Any) -> list[float | None]:
        engine = started("qwen3_moe", {**GROUPS, **plan}, micro_batch=(1, tokens))
        request = engine._runtime.request(engine._runtime.cut, (1, tokens), 2)
        engine.close()
        return [
            unit["routed"]["share"] if "routed" in unit else None
            for unit in request["units"]
            if "experts" in unit["name"]
        ]

    assert sent(2) == [1 - 0.75**2] * 8
    assert sent(24) == [None] * 8
    assert sent(2, sent_experts="all") == [None] * 8
    assert sent(24, sent_experts="routed") == [1 - 0.75**24] * 8


def test_a_router_that_does_not_repeat_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started("qwen3_moe", GROUPS, micro_batch=(1, 2))
    calls = []
    init = Routed.__init__

    def elsewhere(self: Routed, called: Called, *given: Any) -> None:
        calls.append(called)
        if len(calls) > 4:  # backward, after two layers' forward of two micro-batches
            called.index = (called.index + 4) % 8
        init(self, called, *given)

    monkeypatch.setattr(Routed, "__init__", elsewhere)
    with pytest.raises(
        ConfigError, match=r"layers\.1.*its router sends tokens to experts .* set plan.sent_experts to all"
    ):
        engine.step([{key: ids[:1, :2] for key, ids in each.items()} for each in batches(0, 2)])
    engine.close()


def test_state_and_weights_on_disk_give_the_same_bits(tmp_path: Path) -> None:
    memory = {"gpu": "2GiB", "host": "2GiB", "nvme": {"path": tmp_path}}
    plan = {**GROUPS, "state_on_disk": 8, "weights_on_disk": 4, "parts": 2}
    wanted = trained(started("qwen3_moe", {"fragments": "whole"}))
    assert_same(trained(started("qwen3_moe", plan, memory=memory)), wanted)


def test_the_routers_auxiliary_loss_is_that_of_whole_layers() -> None:
    wanted = trained(started("mixtral", {"fragments": "whole"}, aux=True))
    assert wanted[0][0][2] is not None
    assert_same(trained(started("mixtral", GROUPS, aux=True)), wanted)


def test_documents_of_packed_rows_stay_apart() -> None:
    wanted = trained(started("qwen3_moe", {"fragments": "whole"}), packed=True)
    assert_same(trained(started("qwen3_moe", GROUPS), packed=True), wanted)
    # attention of gpt-oss gets them as rows of their own on a CPU, and what is around its experts together: it rounds
    # otherwise, and the numerics key says so
    first = trained(started("gpt_oss", {"fragments": "whole"}), packed=True)[0][0][:2]
    engine = started("gpt_oss", GROUPS)
    assert engine.numerics()["fragments"] == "experts"
    assert trained(engine, packed=True)[0][0][:2] == pytest.approx(first, rel=1e-3)


def test_a_group_that_no_token_is_routed_to_is_updated_like_any_other() -> None:
    def routed_away(engine: Engine) -> tuple[Any, ...]:
        engine.step(batches(0, 2))
        one = [{"input_ids": torch.full((2, 12), 5), "labels": torch.full((2, 12), 5)}] * 2
        outs = [engine.step(one) for _ in range(2)]  # two experts in each layer
        found = [(out.loss, out.grad_norm) for out in outs], None, state(engine)
        engine.close()
        return found

    assert_same(routed_away(started("qwen3_moe", GROUPS)), routed_away(started("qwen3_moe", {"fragments": "whole"})))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_checkpoints_and_exports_do_not_depend_on_it(tmp_path: Path, family: str) -> None:
    cuts = {"whole": {"fragments": "whole"}, "groups": GROUPS}
    engines = {name: started(family, plan) for name, plan in cuts.items()}
    for name, engine in engines.items():
        for step in range(2):
            engine.step(batches(step, 2))
        engine.save(tmp_path / name, step=2)
        engine.save_pretrained(tmp_path / f"{name}-export")
    exported = [tensors(tmp_path / f"{name}-export") for name in cuts]
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])
    stock = [AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16).state_dict() for name in cuts]
    assert all(torch.equal(stock[0][name], stock[1][name]) for name in stock[0])
    resumed = {
        "whole": started(family, cuts["whole"], seed=5),
        "groups": started(family, GROUPS, seed=6),
        "halved": started(family, {"fragments": "experts", "expert_groups": 2}, seed=7),
    }
    resumed["whole"].load(tmp_path / "groups")
    resumed["groups"].load(tmp_path / "whole")
    resumed["halved"].load(tmp_path / "groups")
    everything = [*engines.values(), *resumed.values()]
    assert len({engine.step(batches(2, 2)).loss for engine in everything}) == 1
    wanted = state(engines["whole"])
    assert all(same(state(engine), wanted) for engine in everything)
    for engine in everything:
        engine.close()


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def test_a_buffer_holds_one_group() -> None:
    def slot(plan: dict[str, Any]) -> int:
        engine = started("qwen3_moe", plan)
        found = sum(item["bytes"] for item in engine.plan["items"] if item["what"] == "weights: slots")
        count = engine.plan["slots"]
        engine.close()
        return int(found // count)

    half, quarter = slot({"fragments": "halves", "slots": 2}), slot({**GROUPS, "slots": 3})
    assert quarter < 0.3 * half


def test_groups_are_chosen_where_halves_do_not_fit() -> None:
    least = {"inputs": "host", "activation": "recompute", "state_on_device": 0}

    def needed(plan: dict[str, Any]) -> int:
        engine = started("qwen3_moe", {**least, **plan})
        found = int(engine.plan["totals"]["device"])
        engine.close()
        return found

    halves = needed({"fragments": "halves", "slots": 2})
    groups = needed({"fragments": "experts", "expert_groups": 4, "slots": 3})
    assert groups < halves
    for budget, kind in ((halves, False), ((halves + groups) // 2, True)):
        engine = started("qwen3_moe", least, memory={"gpu": budget, "host": "2GiB"})
        assert any(".experts." in unit["name"] for unit in engine.plan["units"]) == kind
        engine.close()


@pytest.mark.parametrize(
    ("family", "plan", "message"),
    [
        (
            "qwen3_moe",
            {"expert_groups": 3},
            "plan.expert_groups is 3; the experts of Qwen3MoeForCausalLM can be divided into 2, 4 groups",
        ),
        ("qwen3_moe", {**GROUPS, "mlp_tiles": 2}, "plan.mlp_tiles is 2, which tiles the MLP halves"),
        (
            "qwen3_moe",
            {"expert_groups": 2, "fragments": "halves"},
            "plan.expert_groups is 2, which spreads the experts",
        ),
        ("qwen3_moe", {"expert_groups": 1}, "plan.expert_groups is 1; it must be auto or at least 2"),
    ],
)
def test_what_cannot_be_is_refused(family: str, plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        started(family, plan)
    assert message in str(raised.value)


def test_a_model_without_such_experts_says_why() -> None:
    from support.fake_core import llama

    for precision in ("bf16", "fp32"):
        with pytest.raises(ConfigError, match="it has no routed experts that run as grouped matmuls in bf16"):
            Engine(
                Decoder.from_config(llama(), precision=precision),
                device="cpu",
                micro_batch=(2, 12),
                micro_batches=1,
                memory={"gpu": "1GiB", "host": "1GiB"},
                plan={"fragments": "experts"},
            )
