"""The peer in CUDA and C++: LLMQ (`pip install pyllmq`), with masters and moments in bf16, in HBM or on the host.

    python benches/peers/llmq.py --model qwen2.5-7b --batch 64 --micro-batch 4 [--offload] [--recompute ffn,norm]

Of each step `batch / micro-batch` micro-batches are accumulated; it clips by global norm. Only the Qwen2 architecture.
One JSON line.
"""

import numpy as np
from common import arguments, device_used_gib, model_config, refuse, report, timed

RECOMPUTED = {
    "swiglu": ("swiglu",),
    "norm": ("rms_norm",),
    "ffn": ("swiglu", "ffn"),
    "qkv": ("qkv",),
    "att": ("qkv", "att"),
    "block": ("swiglu", "rms_norm", "ffn", "qkv", "att"),
}
"""Words of its own command line, and the switches that each of them sets."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--micro-batch", type=int, default=8, help="rows computed at a time (default %(default)s)")
    parser.add_argument("--moments", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--matmul", default=None, choices=("bfloat16", "e4m3"))
    parser.add_argument("--offload", action="store_true", help="masters, moments and residuals in host memory")
    parser.add_argument("--recompute", default="", metavar="WORD,…", help=f"of {', '.join(RECOMPUTED)}")
    parser.add_argument("--chunks", type=int, default=4, help="parts of the head (default %(default)s)")
    parser.add_argument("--attention-chunks", type=int, default=1, help="of attention's backward (default %(default)s)")
    given = parser.parse_args()
    if given.batch % given.micro_batch:
        refuse(f"a step of {given.batch} rows has no whole number of micro-batches of {given.micro_batch}")
    keys = model_config(given.model)
    if keys["model_type"] != "qwen2":
        refuse(f"LLMQ runs qwen2 only, not {keys['model_type']}")
    try:
        import pyllmq
    except ImportError as error:
        refuse(f"pyllmq cannot be imported: {error}")

    names = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads")
    names += ("num_hidden_layers", "max_position_embeddings", "tie_word_embeddings")
    config = pyllmq.LLamaConfig(
        architecture="qwen2",
        rope_theta=float(keys["rope_theta"]),
        rms_norm_eps=float(keys.get("rms_norm_eps", 1e-6)),
        use_qkv_bias=True,
        dtype="bfloat16",
        **{name: keys[name] for name in names},
    )
    options = pyllmq.LLamaOptions()
    options.momentum_type = options.variance_type = given.moments
    options.use_cuda_graphs = True
    options.lmhead_chunks, options.attn_bwd_chunks = given.chunks, given.attention_chunks
    if given.matmul is not None:
        options.matmul_type = given.matmul
    for word in filter(None, given.recompute.split(",")):
        for switch in RECOMPUTED[word]:
            setattr(options, f"recompute_{switch}", True)
    if given.offload:
        options.offload_master = options.offload_opt_m = options.offload_opt_v = options.offload_residual = True
    accumulated = given.batch // given.micro_batch
    trainer = pyllmq.LLMQTrainer(
        ngpu=1,
        config=config,
        options=options,
        batch_size=given.micro_batch,
        seq_len=given.seq,
        grad_accum=accumulated,
        memcpy_all_gather=True,
        memcpy_send_recv=True,
    )
    trainer.init_weights()
    random = np.random.default_rng(0)
    shape = (given.warmup + given.steps, accumulated, given.micro_batch, given.seq + 1)
    tokens = random.integers(0, keys["vocab_size"], shape, dtype=np.int32)
    inputs, targets = np.ascontiguousarray(tokens[..., :-1]), np.ascontiguousarray(tokens[..., 1:])
    last: dict[str, float] = {}

    def step(number: int) -> None:
        for part in range(accumulated):
            trainer.step(inputs[number, part], targets[number, part])
        last.update(trainer.update(1e-5, 0.9, 0.95, number + 1, 0.1, 1.0))  # waits for the step

    seconds = timed(step, lambda: None, given.steps, given.warmup)
    report(
        "llmq",
        given,
        seconds,
        micro_batch=given.micro_batch,
        moments=given.moments,
        matmul=given.matmul or "bfloat16",
        offload=given.offload,
        recompute=given.recompute,
        gpu_used_gib=device_used_gib(),
        loss=last["loss"],
    )


if __name__ == "__main__":
    main()
