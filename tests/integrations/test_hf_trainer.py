"""transformers' Trainer on the engine does what it does with torch: losses, norms, weights, callbacks, checkpoints."""

import copy
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

import megatrain
from megatrain.checkpoint.checkpoint import Checkpoint
from megatrain.errors import CheckpointError, ConfigError
from megatrain.integrations import TrainerMixin
from megatrain.weights.state_format import StateFormat
from support.reference import build

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate: pip install 'megatrain[trl]'")

from transformers import AutoModelForCausalLM, EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from support.hf_trainers import OnEngine, Rows, assert_equal_runs, logged, trained, trainer


def both(tmp_path: Path, model: Any = None, **options: Any) -> tuple[Any, Any]:
    """The same run on the engine and with torch."""
    model = model if model is not None else build()
    runs = []
    for kind in (OnEngine, Trainer):
        made = trainer(kind, model, tmp_path / kind.__name__, **copy.deepcopy(options))
        made.train()
        runs.append(made)
    return runs[0], runs[1]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_padded_rows_accumulation_clipping_decay_and_evaluation_are_those_of_torch(tmp_path: Path, kind: str) -> None:
    ours, stock = both(tmp_path, build(kind), eval_strategy="steps", eval_steps=5)
    assert_equal_runs(ours, stock)
    assert len(logged(ours, "eval_loss")) == 4
    assert ours.engine.num_steps == 20
    assert ours.state.total_flos == stock.state.total_flos


def test_without_clipping_and_with_an_epoch_that_ends_in_a_shorter_step(tmp_path: Path) -> None:
    changes = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3, "max_grad_norm": 0.0}
    ours, stock = both(tmp_path, given={"train_dataset": Subset(Rows(), range(17))}, **changes)
    assert ours.state.global_step == 6
    assert_equal_runs(ours, stock)


def test_every_set_of_several_is_evaluated_by_itself(tmp_path: Path) -> None:
    sets = {"short": Subset(Rows(), range(4)), "long": Subset(Rows(), range(4, 12))}
    ours, stock = both(tmp_path, given={"eval_dataset": sets}, eval_strategy="steps", eval_steps=10)
    assert_equal_runs(ours, stock)
    assert logged(ours, "eval_short_loss") != logged(ours, "eval_long_loss")


class ChangesSettings(TrainerCallback):
    """Changes what it may change: decay and a group's learning rate."""

    def on_step_begin(self, _: Any, state: Any, *__: Any, optimizer: Any = None, **___: Any) -> None:
        if state.global_step == 7:
            optimizer.param_groups[0]["weight_decay"] = 0.7
        if state.global_step >= 10:
            optimizer.param_groups[1]["lr"] *= 3


def test_what_a_callback_changes_in_the_optimizer_counts(tmp_path: Path) -> None:
    model = build()
    ours, stock = both(tmp_path, model, given={"callbacks": [ChangesSettings()]})
    assert_equal_runs(ours, stock)
    without, _ = both(tmp_path / "without", model)
    assert not torch.equal(trained(ours)["model.norm.weight"], trained(without)["model.norm.weight"])


class Order(TrainerCallback):
    """Notes how many updates the engine has made when it is called."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.seen: list[tuple[str, int]] = []

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.seen.append(("before", self.engine.num_steps))

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.seen.append(("after", self.engine.num_steps))


def test_callbacks_around_an_update_stand_around_it(tmp_path: Path) -> None:
    order = Order()
    run = trainer(OnEngine, build(), tmp_path, max_steps=2, given={"callbacks": [order]})
    order.engine = run.engine
    run.train()
    assert order.seen == [("before", 0), ("after", 1), ("before", 1), ("after", 2)]


def test_it_stops_early_and_ends_with_the_best_model_where_torch_does(tmp_path: Path) -> None:
    changes = {
        "learning_rate": 3e-3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "save_total_limit": 2,
    }
    # four rows, which are soon known by heart
    few = Subset(Rows(), range(40, 44))
    given = {"callbacks": [EarlyStoppingCallback(early_stopping_patience=2)], "train_dataset": few}
    ours, stock = both(tmp_path, given=given, **changes)
    assert stock.state.global_step < 20
    assert ours.state.global_step == stock.state.global_step
    assert ours.state.best_global_step == stock.state.best_global_step < ours.state.global_step
    assert_equal_runs(ours, stock)
    assert ours.evaluate()["eval_loss"] == pytest.approx(stock.state.best_metric, rel=1e-5)
    saved = AutoModelForCausalLM.from_pretrained(ours.state.best_model_checkpoint).state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in trained(ours).items())


def test_a_run_in_two_parts_is_bit_for_bit_the_run_in_one(tmp_path: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 5}
    whole = trainer(OnEngine, build(), tmp_path / "whole", **changes)
    whole.train()
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for late in ("checkpoint-20", "checkpoint-15"):
        shutil.rmtree(tmp_path / "parts" / late)
    (tmp_path / "parts/checkpoint-10/trainer_state.json").write_text('{"log_history": [')  # its save was cut off
    # other initial weights, so that everything has to come from the checkpoint
    resumed = trainer(OnEngine, build(seed=1), tmp_path / "parts", **changes)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert logged(resumed, "learning_rate") == logged(whole, "learning_rate")
    assert all(torch.equal(weight, trained(whole)[name]) for name, weight in trained(resumed).items())
    name = "model.layers.3.mlp.up_proj.weight"
    moments, wanted = resumed.engine.optimizer_state(name), whole.engine.optimizer_state(name)
    assert torch.equal(moments["exp_avg_sq"], wanted["exp_avg_sq"])
    assert moments["step"] == wanted["step"] == 20
    state = json.loads((tmp_path / "parts/checkpoint-20/trainer_state.json").read_text())
    assert state["global_step"] == 20


def test_resuming_from_what_is_no_complete_checkpoint_of_the_engine_is_refused(tmp_path: Path) -> None:
    stock = trainer(Trainer, build(), tmp_path / "stock", max_steps=2, save_strategy="steps", save_steps=2)
    stock.train()
    run = trainer(OnEngine, build(), tmp_path / "ours", max_steps=2)
    with pytest.raises(CheckpointError, match=r"checkpoint-2 is no complete checkpoint of the engine"):
        run.train(resume_from_checkpoint=str(tmp_path / "stock/checkpoint-2"))
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        run.train(resume_from_checkpoint=True)
    run.train()
    assert run.engine.num_steps == 2


def test_metrics_are_computed_from_the_logits_that_torch_gives(tmp_path: Path) -> None:
    def accuracy(found: Any) -> dict[str, float]:
        predicted, wanted = found.predictions[:, :-1].argmax(-1), found.label_ids[:, 1:]
        supervised = wanted != -100
        mean = found.predictions[:, :-1][supervised].mean()
        return {"accuracy": float((predicted == wanted)[supervised].mean()), "mean": float(mean)}

    ours, stock = both(tmp_path, given={"compute_metrics": accuracy}, max_steps=2, eval_strategy="steps", eval_steps=1)
    assert logged(ours, "eval_accuracy") == logged(stock, "eval_accuracy")
    assert logged(ours, "eval_mean") == pytest.approx(logged(stock, "eval_mean"), rel=1e-4)
    mine, theirs = (torch.tensor(run.predict(Subset(Rows(), range(1))).predictions) for run in (ours, stock))
    assert mine.shape == (1, len(Rows()[0]["input_ids"]), 256)
    assert torch.allclose(mine, theirs, atol=1e-5)


def test_evaluation_of_rows_without_a_supervised_token_is_not_a_number(tmp_path: Path) -> None:
    run = trainer(OnEngine, build(), tmp_path)
    nothing = [{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}]
    assert math.isnan(run.evaluate(nothing)["eval_loss"])


def test_the_saved_model_is_stock_and_stands_beside_the_checkpoints(tmp_path: Path) -> None:
    run = trainer(OnEngine, build(), tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "pytorch_model.bin").write_text("an older export")
    run.train()
    for _ in range(2):  # the second time over the first
        run.save_model()
    found = {path.name for path in tmp_path.iterdir()}
    assert {"checkpoint-1", "checkpoint-2", "notes.txt", "model.safetensors", "config.json"} <= found
    assert not found & {"pytorch_model.bin", "model"}
    assert not [name for name in found if name.startswith(".tmp")]
    model, loaded = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not loaded["missing_keys"]
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in trained(run).items())


class StopsInsideStep(TrainerCallback):
    """Raises, or asks to stop, between two batches of the third step."""

    def __init__(self, error: type[BaseException] | None) -> None:
        self.error = error

    def on_substep_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        if state.global_step == 2:
            if self.error is not None:
                raise self.error
            control.should_training_stop = True


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_step_that_is_cut_off_leaves_the_weights_of_the_step_before_and_an_engine_that_goes_on(
    tmp_path: Path, error: type[BaseException] | None
) -> None:
    wanted = trainer(OnEngine, build(), tmp_path / "wanted", max_steps=2, lr_scheduler_type="constant", warmup_steps=0)
    wanted.train()
    changes = {"lr_scheduler_type": "constant", "warmup_steps": 0}
    run = trainer(OnEngine, build(), tmp_path, given={"callbacks": [StopsInsideStep(error)]}, **changes)
    if error is None:
        run.train()
    else:
        with pytest.raises(error):
            run.train()
    assert run.engine.num_steps == 2
    assert all(torch.equal(weight, trained(wanted)[name]) for name, weight in trained(run).items())
    run.pop_callback(StopsInsideStep)
    run.train()
    assert run.engine.num_steps == 22


def test_a_model_on_disk_is_trained_as_options_of_the_engine_say(tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path / "model")
    options = {"freeze": ["model.embed_tokens.*"], "device": "cpu", "plan": {"slots": 2}}
    run = trainer(OnEngine, str(tmp_path / "model"), tmp_path / "run", max_steps=2, given={"engine_options": options})
    run.train()
    assert run.engine.plan["slots"] == 2
    assert run.engine.decoder.precision == "fp32"
    before = model.state_dict()
    moved = {name for name, weight in trained(run).items() if not torch.equal(weight, before[name])}
    assert "model.embed_tokens.weight" not in moved
    assert len(moved) == len(before) - 1


def test_smaller_states_are_options_of_the_engine_and_are_resumed_bit_for_bit(tmp_path: Path) -> None:
    def run(name: str, seed: int = 0, **given: Any) -> Any:
        states = {"engine_options": {"moments": "8bit", "master": "24bit", "precision": "bf16", **given}}
        changes = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
        return trainer(OnEngine, build(seed=seed), tmp_path / name, given=states, **changes)

    whole = run("whole")
    whole.train()
    assert Checkpoint.open(tmp_path / "whole/checkpoint-3").state_format() == StateFormat("8bit", "24bit")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts/checkpoint-6")
    parts = run("parts", seed=1)
    parts.train(resume_from_checkpoint=True)
    assert logged(parts, "loss") == logged(whole, "loss")
    assert all(torch.equal(weight, trained(whole)[name]) for name, weight in trained(parts).items())
    with pytest.raises(CheckpointError, match="moments: 8bit"):
        run("parts", moments="fp32").train(resume_from_checkpoint=True)


def test_an_engine_is_trained_with_the_arguments_of_the_trainer_and_immediate_updates_too(tmp_path: Path) -> None:
    model = build()
    engine = megatrain.Engine(copy.deepcopy(model), device="cpu", update="immediate", max_grad_norm=None)
    ours = trainer(OnEngine, engine, tmp_path / "ours", max_grad_norm=0.0)
    ours.train()
    stock = trainer(Trainer, model, tmp_path / "stock", max_grad_norm=0.0)
    stock.train()
    assert ours.engine is engine
    assert_equal_runs(ours, stock)
    with pytest.raises(ConfigError, match="immediate cannot clip"):
        trainer(OnEngine, engine, tmp_path / "clipped", max_grad_norm=1.0)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fsdp": True}, "fsdp is"),
    ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "deepspeed is"),
    ({"torch_compile": True}, "torch_compile is True"),
    ({"optim": "adafactor"}, "optim is .*adafactor"),
    ({"optim": "sgd"}, "the engine's optimizer is AdamW"),
    ({"optim": "paged_adamw_8bit"}, "engine_options={'moments': '8bit'} for 8-bit moments"),
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is 0.1"),
    ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha is 5.0"),
    (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        "checkpointing_kwargs",
    ),
    ({"auto_find_batch_size": True}, "auto_find_batch_size is True"),
    ({"torch_empty_cache_steps": 4}, "torch_empty_cache_steps is 4"),
    ({"use_liger_kernel": True}, "use_liger_kernel is True"),
    ({"push_to_hub": True}, "push_to_hub is True"),
    ({"bf16": True}, r"bf16 is True, but the engine computes in fp32"),
    ({"full_determinism": True}, "without deterministic=True"),
    ({"save_only_model": True, "load_best_model_at_end": True}, "save_only_model and load_best_model_at_end"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_arguments_that_the_engine_cannot_follow_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    from support.hf_trainers import arguments

    args = arguments(tmp_path)
    for name, value in changes.items():  # past the checks of TrainingArguments, which ask for other packages first
        setattr(args, name, value)
    model = build()
    engine = megatrain.Engine(copy.deepcopy(model), device="cpu")
    with pytest.raises(ConfigError, match=words):
        OnEngine(model=engine, args=args, train_dataset=Rows())


def test_use_cpu_makes_an_engine_on_the_cpu_where_there_is_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    made = megatrain.Engine.__init__

    def noting(self: megatrain.Engine, model: Any, **options: Any) -> None:
        asked.append(options.get("device"))
        made(self, model, **options)

    monkeypatch.setattr(megatrain.Engine, "__init__", noting)
    model = build()
    model.save_pretrained(tmp_path / "model")
    trainer(OnEngine, model, tmp_path / "run")
    folder = trainer(OnEngine, str(tmp_path / "model"), tmp_path / "run")
    assert asked[0] == "cpu"
    assert folder.engine.device.type == "cpu"
    with pytest.raises(ConfigError, match=r"use_cpu is True, but the engine's device is cuda:0.*device='cpu'"):
        trainer(OnEngine, model, tmp_path / "run", given={"engine_options": {"device": "cuda:0"}})
    assert len(asked) == 2  # that was refused before an engine took the model's weights


def test_use_cpu_with_an_engine_on_a_card_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = megatrain.Engine(build(), device="cpu")
    trainer(OnEngine, engine, tmp_path)
    monkeypatch.setattr(megatrain.Engine, "device", torch.device("cuda", 0))
    with pytest.raises(ConfigError, match="use_cpu is True, but the engine's device is cuda:0"):
        trainer(OnEngine, engine, tmp_path)


def test_gradient_checkpointing_alone_is_left_to_the_plan(tmp_path: Path) -> None:
    known = TrainingArguments.__dataclass_fields__
    name = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    ours, stock = both(tmp_path, max_steps=3, **{name: True})
    assert_equal_runs(ours, stock)


def test_keywords_that_the_engine_cannot_follow_are_refused_by_name(tmp_path: Path) -> None:
    model = build()
    for given, words in (
        ({"model_init": build}, "model_init cannot be used"),
        ({"compute_loss_func": lambda *_: None}, "compute_loss_func cannot be used"),
        ({"optimizers": (torch.optim.SGD(model.parameters(), lr=1.0), None)}, "optimizers cannot be used"),
        ({"engine_options": {"max_grad_norm": 1.0}}, "max_grad_norm is decided by the training arguments"),
        ({"engine_options": "slots"}, "engine_options must be a dict"),
    ):
        with pytest.raises(ConfigError, match=words):
            trainer(OnEngine, model, tmp_path, given=given)
    with pytest.raises(ConfigError, match=r"model must be a megatrain\.Engine, a model, or the folder"):
        trainer(OnEngine, None, tmp_path)
    with pytest.raises(ConfigError, match="engine_options were given with an engine"):
        trainer(OnEngine, megatrain.Engine(build(), device="cpu"), tmp_path, given={"engine_options": {"seed": 1}})
    for action in ("push_to_hub", "hyperparameter_search"):
        with pytest.raises(ConfigError, match=action):
            getattr(trainer(OnEngine, model, tmp_path), action)()


def test_a_typo_is_answered_with_the_nearest_word(tmp_path: Path) -> None:
    for given, words in (
        ({"train_datasets": Rows()}, r"OnEngine has no argument 'train_datasets'; did you mean train_dataset\?"),
        ({"engine_option": {}}, r"no argument 'engine_option'; did you mean engine_options\?"),
        ({"engine_options": {"freze": []}}, r"no argument 'freze'; did you mean freeze\?"),
    ):
        with pytest.raises(TypeError, match=words):
            trainer(OnEngine, build(), tmp_path, given=given)
    with pytest.raises(ConfigError, match=r"plan: unknown key 'slot'; did you mean slots\?"):
        trainer(OnEngine, build(), tmp_path, given={"engine_options": {"plan": {"slot": 2}}})


def test_a_loss_of_its_own_and_a_missing_trainer_are_refused(tmp_path: Path) -> None:
    class WithLoss(TrainerMixin, Trainer):
        def compute_loss(self, *_: Any, **__: Any) -> Any:
            raise AssertionError

    class WrongOrder(Trainer, TrainerMixin):
        pass

    with pytest.raises(ConfigError, match=r"WithLoss\.compute_loss calls the model itself"):
        trainer(WithLoss, build(), tmp_path)
    with pytest.raises(ConfigError, match="TrainerMixin is no Trainer"):
        TrainerMixin(model=build())
    del WrongOrder


class OwnInputs(Trainer):
    """Changes labels where stock prepares a batch."""

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return super()._prepare_inputs({**inputs, "labels": inputs["input_ids"]})


class OwnStep(Trainer):
    """Scales the loss of a step."""

    def training_step(self, *given: Any, **keywords: Any) -> Any:
        return 2 * super().training_step(*given, **keywords)


class OwnBatches(Trainer):
    """Calls that the mixin passes on run as with torch."""

    def get_batch_samples(self, *given: Any) -> Any:
        batches, count = super().get_batch_samples(*given)
        return [{**batch, "labels": batch["input_ids"]} for batch in batches], count


def test_methods_of_a_trainer_that_the_mixin_would_pass_over_are_refused_by_name(tmp_path: Path) -> None:
    class Inputs(TrainerMixin, OwnInputs):
        pass

    class InputsAfterwards(OnEngine):
        def _prepare_inputs(self, *_: Any) -> Any:
            raise AssertionError

    class Step(TrainerMixin, OwnStep):
        pass

    for kind, words in (
        (Inputs, r"OwnInputs\._prepare_inputs would never be called"),
        (InputsAfterwards, r"InputsAfterwards\._prepare_inputs would never be called"),
        (Step, r"OwnStep\.training_step would never be called .* in a class before TrainerMixin"),
    ):
        with pytest.raises(ConfigError, match=words):
            trainer(kind, build(), tmp_path)


def test_a_method_that_the_mixin_calls_may_be_ones_own(tmp_path: Path) -> None:
    class Batches(TrainerMixin, OwnBatches):
        pass

    class StepBefore(OnEngine):
        steps = 0

        def training_step(self, *given: Any, **keywords: Any) -> Any:
            self.steps += 1
            return super().training_step(*given, **keywords)

    model = build()
    ours, stock = trainer(Batches, model, tmp_path / "a"), trainer(OwnBatches, model, tmp_path / "b")
    ours.train()
    stock.train()
    assert_equal_runs(ours, stock)
    counting = trainer(StepBefore, model, tmp_path / "c", max_steps=2)
    counting.train()
    assert counting.steps == 4


def test_an_optimizer_of_a_subclass_is_refused(tmp_path: Path) -> None:
    class WithSGD(OnEngine):
        def create_optimizer(self, model: Any = None) -> Any:  # noqa: ARG002
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
            return self.optimizer

    with pytest.raises(ConfigError, match="the SGD that create_optimizer made cannot be used on the engine"):
        trainer(WithSGD, build(), tmp_path).train()


class Unfreezes(TrainerCallback):
    """Makes a frozen parameter trainable at the third step."""

    def on_step_begin(self, _: Any, state: Any, *__: Any, model: Any = None, **___: Any) -> None:
        if state.global_step == 2:
            model.model.embed_tokens.weight.requires_grad_(True)


def test_what_is_frozen_is_decided_before_the_trainer_is_made(tmp_path: Path) -> None:
    run = trainer(OnEngine, build(), tmp_path / "late")
    run.model.model.embed_tokens.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"requires_grad is False for model\.embed_tokens\.weight: frozen after"):
        run.train()
    assert run.engine.num_steps == 0

    model = build()
    model.model.embed_tokens.weight.requires_grad_(False)
    ours, stock = both(tmp_path, model, max_steps=3)
    assert_equal_runs(ours, stock)
    run = trainer(OnEngine, model, tmp_path / "unfreezes", given={"callbacks": [Unfreezes()]})
    with pytest.raises(ConfigError, match=r"requires_grad is True for model\.embed_tokens\.weight: made trainable"):
        run.train()
    assert run.engine.num_steps == 2


def test_labels_that_were_shifted_otherwise_are_refused(tmp_path: Path) -> None:
    run = trainer(OnEngine, build(), tmp_path)
    ids = torch.arange(8).view(1, 8)
    right = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
    plain = run.engine.evaluate([{"input_ids": ids, "labels": ids}])
    for batch in ({"labels": ids, "shift_labels": right}, {"shift_labels": right}):
        loss, *_ = run.prediction_step(run.model, {"input_ids": ids, "labels": ids, **batch}, True)
        assert float(loss) == pytest.approx(plain)
    with pytest.raises(ConfigError, match=re.escape("shift_labels are not labels moved by one token")):
        run.prediction_step(run.model, {"input_ids": ids, "labels": ids, "shift_labels": ids}, True)
