"""What an engine is asked in vain: refused by name, and it goes on."""

import copy
import functools
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import megatrain
from megatrain.checkpoint import checkpoint
from megatrain.errors import CheckpointError, ConfigError, DamagedCheckpoint, EngineBroken
from support.reference import batches, build, engine


def test_what_is_no_list_of_batches_is_refused_alike_by_every_call() -> None:
    ours, (batch,) = engine(build()), batches(1)
    wrong: list[tuple[Any, str]] = [
        (batch, "write \\[batch\\]"),
        ((b for b in [batch]), "not generator"),
        (None, "not NoneType"),
        (ours.prepare([batch]), "give the list of dicts itself"),
    ]
    for call in (ours.evaluate, ours.logprobs):
        for given, words in wrong:
            with pytest.raises(ConfigError, match=words):
                call(given)
        with pytest.raises(ConfigError, match="micro-batch 0 must be a dict of tensors, not str"):
            call(["abc"])  # type: ignore[list-item]
    for given, words in wrong[:-1]:
        with pytest.raises(ConfigError, match=words):
            ours.step(given)
    assert ours.evaluate([batch]) == pytest.approx(ours.step([batch]).loss)


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: {"input_ids": ids > 7},
        lambda ids: {"labels": ids > 7},
        lambda ids: {"input_ids": ids.to(torch.complex64)},
        lambda ids: {"input_ids": ids.to_sparse()},
        lambda ids: {"input_ids": torch.nested.nested_tensor([ids[0], ids[1, :5]], layout=torch.jagged)},
        lambda ids: {"position_ids": ids > 7},
    ],
    ids=["bool ids", "bool labels", "complex", "sparse", "nested", "bool positions"],
)
def test_tensors_that_hold_no_integers_are_refused(change: Any) -> None:
    ours, (batch,) = engine(build()), batches(1)
    with pytest.raises(ConfigError, match="must be integers of shape"):
        ours.step([batch | change(batch["input_ids"])])
    ours.step([batch | {"attention_mask": torch.ones(2, 32, dtype=torch.bool)}])


def test_prepared_micro_batches_are_refused_by_a_step_that_they_were_not_prepared_for() -> None:
    def loss_fn(hidden: Any, head: Any, batch: Any) -> Any:
        return -head.logprobs(hidden, batch["labels"]).sum()

    ours, other, (batch,) = engine(build()), engine(build()), batches(1)
    weighted = batch | {"loss_weights": torch.tensor([0.5, 2.0])}
    with_one, without = ours.prepare([weighted], with_loss_fn=True), ours.prepare([weighted])
    before = dict(ours.state_dict())
    for call in (ours.step, ours.forward_backward):
        with pytest.raises(ConfigError, match="loss_weights would not be applied; prepare them without with_loss_fn"):
            call(with_one)
        with pytest.raises(ConfigError, match=r"would be left out; prepare them with .*with_loss_fn=True"):
            call(without, loss_fn=loss_fn)
    with pytest.raises(ConfigError, match="prepared by another engine"):
        other.step(without)
    assert all(torch.equal(value, ours.weight(name)) for name, value in before.items())
    assert ours.step(without).loss == other.step([weighted]).loss
    assert ours.step(with_one, loss_fn=loss_fn).loss == other.step([weighted], loss_fn=loss_fn).loss


def test_a_loss_function_is_called_and_takes_no_settings_place() -> None:
    (batch,) = batches(1)
    with pytest.raises(ConfigError, match=r"loss_fn must be a function of .*, not 'mean'"):
        engine(build()).step([batch], loss_fn="mean")  # type: ignore[arg-type]
    for settings in ({"label_smoothing": 0.1}, {"z_loss": 1e-4}):
        with pytest.raises(ConfigError, match=rf"{next(iter(settings))} is .* applies to the built-in loss only"):
            engine(build(), **settings).step([batch], loss_fn=lambda hidden, head, _: head(hidden).sum())


def test_a_learning_rate_is_taken_as_a_number_of_its_own(tmp_path: Path) -> None:
    ours = engine(build())
    given = torch.tensor(0.25)
    ours.set_lr(given)  # type: ignore[arg-type]
    given.fill_(7.0)
    assert ours.optimizer.lr == 0.25
    ours.set_lr(np.float32(0.5))  # type: ignore[arg-type]
    ours.save(tmp_path / "saved")
    for wrong in (True, "1e-3", None, [1.0], 10**400, float("nan"), torch.ones(2)):
        with pytest.raises(ConfigError, match=r"lr must be (finite|a finite number) and not negative"):
            ours.set_lr(wrong)  # type: ignore[arg-type]
    assert ours.optimizer.lr == 0.5


def test_engines_that_were_given_one_optimizer_do_not_share_it() -> None:
    given = megatrain.AdamW(lr=0.5)
    one, other = engine(build(), optimizer=given), engine(build(), optimizer=given)
    one.set_lr(0.0)
    assert (one.optimizer.lr, other.optimizer.lr, given.lr) == (0.0, 0.5, 0.5)
    one.set_optimizer(given)
    one.set_lr(0.25)
    assert (one.optimizer.lr, other.optimizer.lr, given.lr) == (0.25, 0.5, 0.5)


@pytest.mark.parametrize("loss_fn", [None, lambda hidden, head, batch: -head.logprobs(hidden, batch["labels"]).sum()])
def test_a_prepared_step_is_that_of_what_the_tensors_held(loss_fn: Any) -> None:
    (first,), (second,) = batches(1), batches(1, seed=5)
    wanted = engine(build()).step([first], loss_fn=loss_fn)
    ours = engine(build())
    held = {name: value.clone() for name, value in first.items()}
    prepared = ours.prepare([held], with_loss_fn=loss_fn is not None)
    for name, value in held.items():
        value.copy_(second[name])
    found = ours.step(prepared, loss_fn=loss_fn)
    assert (found.loss, found.grad_norm) == (wanted.loss, wanted.grad_norm)


def test_a_model_with_a_loss_of_its_own_is_refused() -> None:
    model = build()
    model.loss_function = lambda *_, **__: torch.zeros(())
    with pytest.raises(ConfigError, match=r"has a loss of its own .*set on the instance as loss_function"):
        engine(model)


def test_an_embedding_that_is_computed_from_parameters_is_refused() -> None:
    class Adapted(torch.nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.embedding(ids, self.weight * 2)

    model = build()
    old = model.get_input_embeddings()
    model.set_input_embeddings(Adapted(*old.weight.shape))
    with pytest.raises(ConfigError, match="looks tokens up in a tensor that it computes from parameters"):
        engine(model)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_was_tied_or_untied_by_hand_is_exported_as_it_is(tmp_path: Path, tied: bool) -> None:
    model = build(tie_word_embeddings=not tied)
    with torch.no_grad():
        model.lm_head.weight = (
            model.get_input_embeddings().weight if tied else torch.nn.Parameter(model.lm_head.weight * 1.5)
        )
    ours, data = engine(model), batches(1)
    wanted = ours.evaluate(data)
    ours.save_pretrained(tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert loaded.config.tie_word_embeddings is tied
    assert engine(loaded).evaluate(data) == pytest.approx(wanted, rel=1e-6)
    assert megatrain.Engine.from_pretrained(tmp_path / "export", precision="fp32").evaluate(data) == pytest.approx(
        wanted, rel=1e-6
    )


def test_a_load_that_is_refused_before_it_began_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    ours, data = engine(build()), batches(1)
    ours.step(data)
    before = dict(ours.state_dict())
    for wrong in (None, 3, b"folder", tmp_path / ("x" * 300), f"{tmp_path}/a\0b"):
        for call in (ours.load, ours.save, ours.save_pretrained):
            with pytest.raises(ConfigError, match="cannot be a folder"):
                call(wrong)  # type: ignore[operator]
    for state in ([1], "ab", 3):
        with pytest.raises(ConfigError, match="state must be a dict"):
            ours.save(tmp_path / "saved", state)  # type: ignore[arg-type]
    assert all(torch.equal(value, ours.weight(name)) for name, value in before.items())
    ours.step(data)


def test_an_engine_that_a_damaged_checkpoint_was_half_read_into_says_so(tmp_path: Path) -> None:
    ours, data = engine(build()), batches(1)
    ours.save(tmp_path / "first")
    ours.step(data)
    ours.save(tmp_path / "second")
    ours.load(tmp_path / "first")
    # the moments come last: by then the weights have been replaced
    path = next((tmp_path / "second").glob("exp_avg_sq*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint):
        ours.load(tmp_path / "second")
    with pytest.raises(EngineBroken, match="second found it damaged, so weights of two states are mixed"):
        ours.step(data)
    with pytest.raises(CheckpointError, match="does not exist"):
        ours.load(tmp_path / "third")
    with pytest.raises(EngineBroken, match="two states are mixed"):
        ours.state_dict()
    ours.load(tmp_path / "first")
    assert ours.step(data).loss == engine(build()).step(data).loss


def test_an_engine_is_neither_pickled_nor_copied() -> None:
    ours = engine(build())
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"use engine\.save"):
            call(ours)
    assert megatrain.AdamW(lr=0.5).lr == pickle.loads(pickle.dumps(ours.optimizer)).lr * 0.5 / 3e-4


def test_a_name_that_is_too_long_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.Checkpoint.open(tmp_path / ("x" * 300))


def test_a_model_may_be_named_by_a_path_and_by_nothing_else(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path / "model")
    ours = megatrain.Engine.from_pretrained(tmp_path / "model", device="cpu")
    assert ours.step(batches(1)).loss == engine(build()).step(batches(1)).loss
    for wrong in (None, 3, [str(tmp_path)]):
        with pytest.raises(ConfigError, match="a model is named by a folder"):
            megatrain.Engine.from_pretrained(wrong)  # type: ignore[arg-type]


def test_what_is_frozen_is_named_by_patterns() -> None:
    for wrong in (3, [3], {"*norm*": True}):
        with pytest.raises(ConfigError, match="freeze must be a pattern of parameter names"):
            engine(build(), freeze=wrong)


@pytest.mark.parametrize("closing", ["main", "other"])
def test_an_engine_closed_while_another_thread_computes_says_so_there(closing: str) -> None:
    model, data = build(), batches(4)

    def until_it_ends(ours: megatrain.Engine, said: list[BaseException]) -> None:
        try:
            while True:
                ours.step(data)
        except BaseException as error:
            said.append(error)

    def after(seconds: float, ours: megatrain.Engine) -> None:
        time.sleep(seconds)
        ours.close()

    for turn in range(6):
        ours, said = engine(model), list[BaseException]()
        work = functools.partial(until_it_ends, ours, said), functools.partial(after, 0.02 + 0.004 * turn, ours)
        here, there = reversed(work) if closing == "main" else work
        thread = threading.Thread(target=there)
        thread.start()
        here()
        thread.join()
        assert [type(error) for error in said] == [EngineBroken], said
        assert "closed" in str(said[0])
