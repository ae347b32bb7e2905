"""The peer that offloads: DeepSpeed ZeRO-3 with parameters and optimizer on the host, recompute, clipping.

    python benches/peers/zero3.py --model qwen2.5-3b --batch 8

Needs deepspeed; its first run compiles its CPU optimizer. One JSON line.
"""

import os

import torch
from common import arguments, model_config, refuse, report, timed
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    given = arguments(__doc__).parse_args()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    os.environ.update(alone, DS_SKIP_CUDA_CHECK="1")
    try:
        import deepspeed
    except ImportError as error:
        refuse(f"deepspeed cannot be imported: {error}")

    deepspeed.init_distributed("nccl")
    host = {"device": "cpu", "pin_memory": True}
    settings = {
        "train_micro_batch_size_per_gpu": given.batch,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "steps_per_print": 1 << 30,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": host,
            "offload_param": host,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 200_000_000,
            "stage3_prefetch_bucket_size": 400_000_000,
            "stage3_param_persistence_threshold": 1_000_000,
            "stage3_max_live_parameters": 2_000_000_000,
            "stage3_max_reuse_distance": 2_000_000_000,
            "sub_group_size": 1_000_000_000,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.01}},
    }
    keys = model_config(given.model)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**keys), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def step(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, keys["vocab_size"], (given.batch, given.seq), generator=generator).cuda()
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    losses: list[torch.Tensor] = []
    seconds = timed(lambda number: losses.append(step(number)), torch.cuda.synchronize, given.steps, given.warmup)
    report(
        "deepspeed-zero3-offload",
        given,
        seconds,
        version=deepspeed.__version__,
        gpu_peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2),
        loss=float(losses[-1]),
    )


if __name__ == "__main__":
    main()
