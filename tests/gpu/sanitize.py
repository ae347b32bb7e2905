"""A tiny model for `compute-sanitizer`: every kernel and copy of ours, in a few steps, state that visits included.

Run: compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/sanitize.py
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", help="cpu: to try this file where there is no card")
    device = parser.parse_args().device
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(num_hidden_layers=3, vocab_size=256, tie_word_embeddings=True, **sizes)
    ids = torch.randint(0, 256, (2, 33))
    for plan, update, clip in (
        ({"slots": 2, "state_on_device": 2, "inputs": "host", "compile": False}, "just_in_time", 1.0),
        ({"slots": 2, "state_on_device": 0, "activation": "offload", "compile": False}, "immediate", None),
        (
            {"slots": 3, "state_on_device": 1, "updates_on_device": 2, "parts": 3, "poison": True, "compile": False},
            "just_in_time",
            1.0,
        ),
    ):
        engine = megatrain.Engine(
            LlamaForCausalLM(config).bfloat16(),
            optimizer=megatrain.AdamW(lr=1e-3),
            max_grad_norm=clip,
            precision="bf16",
            device=device,
            update=update,
            plan=plan,
        )
        for _ in range(2):
            out = engine.step([{"input_ids": ids, "labels": ids}, {"input_ids": ids.flip(0), "labels": ids.flip(0)}])
        visits = engine.plan["visit_buffers"]
        assert bool(visits) == bool(plan.get("updates_on_device")), engine.plan
        engine.close()
        print(f"{update}, {visits} buffers for visits: loss {out.loss:.4f}, norm {out.grad_norm:.4f}", flush=True)


if __name__ == "__main__":
    main()
