"""The peer that holds everything in HBM: stock transformers, autograd, fused AdamW over fp32 masters, clipping.

    python benches/peers/resident.py --model qwen2.5-3b --batch 16 --checkpoint

Liger's fused kernels and fused loss are used where liger-kernel is installed, and cuDNN's attention. One JSON line.
"""

import argparse
import json
import time

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from megatrain.models.presets import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen2.5-3b", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--checkpoint", action="store_true", help="recompute every layer in backward")
    arguments = parser.parse_args()
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.manual_seed(0)
    keys = SHAPES[arguments.model].config()
    keys.pop("model_type")
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**keys), dtype=torch.bfloat16, attn_implementation="sdpa")
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2

        apply_liger_kernel_to_qwen2(model=model)
        liger = True
    except ImportError:
        liger = False
    model.train()
    if arguments.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    parameters = list(model.parameters())
    masters = [p.detach().float() for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-5, fused=True)

    def step(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        vocab = SHAPES[arguments.model].vocab
        ids = torch.randint(0, vocab, (arguments.batch, arguments.seq), generator=generator).cuda()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        for master in masters:
            master.grad = None
        return loss.detach()

    for seed in range(2):
        step(seed)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for seed in range(arguments.steps):
        loss = step(2 + seed)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / arguments.steps
    tokens = arguments.batch * arguments.seq
    answer = {
        "peer": "resident" + ("-checkpoint" if arguments.checkpoint else ""),
        "model": arguments.model,
        "batch": arguments.batch,
        "seq": arguments.seq,
        "liger": liger,
        "step_s": round(seconds, 4),
        "tokens_s": round(tokens / seconds, 1),
        "gpu_peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "loss": float(loss),
    }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
