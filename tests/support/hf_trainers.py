"""Short runs through transformers' Trainer, stock and on the engine, and their comparison."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset
from transformers import Trainer, TrainingArguments

from megatrain.integrations import TrainerMixin

LOSS = 1e-6
"""Largest relative difference of a logged loss."""
WEIGHTS = 1e-5
"""Largest ‖a−b‖/‖b‖ of a weight after 20 steps with a learning rate of `RATE`, and in proportion with a higher one:
where a gradient cancels to nearly nothing, what is left is rounding, and AdamW's step is as long as the rate even so.
"""
RATE = 1e-3


class OnEngine(TrainerMixin, Trainer):
    """transformers' Trainer on the engine."""


class Rows(Dataset[Any]):
    """Rows of 8 to 31 random tokens, of which the first three are not supervised."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(8, 32, (1,), generator=generator))
        ids = torch.randint(0, 256, (length,), generator=generator).tolist()
        return {"input_ids": ids, "labels": [-100] * 3 + ids[3:]}


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Rows padded behind to the longest, with a mask."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(key: str, filler: int) -> Tensor:
        return torch.tensor([row[key] + [filler] * (longest - len(row[key])) for row in rows])

    ones = [{"mask": [1] * len(row["input_ids"])} for row in rows]
    mask = torch.tensor([row["mask"] + [0] * (longest - len(row["mask"])) for row in ones])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """20 steps of two batches of two rows, on the CPU in fp32."""
    settings: dict[str, Any] = {
        "max_steps": 20,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": RATE,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "warmup_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "report_to": [],
        "disable_tqdm": True,
    }
    return TrainingArguments(output_dir=str(folder), **{**settings, **changes})


def trainer(
    kind: type[Trainer], model: Any, folder: Path, *, given: dict[str, Any] | None = None, **changes: Any
) -> Any:
    """A Trainer over `Rows` with a copy of a model. `given`: arguments of the Trainer, `changes`: of its settings."""
    options: dict[str, Any] = {
        "data_collator": collate,
        "train_dataset": Rows(),
        "eval_dataset": Subset(Rows(), range(9)),
        **(given or {}),
    }
    if isinstance(model, torch.nn.Module):
        model = copy.deepcopy(model)
    return kind(model=model, args=arguments(folder, **changes), **options)


def logged(run: Any, key: str) -> list[float]:
    """What a run has logged under a name, in order."""
    return [entry[key] for entry in run.state.log_history if key in entry]


def trained(run: Any) -> dict[str, Tensor]:
    """The weights that a run has reached."""
    if isinstance(run, TrainerMixin):
        return {name: run.engine.weight(name) for name in run.engine.decoder.tensors}
    return dict(run.model.state_dict())


def assert_equal_runs(ours: Any, stock: Any) -> None:
    """The same steps with the same learning rates, the same losses, norms and evaluations, the same weights."""
    assert [e["step"] for e in ours.state.log_history] == [e["step"] for e in stock.state.log_history]
    assert len(logged(stock, "loss")) > 1
    assert logged(ours, "learning_rate") == logged(stock, "learning_rate")
    for key in sorted({k for e in stock.state.log_history for k in e if k.endswith("loss")}):
        torch.testing.assert_close(logged(ours, key), logged(stock, key), rtol=LOSS, atol=0)
    torch.testing.assert_close(logged(ours, "grad_norm"), logged(stock, "grad_norm"), rtol=1e-5, atol=0)
    theirs, limit = trained(stock), WEIGHTS * max(1.0, stock.args.learning_rate / RATE)
    for name, weight in trained(ours).items():
        error = float((weight - theirs[name]).norm() / theirs[name].norm())
        assert error < limit, (name, error)
