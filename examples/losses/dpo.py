"""Direct preference optimization (DPO, arXiv 2305.18290) with a reference that is computed beforehand.

    python examples/losses/dpo.py MODEL PAIRS.jsonl OUT

PAIRS.jsonl has one {"prompt": …, "chosen": …, "rejected": …} per line. The reference is the model before training: its
log-probabilities are computed once, so that no second model is held during training.
"""

import json
import sys
from pathlib import Path

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoTokenizer

import megatrain

BETA, LR, EPOCHS, PAIRS, MAX_TOKENS = 0.1, 5e-6, 1, 8, 1024


def dpo_loss(hidden, head, batch):
    """Sum over the pairs of a micro-batch, whose first half of rows are the chosen answers and second half the rejected
    ones in the same order. `batch["reference"]` (rows,): log-probability of each answer by the reference."""
    answers = head.logprobs(hidden, batch["labels"]).sum(-1)
    chosen, rejected = (answers - batch["reference"]).chunk(2)
    return -logsigmoid(BETA * (chosen - rejected)).sum()


def encode(tokenizer, prompt, answer):
    """(token ids, labels) of a row: the answer and its end are supervised, the prompt is not."""
    start = tokenizer(prompt)["input_ids"]
    rest = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    ids, labels = start + rest, [-100] * len(start) + rest
    return ids[:MAX_TOKENS], labels[:MAX_TOKENS]


def micro_batch(rows):
    """Pads rows on the right. Their labels are -100 there, and no earlier token attends to what follows it."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows])
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def main(model, pairs, out):
    tokenizer = AutoTokenizer.from_pretrained(model)
    pairs = [json.loads(line) for line in Path(pairs).read_text(encoding="utf-8").splitlines()]
    # head.logprobs plans its own chunk of logits; only what dpo_loss allocates besides is declared
    engine = megatrain.Engine.from_pretrained(model, optimizer=megatrain.AdamW(lr=LR), plan={"loss_workspace": "64MiB"})
    batches = []
    for start in range(0, len(pairs), PAIRS):
        some = pairs[start : start + PAIRS]
        rows = [encode(tokenizer, pair["prompt"], pair[kind]) for kind in ("chosen", "rejected") for pair in some]
        batches.append(micro_batch(rows))
    for batch, logprobs in zip(batches, engine.logprobs(batches), strict=True):
        batch["reference"] = logprobs.sum(-1)
    losses = []
    for _ in range(EPOCHS):
        for batch in batches:
            # the mean over pairs rather than over tokens
            step = engine.step([batch], loss_fn=dpo_loss, normalizer=len(batch["reference"]) / 2)
            losses.append(step.loss)
            print(f"step {len(losses)}: loss {step.loss:.4f}, norm {step.grad_norm:.3g}")
    engine.save_pretrained(out)
    engine.close()
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
