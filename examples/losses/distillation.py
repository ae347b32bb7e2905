"""Distillation from saved logits: a teacher's largest log-probabilities are written once, and a student learns them.

    python examples/losses/distillation.py save TEACHER ROWS.jsonl LOGITS.safetensors
    python examples/losses/distillation.py train STUDENT LOGITS.safetensors OUT

ROWS.jsonl has one {"text": …} per line. Teacher and student have one tokenizer. The loss is the Kullback-Leibler
divergence (arXiv 1503.02531) over the teacher's TOP tokens at each position, renormalized.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import megatrain

TOP, LR, EPOCHS, ROWS, MAX_TOKENS = 32, 1e-5, 1, 8, 512


def distillation_loss(hidden, head, batch):
    """Sum over positions of KL(teacher || student). `batch["tokens"]` and `batch["teacher"]` (rows, seq - 1, TOP): the
    teacher's likeliest next tokens, and their log-probabilities among themselves."""
    # all logits of a micro-batch at once: what a plan counts for a loss_fn where nothing else is declared
    student = head(hidden)[:, :-1].float().log_softmax(-1).gather(2, batch["tokens"])
    teacher = batch["teacher"]
    divergence = (teacher.exp() * (teacher - student)).sum(-1)
    return (divergence * (batch["labels"][:, 1:] != -100)).sum()


def save(teacher, rows, out):
    """Writes, for each micro-batch N, `N.input_ids`, `N.labels`, `N.tokens` and `N.teacher`."""
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    model = AutoModelForCausalLM.from_pretrained(teacher).eval()
    texts = [json.loads(line)["text"] for line in Path(rows).read_text(encoding="utf-8").splitlines()]
    saved = {}
    for start in range(0, len(texts), ROWS):
        encoded = [tokenizer(text)["input_ids"][:MAX_TOKENS] for text in texts[start : start + ROWS]]
        width = max(map(len, encoded))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in encoded])
        labels = torch.tensor([row + [-100] * (width - len(row)) for row in encoded])
        with torch.no_grad():
            top = model(input_ids=ids).logits[:, :-1].float().topk(TOP)
        found = {"input_ids": ids, "labels": labels, "tokens": top.indices, "teacher": top.values.log_softmax(-1)}
        saved |= {f"{start // ROWS}.{name}": value.contiguous() for name, value in found.items()}
    save_file(saved, out)


def train(student, logits, out):
    engine = megatrain.Engine.from_pretrained(student, optimizer=megatrain.AdamW(lr=LR))
    saved, losses = load_file(logits), []
    count = len({name.partition(".")[0] for name in saved})
    names = ("input_ids", "labels", "tokens", "teacher")
    for _ in range(EPOCHS):
        for number in range(count):
            batch = {name: saved[f"{number}.{name}"] for name in names}
            step = engine.step([batch], loss_fn=distillation_loss)
            losses.append(step.loss)
            print(f"step {len(losses)}: divergence {step.loss:.4f} per token, norm {step.grad_norm:.3g}")
    engine.save_pretrained(out)
    engine.close()
    return losses


if __name__ == "__main__":
    {"save": save, "train": train}[sys.argv[1]](*sys.argv[2:])
