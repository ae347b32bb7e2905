"""The peer that holds everything in HBM: stock transformers, autograd, fused AdamW over fp32 masters, clipping.

    python benches/peers/resident.py --model qwen2.5-3b --batch 16 --checkpoint

Liger's fused kernels and fused loss are used where liger-kernel is installed, and cuDNN's attention. One JSON line.
"""

import torch
from common import arguments, model_config, report, timed
from transformers import AutoConfig, AutoModelForCausalLM

LIGER = {"qwen2": "apply_liger_kernel_to_qwen2", "llama": "apply_liger_kernel_to_llama"}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--checkpoint", action="store_true", help="recompute every layer in backward")
    given = parser.parse_args()
    keys = model_config(given.model)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**keys), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    try:
        import liger_kernel.transformers

        getattr(liger_kernel.transformers, LIGER[keys["model_type"]])(model=model)
        liger = True
    except (ImportError, KeyError):
        liger = False
    model.train()
    if given.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    parameters = list(model.parameters())
    masters = [p.detach().float() for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-5, fused=True)

    def step(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, keys["vocab_size"], (given.batch, given.seq), generator=generator).cuda()
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

    losses: list[torch.Tensor] = []
    seconds = timed(lambda number: losses.append(step(number)), torch.cuda.synchronize, given.steps, given.warmup)
    report(
        "resident" + ("-checkpoint" if given.checkpoint else ""),
        given,
        seconds,
        liger=liger,
        gpu_peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2),
        loss=float(losses[-1]),
    )


if __name__ == "__main__":
    main()
