"""What the engine refuses: arguments, micro-batches, settings and calls out of order, each with what to do."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import megatrain
from megatrain.errors import ConfigError, DoesNotFit
from support.reference import assert_unchanged, batches, build, engine, weights


def test_immediate_updates_cannot_be_clipped_added_up_or_read_as_gradients() -> None:
    with pytest.raises(ConfigError, match=r"update.*max_grad_norm"):
        engine(build(), update="immediate", max_grad_norm=1.0)
    ours = engine(build(), update="immediate", max_grad_norm=None)
    ours.forward_backward(batches(1))
    with pytest.raises(ConfigError, match="cannot be added up"):
        ours.forward_backward(batches(1))
    ours.optimizer_step()
    with pytest.raises(ConfigError, match="keeps no gradients"):
        ours.gradient("model.norm.weight")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": 1e300}, r"optimizer: lr is 1e\+300; updates are computed in fp32, whose largest number is 3\.4e\+38"),
        ({"weight_decay": 1e39}, r"optimizer: weight_decay is 1e\+39"),
        ({"eps": 1e39}, r"optimizer: eps is 1e\+39"),
        ({"lr": 10**400}, "optimizer: lr must be finite and not negative, not inf"),
        ({"lr": None}, "optimizer: lr must be a number, not None"),
        ({"lr": True}, "optimizer: lr must be a number, not True"),
        ({"eps": (1e-8,)}, "optimizer: eps must be a number, not"),
        ({"betas": 0.9}, r"optimizer: betas must be two numbers, such as \(0\.9, 0\.999\), not 0\.9"),
        ({"betas": "0.9"}, "optimizer: betas must be two numbers"),
        ({"betas": (0.9, "x")}, "optimizer: betas must be a number, not 'x'"),
        ({"groups": {"params": "*"}}, "optimizer: groups must be a list of dicts, not {'params'"),
        ({"groups": [5]}, r"optimizer\.groups\[0\] must be a dict, not 5"),
        ({"groups": [{"params": 5}]}, r"optimizer\.groups\[0\]: params must be a pattern"),
        ({"groups": [{"params": "*", "lr": 1e39}]}, r"optimizer\.groups\[0\]: lr is 1e\+39"),
    ],
)
def test_a_setting_of_the_optimizer_that_is_no_number_of_fp32_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        megatrain.AdamW(**settings)
    with pytest.raises(ConfigError, match=r"lr is 1e\+39; updates are computed in fp32"):
        engine(build()).set_lr(1e39)


def test_optimizer_settings_out_of_range_are_refused() -> None:
    for bad in ({"lr": -1.0}, {"lr": float("nan")}, {"betas": (0.9, 1.0)}, {"eps": -1.0}, {"betas": (0.9,)}):
        with pytest.raises(ConfigError, match=r"optimizer"):
            megatrain.AdamW(**bad)
    for group, reason in (
        ({"params": ["*nothing*"]}, "matches no trained parameter"),
        ({"params": [], "lr": 1.0}, "params must be a pattern"),
        ({"params": "*", "momentum": 1.0}, "unknown key 'momentum'"),
    ):
        with pytest.raises(ConfigError, match=reason):
            engine(build(), optimizer=megatrain.AdamW(groups=[group]))
    twice = megatrain.AdamW(groups=[{"params": "*norm*"}, {"params": "model.norm.*"}])
    with pytest.raises(ConfigError, match="in group 0 and in group 1"):
        engine(build(), optimizer=twice)


BAD_BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": torch.full((1, 8), 256)}, "micro-batch 0: token id 256, but the model's embedding has 256"),
    ({"input_ids": torch.full((1, 8), -1)}, "token id -1"),
    ({"input_ids": torch.zeros(1, 65, dtype=torch.int64)}, "sequence of 65 tokens, but the model has positions for 64"),
    ({"labels": torch.full((1, 8), 300)}, "label 300, but the model's head has 256"),
    ({"labels": torch.zeros(1, 7, dtype=torch.int64)}, "labels has shape \\[1, 7\\], but input_ids \\[1, 8\\]"),
    ({"input_ids": torch.zeros(8, dtype=torch.int64)}, "must be integers of shape"),
    ({"input_ids": torch.zeros(1, 8)}, "must be integers"),
    ({"attention_mask": torch.full((1, 8), 2)}, "attention_mask must hold 0 and 1"),
    ({"padding_mask": torch.ones(1, 7, dtype=torch.int64)}, "padding_mask has shape \\[1, 7\\], but input_ids"),
    ({"padding_mask": "none"}, "padding_mask must be integers"),
    ({"loss_weights": torch.ones(1, 8).to_sparse()}, "loss_weights must be numbers: it is sparse"),
    ({"attention_mask": torch.zeros(1, 8, dtype=torch.int64)}, "hides a whole row"),
    ({"position_ids": torch.full((1, 8), 64)}, "position 64, but the model has positions for 64"),
    (
        {
            "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]]),
        },
        "position_ids restart while attention_mask hides padding",
    ),
    (
        {
            "position_ids": torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3]]),
            "attention_mask": torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1]]),
        },
        "position_ids restart while attention_mask hides padding",
    ),
]


@pytest.mark.parametrize(("change", "reason"), BAD_BATCHES, ids=range(len(BAD_BATCHES)))
def test_micro_batches_that_the_model_cannot_take_are_refused(change: dict[str, Any], reason: str) -> None:
    ids = torch.zeros(1, 8, dtype=torch.int64)
    ours = engine(build())
    with pytest.raises(ConfigError, match=reason):
        ours.step([{"input_ids": ids, "labels": ids, **change}])
    with pytest.raises(ConfigError, match="at least one micro-batch"):
        ours.step([])
    with pytest.raises(ConfigError, match="has no labels"):
        ours.step([{"input_ids": ids}])


def test_more_micro_batches_than_planned_are_refused_with_what_to_do() -> None:
    ours = engine(build(), micro_batch=(2, 32), micro_batches=2)
    with pytest.raises(ConfigError, match="create it with micro_batches=3"):
        ours.step(batches(3))
    ours.step(batches(1))  # fewer are fine: an epoch's last step
    ours.step(batches(2, seq=17))  # and so are other shapes


def test_a_larger_step_that_does_not_fit_is_refused_and_loses_nothing() -> None:
    ours = engine(build(), memory={"gpu": 6 << 20, "host": 1 << 30})
    ours.step(batches(1))
    before = weights(ours)
    planned = r"(?s)present engine, whose .* of host memory are taken.*micro_batch=\(64, 64\) and micro_batches=1 is"
    with pytest.raises(DoesNotFit, match=planned) as refused:
        ours.step(batches(1, rows=64, seq=64))
    assert refused.value.items
    assert_unchanged(ours, before)
    ours.step(batches(1))


def test_adding_up_gradients_needs_a_planned_store() -> None:
    ours = engine(build(), micro_batch=(2, 32), micro_batches=1)
    ours.forward_backward(batches(1))
    with pytest.raises(ConfigError, match="'accumulate': True"):
        ours.forward_backward(batches(1))


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (None, None, r"without normalizer, so its gradients were divided by its own \d+ tokens, and again without one"),
        (None, 7, "without normalizer, .*again with 7"),
        (100, None, "with normalizer 100, and again without one"),
        (100, 7, "with normalizer 100, and again with 7"),
    ],
)
def test_gradients_of_other_normalizers_are_not_added_up(first: Any, second: Any, words: str) -> None:
    ours, twin, data = engine(build()), engine(build()), batches(2)
    for one in (ours, twin):
        one.forward_backward(data[:1], normalizer=first)
    with pytest.raises(ConfigError, match=words):
        ours.forward_backward(data[1:], normalizer=second)
    if first is not None:  # what waited has waited on
        assert ours.forward_backward(data[1:], normalizer=first) == twin.forward_backward(data[1:], normalizer=first)
    assert ours.optimizer_step() == twin.optimizer_step()
    assert_unchanged(ours, weights(twin))
    assert ours.step(data) == twin.step(data)


def test_a_budget_that_is_too_small_is_refused_with_its_sum() -> None:
    with pytest.raises(DoesNotFit) as refused:
        engine(build(), memory={"gpu": "1GiB", "host": 1 << 18}, micro_batch=(2, 32), micro_batches=1)
    assert refused.value.items
    assert {"what", "bytes"} <= set(refused.value.items[0])


def test_settings_that_mean_nothing_are_refused() -> None:
    model = build()
    for options, reason in (
        ({"plan": {"slot": 2}}, "unknown key 'slot'"),
        ({"memory": {"vram": 2}}, "unknown key 'vram'"),
        ({"memory": {"nvme": {"path": "x"}}}, "memory.nvme.path: .*x does not exist"),
        ({"memory": {"gpu": "many"}}, "memory.gpu"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive"),
        ({"update": "sometime"}, "update must be"),
        ({"device": "tpu"}, "device must be"),
        ({"precision": "fp8"}, "precision must be"),
        ({"plan": {"compile": True}}, "compile is for CUDA"),
    ):
        with pytest.raises(ConfigError, match=reason):
            engine(model, micro_batch=(2, 32), micro_batches=1, **options)


def test_several_processes_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2"):
        engine(build())


def test_a_model_whose_weights_were_taken_is_refused_and_never_drawn_at_random() -> None:
    model = build()
    megatrain.Engine(model, device="cpu", micro_batch=(2, 32), micro_batches=1).close()
    with pytest.raises(ConfigError, match="moved into an earlier engine"):
        megatrain.Engine(model, device="cpu")


def test_a_model_with_a_weight_that_is_not_finite_is_refused_by_name() -> None:
    model = build()
    model.lm_head.weight.data[0, 0] = math.nan
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        megatrain.Engine(model, device="cpu").step(batches(1))


def test_a_frozen_weight_that_is_not_finite_is_refused_by_name() -> None:
    model = build()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = math.inf
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight is frozen and holds values that are not"):
        engine(model, freeze=["*up_proj*"]).step(batches(1))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (((0, 8), 1), "micro_batch must be"),
        (("x", 1), "micro_batch must be"),
        (((1, 8), 0), "micro_batches must be at least 1, not 0"),
        (((1, 8), "2"), "micro_batches must be at least 1, not '2'"),
        (((1, 10**9), 1), "positions for 64 tokens"),
    ],
)
def test_sizes_that_no_step_has_are_not_planned(sizes: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine(build()).request(*sizes)


def test_a_save_never_takes_the_place_of_what_is_no_checkpoint(tmp_path: Path) -> None:
    ours = engine(build())
    ours.step(batches(1))
    file, folder = tmp_path / "notes.txt", tmp_path / "project"
    file.write_text("mine")
    folder.mkdir()
    (folder / "main.py").write_text("mine")
    for place in (file, folder):
        with pytest.raises(ConfigError, match="is not a checkpoint; name another folder"):
            ours.save(place)
    assert file.read_text() == (folder / "main.py").read_text() == "mine"
    for _ in range(2):  # an earlier checkpoint gives way
        ours.save(tmp_path / "saved")


def test_calls_out_of_order_and_shapeless_micro_batches_are_refused() -> None:
    ours = engine(build())
    with pytest.raises(ConfigError, match="without forward_backward"):
        ours.optimizer_step()
    with pytest.raises(ConfigError, match="at least one batch"):
        ours.evaluate([])
    assert ours.logprobs([]) == []
    given: list[Any] = [batches(1)[0], ["text"], [{"input_ids": [[1, 2], [3]]}], [{"input_ids": "text"}]]
    for wrong in given:
        with pytest.raises(ConfigError):
            ours.step(wrong)
    for dtype in ("int8", ["bf16"]):
        with pytest.raises(ConfigError, match="dtype must be"):
            ours.save_pretrained("nowhere", dtype=dtype)


@pytest.mark.parametrize(
    "settings",
    [
        {"grad_precision": "fp8"},
        {"grad_precision": ["bf16"]},
        {"precision": ["bf16"]},
        {"label_smoothing": 2},
        {"z_loss": math.nan},
        {"micro_batch": 4},
        {"micro_batch": (0, 16)},
        {"micro_batches": 0},
        {"plan": {"loss_chunk": -1}},
        {"plan": {"slots": 0}},
        {"plan": {"slots": "three"}},
        {"optimizer": torch.optim.SGD([torch.zeros(1)])},
    ],
)
def test_arguments_out_of_range_are_refused_as_wrong_requests(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        megatrain.Engine(build(), device="cpu", **settings).step(batches(1))


def test_settings_that_are_no_numbers_are_refused_with_their_value(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, data = engine(build()), batches(1)
    for call in (
        lambda: ours.set_lr("1e-3"),  # type: ignore[arg-type]
        lambda: ours.forward_backward(data, normalizer="x"),  # type: ignore[arg-type]
        lambda: megatrain.Engine(build(), device="cpu", max_grad_norm="1"),  # type: ignore[arg-type]
        lambda: megatrain.Trainer(5),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=r"'1e-3'|'x'|'1'|5"):
            call()
    assert ours.forward_backward(data, normalizer=torch.tensor(4.0)) > 0  # type: ignore[arg-type]
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE is two"):
        engine(build())


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda _: None, "returned None"),
        (lambda loss: loss.item(), r"returned float \d"),
        (lambda loss: loss.expand(3), r"a tensor of shape \(3,\)"),
        (lambda loss: loss.detach(), "without a gradient"),
        (lambda loss: loss.long(), r"a tensor of torch\.int64"),
    ],
    ids=["None", "float", "not-0-d", "detached", "integer"],
)
@pytest.mark.parametrize("update", ["just_in_time", "immediate"])
def test_what_a_loss_function_returned_is_refused_by_name(returned: Any, words: str, update: str) -> None:
    ours, wanted = (
        engine(build(), update=update, max_grad_norm=None if update == "immediate" else 1.0) for _ in range(2)
    )
    data = batches(1)
    with pytest.raises(ConfigError, match=f"loss_fn returned .*{words.removeprefix('returned ')}.*must return the sum"):
        ours.step(data, loss_fn=lambda hidden, head, _: returned(head(hidden).float().square().sum()))
    assert ours.step(data) == wanted.step(data)


def test_an_unknown_key_of_a_micro_batch_is_refused_with_the_nearest_one() -> None:
    ours = engine(build())
    ids = batches(1)[0]["input_ids"]
    for call in (lambda b: ours.step([b]), lambda b: ours.evaluate([b]), lambda b: ours.logprobs([b])):
        with pytest.raises(ConfigError, match=r"micro-batch 0 has 'lables'.*did you mean labels\?"):
            call({"input_ids": ids, "labels": ids, "lables": ids})
    with pytest.raises(
        ConfigError, match=r"'advantages'.*known are input_ids, labels, attention_mask, position_ids, padding_mask"
    ):
        ours.step([{"input_ids": ids, "labels": ids, "advantages": ids}])
    seen = []

    def loss_fn(hidden: Any, head: Any, batch: Any) -> Any:
        seen.append(sorted(batch))
        return head(hidden).float().square().sum()

    ours.step([{"input_ids": ids, "labels": ids, "advantages": ids}], loss_fn=loss_fn)
    assert seen == [["advantages", "input_ids", "labels"]]
    ours.step([{"input_ids": ids, "labels": ids, "token_type_ids": None}])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"micro_batch": (1, 500)}, r"micro_batch is \(1, 500\).*positions for 64 tokens"),
        ({"micro_batch": (1, 2.5)}, r"micro_batch must be \(rows, seq\)"),
        ({"micro_batch": 4}, r"micro_batch must be \(rows, seq\)"),
        ({"micro_batches": "2"}, "micro_batches must be at least 1, not '2'"),
        ({"label_smoothing": "0.1"}, "label_smoothing must be at least 0 and below 1, not '0.1'"),
        ({"z_loss": None}, "z_loss must be finite"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"seed": 2**64}, r"seed is 18446744073709551616; it must be below 2\*\*64"),
        ({"z_loss": 10**400}, "z_loss must be finite and not negative, not 1000"),
        ({"max_grad_norm": 10**400}, "max_grad_norm must be positive and finite, or None, not 1000"),
        ({"micro_batch": (2**40, 1)}, r"micro_batch is \(1099511627776, 1\); it must be at most 2147483647 tokens"),
        ({"micro_batches": 2**40}, "micro_batches is 1099511627776; it must be at most 2147483647"),
        ({"memory": {"host": 10**30}}, "memory.host: 10+ is more than any machine has; write at most 65536TiB"),
        ({"plan": {"loss_workspace": "9" * 400 + "GiB"}}, "loss_workspace: '9+GiB' is more than any machine has"),
        ({"plan": {"more_workspace": 10**30}}, "more_workspace: 10+ is more than any machine has"),
        ({"plan": {"activation": "save"}}, "plan.activation must be keep, offload or recompute, not 'save'"),
        ({"plan": {"inputs": 1}}, "plan.inputs must be device, host or disk, not 1"),
        ({"plan": {"isa": "avx"}}, "plan.isa must be auto, scalar, avx2 or avx512, not 'avx'"),
        ({"plan": {"compile": "false"}}, "plan.compile is 'false'; it must be true or false, and no text"),
        ({"plan": {"accumulate": 1}}, "plan.accumulate is 1; it must be true or false"),
        ({"deterministic": "false"}, "deterministic must be True or False, not 'false'"),
        ({"rates": 5}, "rates must be a dict, not int"),
        ({"rates": {"h2d_gbs": math.nan}}, "rates.h2d_gbs must be a finite number, not nan"),
        ({"tokenizer": "/a/folder"}, "tokenizer is '/a/folder', which is no tokenizer .* as tokenizer_dir"),
        ({"tokenizer_dir": "/nowhere/at/all"}, "tokenizer_dir is '/nowhere/at/all', and there is no such folder"),
        ({"model_dir": 5}, "'5' cannot be a folder"),
        ({"memory": "1GiB"}, "memory must be a dict, not str"),
        ({"memory": {"gpuu": "1GiB"}}, "unknown key 'gpuu'; did you mean gpu?"),
        ({"memory": {"gpu": "1 potato"}}, "memory.gpu: '1 potato': unknown unit 'potato'"),
        ({"memory": {"gpu": 0.5}}, "memory.gpu is 0.5; write bytes as a whole number"),
        ({"memory": {"host": True}}, "memory.host is True"),
        ({"plan": ["slots"]}, "plan must be a dict, not list"),
        ({"plan": {"loss_chunk": 1.5}}, r"loss_chunk is 1\.5; it must be a whole number of at least 1"),
    ],
)
def test_an_argument_that_cannot_be_used_is_refused_with_its_value(options: dict[str, Any], words: str) -> None:
    model = build()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=words):
        megatrain.Engine(model, device="cpu", **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_device_is_named_as_torch_names_it_and_another_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for known in (torch.device("cpu"), "cpu", "cpu:0"):
        assert megatrain.Engine(build(), device=known).device == torch.device("cpu")
    for unknown, words in (
        ("cuda:x", "not 'cuda:x'"),
        ("cuda:", "not 'cuda:'"),
        (torch.device("meta"), r"not device\(type='meta'\)"),
        (0, "not 0"),
        ("cpu:1", "device is 'cpu:1', and the host is one device"),
    ):
        with pytest.raises(ConfigError, match=words):
            megatrain.Engine(build(), device=unknown)  # type: ignore[arg-type]
    model = build()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for card in ("cuda", torch.device("cuda", 1)):
        with pytest.raises(ConfigError, match=r"device is cuda and there is no usable card: .*megatrain doctor"):
            megatrain.Engine(model, device=card)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="device is 'cuda:7', and there is no such card; cards are cuda:0 to cuda:1"):
        megatrain.Engine(model, device="cuda:7")


def test_a_state_dict_says_what_to_save_instead_of_itself(tmp_path: Path) -> None:
    ours = engine(build(), micro_batch=(2, 32), micro_batches=1)
    with pytest.raises(TypeError, match=r"dict\(engine.state_dict\(\)\).*save_pretrained"):
        torch.save(ours.state_dict(), tmp_path / "weights.pt")
    torch.save(dict(ours.state_dict()), tmp_path / "weights.pt")
    back = torch.load(tmp_path / "weights.pt")
    assert all(torch.equal(back[name], value) for name, value in weights(ours).items())


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_does_not_fit_is_left_as_it_was(tied: bool) -> None:
    model, data = build(tie_word_embeddings=tied), batches(1)[0]["input_ids"]
    before, parameters = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
    with torch.no_grad():
        logits = model(input_ids=data).logits
    refusals: list[tuple[Any, dict[str, Any]]] = [
        (DoesNotFit, {"micro_batch": (2, 32), "micro_batches": 1, "memory": {"host": "64KiB"}}),
        (ConfigError, {"freeze": ["no.such.parameter"]}),
        (ConfigError, {"optimizer": megatrain.AdamW(groups=[{"params": "no.such.parameter", "lr": 1.0}])}),
        (ConfigError, {"plan": {"slotss": 2}}),
    ]
    for error_type, options in refusals:
        with pytest.raises(error_type):
            megatrain.Engine(model, device="cpu", **options)
        assert all(one is parameters[name] for name, one in model.named_parameters())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        with torch.no_grad():
            assert torch.equal(model(input_ids=data).logits, logits)
    ours = megatrain.Engine(model, device="cpu", micro_batch=(2, 32), micro_batches=1)
    assert all(torch.equal(ours.state_dict()[name], before[name]) for name in before)
