"""Policy gradient: answers are sampled from the model, rewarded, and made likelier or less likely.

    python examples/losses/policy_gradient.py MODEL PROMPTS.txt OUT

Several answers per prompt are compared with each other (GRPO, arXiv 2402.03300), the ratio to the policy that sampled
them is clipped (PPO, arXiv 1707.06347), and a small bonus on entropy keeps the policy from collapsing. Replace `reward`
by your own.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

import megatrain

LR, STEPS, ANSWERS, MAX_NEW_TOKENS, UPDATES, CLIP, ENTROPY = 1e-5, 20, 8, 32, 2, 0.2, 1e-3


def reward(answer):
    """Higher is better: here the share of vowels, which needs no judge."""
    return sum(letter in "aeiou" for letter in answer.lower()) / max(1, len(answer))


def policy_loss(hidden, head, batch):
    """Sum over the sampled tokens. `batch["sampled"]` (rows, seq - 1): their log-probabilities by the policy that
    sampled them; `batch["advantages"]` (rows, 1)."""
    logprobs, entropy = head.logprobs(hidden, batch["labels"], entropy=True)
    ratio, advantages = (logprobs - batch["sampled"]).exp(), batch["advantages"]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    supervised = batch["labels"][:, 1:] != -100
    return -(gain * supervised).sum() - ENTROPY * entropy.sum()


def sample(engine, ids, end, generator):
    """Token ids of an answer to `ids`, at temperature 1."""
    answer = []
    while len(answer) < MAX_NEW_TOKENS and (not answer or answer[-1] != end):
        logits = engine.logits(torch.tensor([ids + answer]))
        answer.append(int(torch.multinomial(logits[0].softmax(-1), 1, generator=generator)))
    return answer


def main(model, prompts, out):
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [line for line in Path(prompts).read_text(encoding="utf-8").splitlines() if line]
    engine = megatrain.Engine.from_pretrained(
        model, optimizer=megatrain.AdamW(lr=LR), plan={"loss_workspace": "64MiB"}
    )
    generator, rewards = torch.Generator().manual_seed(0), []
    for step in range(STEPS):
        ids = tokenizer(prompts[step % len(prompts)])["input_ids"]
        answers = [sample(engine, ids, tokenizer.eos_token_id, generator) for _ in range(ANSWERS)]
        width = len(ids) + max(map(len, answers))
        rows = torch.zeros(ANSWERS, width, dtype=torch.int64)
        labels = torch.full_like(rows, -100)
        for row, answer in enumerate(answers):
            rows[row, : len(ids) + len(answer)] = torch.tensor(ids + answer)
            labels[row, len(ids) : len(ids) + len(answer)] = torch.tensor(answer)
        batch = {"input_ids": rows, "labels": labels}  # padding comes last, so nothing attends to it
        scores = torch.tensor([reward(tokenizer.decode(answer)) for answer in answers])
        batch["advantages"] = ((scores - scores.mean()) / (scores.std() + 1e-4)).unsqueeze(1)
        batch["sampled"] = engine.logprobs([batch_inputs(batch)])[0]
        for _ in range(UPDATES):  # from the second on the ratio differs from 1
            done = engine.step([batch], loss_fn=policy_loss)
        rewards.append(float(scores.mean()))
        print(f"step {step + 1}: reward {rewards[-1]:.3f}, loss {done.loss:.4f}, norm {done.grad_norm:.3g}")
    engine.save_pretrained(out)
    engine.close()
    return rewards


def batch_inputs(batch):
    """What `engine.logprobs` reads of a micro-batch; only a loss_fn is given more."""
    return {key: batch[key] for key in ("input_ids", "labels")}


if __name__ == "__main__":
    main(*sys.argv[1:])
