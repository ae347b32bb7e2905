"""The loss functions of `examples/losses`: the numbers of their papers' formulas in plain torch, and whole runs that
move what they are to move."""

import importlib.util
import json
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.reference import batches, build, engine, error
from support.tiny_tokenizer import tiny_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples" / "losses"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stock_logprobs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """(batch, seq - 1) log-probabilities of the labels, 0 where there is none."""
    logp = model(input_ids=batch["input_ids"]).logits[:, :-1].log_softmax(-1)
    targets = batch["labels"][:, 1:]
    return logp.gather(2, targets.clamp(min=0).unsqueeze(2)).squeeze(2) * (targets != -100)


def assert_same_gradients(ours: Any, model: nn.Module, loss: Tensor) -> None:
    model.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert error(ours.gradient(name), parameter.grad) < 1e-5, name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    build("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_dpo_is_the_papers_loss_and_widens_the_margin(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dpo = example("dpo")
    model, reference, (batch,) = build(), build(seed=1), batches(1, rows=4)
    with torch.no_grad():
        batch["reference"] = stock_logprobs(reference, batch).sum(-1)
    margins = (stock_logprobs(model, batch).sum(-1) - batch["reference"]).chunk(2)
    wanted = -F.logsigmoid(dpo.BETA * (margins[0] - margins[1])).mean()
    ours = engine(model)
    assert ours.forward_backward([batch], loss_fn=dpo.dpo_loss, normalizer=2.0) == pytest.approx(wanted.item())
    assert_same_gradients(ours, model, wanted)

    pairs = [{"prompt": f"{n} and {n} are", "chosen": "four.", "rejected": "paris."} for n in ("two", "hello")] * 4
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    dpo.EPOCHS, dpo.LR = 4, 1e-3
    losses = dpo.main(str(folder), str(tmp_path / "pairs.jsonl"), str(tmp_path / "out"))
    assert losses[0] == pytest.approx(0.6931, abs=1e-4)  # ln 2: the policy is the reference
    assert losses[-1] < 0.9 * losses[0]
    assert (tmp_path / "out" / "config.json").is_file()
    assert "step 4: loss" in capsys.readouterr().out


def test_policy_gradient_is_the_clipped_surrogate_with_entropy_and_raises_the_reward(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = example("policy_gradient")
    model, (batch,) = build(), batches(1)
    logp = stock_logprobs(model, batch)
    noise = 0.3 * torch.randn(logp.shape, generator=torch.Generator().manual_seed(0))
    batch["sampled"] = logp.detach() + noise  # so that some ratios are clipped
    batch["advantages"] = torch.tensor([[0.7], [-1.3]])
    ratio, known = (logp - batch["sampled"]).exp(), batch["labels"][:, 1:] != -100
    terms = torch.stack([ratio, ratio.clamp(1 - policy.CLIP, 1 + policy.CLIP)]) * batch["advantages"]
    every = model(input_ids=batch["input_ids"]).logits[:, :-1].log_softmax(-1)
    entropy = -((every.exp() * every).sum(-1) * known).sum()
    wanted = (-(terms.amin(0) * known).sum() - policy.ENTROPY * entropy) / known.sum()
    ours = engine(model)
    assert ours.forward_backward([batch], loss_fn=policy.policy_loss) == pytest.approx(wanted.item(), rel=1e-5)
    assert_same_gradients(ours, model, wanted)

    (tmp_path / "prompts.txt").write_text("two and two are\nhello there,\n", encoding="utf-8")
    policy.STEPS, policy.LR, policy.MAX_NEW_TOKENS, policy.ANSWERS = 12, 1e-2, 3, 16
    rewards = policy.main(str(folder), str(tmp_path / "prompts.txt"), str(tmp_path / "out"))
    assert statistics.mean(rewards[-4:]) > statistics.mean(rewards[:4]) + 0.05
    assert "step 12: reward" in capsys.readouterr().out


def test_distillation_is_the_divergence_of_the_saved_logits_and_nears_the_teacher(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    distillation = example("distillation")
    rows = [{"text": f"the quick brown fox jumps over {n} lazy dogs."} for n in range(16)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    distillation.save(str(folder), str(tmp_path / "rows.jsonl"), str(tmp_path / "logits.safetensors"))
    saved = load_file(tmp_path / "logits.safetensors")
    batch = {name: saved[f"0.{name}"] for name in ("input_ids", "labels", "tokens", "teacher")}
    vocab = build("llama", vocab_size=len(tiny_tokenizer())).config.vocab_size
    student = build("llama", vocab_size=vocab, seed=1)
    every = student(input_ids=batch["input_ids"]).logits[:, :-1].log_softmax(-1).gather(2, batch["tokens"])
    known = batch["labels"][:, 1:] != -100
    divergence = F.kl_div(every, batch["teacher"], reduction="none", log_target=True).sum(-1)
    wanted = (divergence * known).sum() / known.sum()
    ours = engine(student)
    assert ours.forward_backward([batch], loss_fn=distillation.distillation_loss) == pytest.approx(
        wanted.item(), rel=1e-5
    )
    assert_same_gradients(ours, student, wanted)

    student.save_pretrained(tmp_path / "student")
    distillation.EPOCHS, distillation.LR = 8, 3e-3
    losses = distillation.train(
        str(tmp_path / "student"), str(tmp_path / "logits.safetensors"), str(tmp_path / "trained")
    )
    assert losses[-1] < 0.8 * losses[0]
    assert "per token" in capsys.readouterr().out
