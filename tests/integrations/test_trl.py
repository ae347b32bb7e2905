"""TRL's SFTTrainer on the engine does what it does with torch, whatever it does with the rows."""

import copy
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
pytest.importorskip("trl", reason="TRL is not installed: pip install 'megatrain[trl]'")

import trl
from datasets import Dataset, disable_progress_bars

from megatrain.errors import ConfigError
from megatrain.integrations import TrainerMixin
from megatrain.integrations.hf_trainer import WeightedCollator
from support.hf_trainers import assert_equal_runs, logged, trained
from support.reference import build
from support.tiny_tokenizer import tiny_tokenizer

disable_progress_bars()
pytestmark = pytest.mark.filterwarnings("default")  # TRL's and its dependencies' are their own

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = "the quick brown fox jumps over a lazy dog and paris is the capital of france".split()


class SFTOnEngine(TrainerMixin, trl.SFTTrainer):
    """SFTTrainer on the engine."""


def tokenizer() -> Any:
    return tiny_tokenizer(specials=("<|user|>", "<|assistant|>", "<|end|>"), template=TEMPLATE, vocab_size=340)


def sentence(index: int, least: int, most: int) -> str:
    generator = torch.Generator().manual_seed(index)
    count = int(torch.randint(least, most, (1,), generator=generator))
    return " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (count,), generator=generator).tolist())


def chats(count: int = 60) -> Dataset:
    turns = [(("user", sentence(i, 1, 6)), ("assistant", sentence(1000 + i, 2, 9))) for i in range(count)]
    return Dataset.from_list([{"messages": [{"role": r, "content": c} for r, c in chat]} for chat in turns])


def texts(count: int = 60) -> Dataset:
    return Dataset.from_list([{"text": sentence(i, 3, 14)} for i in range(count)])


def pairs(count: int = 60) -> Dataset:
    rows = [{"prompt": sentence(i, 2, 6), "completion": " " + sentence(1000 + i, 2, 9)} for i in range(count)]
    return Dataset.from_list(rows)


def sft(
    kind: Any, model: Any, folder: Path, rows: Dataset, *, given: dict[str, Any] | None = None, **changes: Any
) -> Any:
    settings: dict[str, Any] = {
        "max_steps": 20,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "warmup_steps": 3,
        "max_length": 48,
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "steps",
        "eval_steps": 10,
        "bf16": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "report_to": [],
        "disable_tqdm": True,
    }
    return kind(
        model=copy.deepcopy(model) if isinstance(model, torch.nn.Module) else model,
        args=trl.SFTConfig(output_dir=str(folder), **{**settings, **changes}),
        train_dataset=rows,
        eval_dataset=rows.select(range(9)),
        processing_class=tokenizer(),
        **(given or {}),
    )


def both(tmp_path: Path, rows: Dataset, **changes: Any) -> tuple[Any, Any]:
    """The same run on the engine and with torch."""
    model = build(vocab_size=len(tokenizer()))
    runs = []
    for kind in (SFTOnEngine, trl.SFTTrainer):
        made = sft(kind, model, tmp_path / kind.__name__, rows, **changes)
        made.train()
        runs.append(made)
    return runs[0], runs[1]


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (texts, {}),
        (texts, {"packing": True}),
        (texts, {"padding_free": True, "max_length": None}),
        (chats, {"assistant_only_loss": True}),
        (chats, {"assistant_only_loss": True, "packing": True, "gradient_accumulation_steps": 1}),
        (pairs, {"completion_only_loss": True}),
    ],
    ids=["padded", "packed", "padding-free", "assistant-only", "assistant-only-packed", "completion-only"],
)
def test_a_run_is_that_of_torch(tmp_path: Path, rows: Any, changes: dict[str, Any]) -> None:
    ours, stock = both(tmp_path, rows(), **changes)
    assert_equal_runs(ours, stock)
    assert len(logged(ours, "loss")) == 20
    assert len(logged(ours, "eval_loss")) == 2
    assert logged(ours, "num_tokens") == logged(stock, "num_tokens")
    for key in ("eval_mean_token_accuracy", "eval_num_tokens"):
        assert logged(ours, key) == pytest.approx(logged(stock, key), abs=1e-6)
    assert logged(ours, "loss")[-1] < logged(ours, "loss")[0]


class WeightedSFT(trl.SFTTrainer):
    """Stock, with each row's losses multiplied by its weight and divided by the sum of the tokens' weights."""

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns = [*dict.fromkeys([*self._signature_columns, "loss_weights"])]

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        weights = inputs.pop("loss_weights")
        labels = inputs["labels"][:, 1:]
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False)
        losses = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].float().transpose(1, 2), labels, reduction="none"
        )
        factors = weights[:, None] * (labels != -100)
        loss = (losses * factors).sum() / factors.sum()
        return (loss, outputs) if return_outputs else loss


def test_rows_with_weights_are_those_of_torch(tmp_path: Path) -> None:
    rows = pairs().map(lambda _, index: {"loss_weights": (index % 4) / 2 + 0.25}, with_indices=True)
    model = build(vocab_size=len(tokenizer()))
    ours = sft(SFTOnEngine, model, tmp_path / "ours", rows, gradient_accumulation_steps=1)
    stock = sft(WeightedSFT, model, tmp_path / "stock", rows, gradient_accumulation_steps=1)
    stock.data_collator = WeightedCollator(stock.data_collator)
    ours.train()
    stock.train()
    assert_equal_runs(ours, stock)
    plain = sft(SFTOnEngine, model, tmp_path / "plain", pairs(), gradient_accumulation_steps=1)
    plain.train()
    assert logged(plain, "loss")[1:] != pytest.approx(logged(ours, "loss")[1:], rel=1e-3)


@pytest.mark.parametrize("how", [{"packing": True}, {"padding_free": True, "max_length": None}])
def test_weights_that_trl_would_lose_are_refused(tmp_path: Path, how: dict[str, Any]) -> None:
    rows = pairs().map(lambda _: {"loss_weights": 0.5})
    with pytest.raises(ConfigError, match=f"{next(iter(how))} is True and the data set has loss_weights"):
        sft(SFTOnEngine, build(vocab_size=len(tokenizer())), tmp_path, rows, **how)


def test_packed_documents_never_see_each_other(tmp_path: Path) -> None:
    """Equality alone would not show that both keep them apart."""
    run = sft(SFTOnEngine, build(vocab_size=len(tokenizer())), tmp_path, texts(), packing=True)
    batch = next(iter(run.get_train_dataloader()))
    assert batch["input_ids"].shape[0] == 1
    cuts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), batch["position_ids"].shape[1]]
    assert len(cuts) > 3
    alone = [
        run.engine.evaluate([{"input_ids": batch["input_ids"][:, a:b], "labels": batch["labels"][:, a:b]}])
        * (b - a - 1)
        for a, b in itertools.pairwise(cuts)
    ]
    loss, *_ = run.prediction_step(run.model, batch, True)
    assert float(loss) == pytest.approx(sum(alone) / sum(b - a - 1 for a, b in itertools.pairwise(cuts)))


def test_it_resumes_bit_for_bit(tmp_path: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 10, "packing": True, "eval_strategy": "no"}
    model = build(vocab_size=len(tokenizer()))
    whole = sft(SFTOnEngine, model, tmp_path, texts(), **changes)
    whole.train()
    (tmp_path / "checkpoint-20").rename(tmp_path / "aside")
    resumed = sft(SFTOnEngine, build(seed=1, vocab_size=len(tokenizer())), tmp_path, texts(), **changes)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert all(torch.equal(weight, trained(whole)[name]) for name, weight in trained(resumed).items())


def test_the_engine_is_planned_for_the_longest_row(tmp_path: Path) -> None:
    run = sft(SFTOnEngine, build(vocab_size=len(tokenizer())), tmp_path, texts(), per_device_eval_batch_size=4)
    run.train()
    assert run.engine.plan
    assert "2 micro-batches of (4, 48)" in repr(run.engine)


def test_what_needs_another_loss_or_a_second_model_is_refused_by_name(tmp_path: Path) -> None:
    class DPOOnEngine(TrainerMixin, trl.DPOTrainer):
        pass

    model = build(vocab_size=len(tokenizer()))
    with pytest.raises(
        ConfigError, match=r"DPOTrainer\.compute_loss calls the model, and with ref_model a second model"
    ):
        DPOOnEngine(model=model, train_dataset=texts())
    for changes, words in (
        ({"loss_type": "dft"}, "loss_type is 'dft'"),
        ({"activation_offloading": True}, "activation_offloading is True"),
        ({"model_init_kwargs": {"dtype": "float32"}}, "model_init_kwargs is"),
        ({"chat_template_path": "somebody/chat"}, "chat_template_path is 'somebody/chat'"),
        ({"bf16": True}, "bf16 is True, but the engine computes in fp32"),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": False}}, "activation|the engine's plan"),
    ):
        given = {"engine_options": {"precision": "fp32"}}
        with pytest.raises(ConfigError, match=words):
            sft(SFTOnEngine, model, tmp_path, texts(), given=given, **changes)
    with pytest.raises(ConfigError, match="peft_config cannot be used on the engine"):
        sft(SFTOnEngine, model, tmp_path, texts(), given={"peft_config": object()})


def test_a_router_whose_loss_only_one_side_trains_is_refused(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    model = build("qwen3_moe", vocab_size=len(tokenizer()), **sizes)
    with pytest.raises(
        ConfigError, match=r"made without the router's auxiliary loss and SFTConfig asks for .* with it"
    ):
        sft(SFTOnEngine, model, tmp_path, texts())
    run = sft(SFTOnEngine, model, tmp_path, texts(), router_aux_loss_coef=0.0, max_steps=2)
    run.train()
    assert run.engine.num_steps == 2
