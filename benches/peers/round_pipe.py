"""The peer that streams: RoundPipe (`pip install roundpipe`), bf16 weights and fp32 AdamW on the host, clipping.

    python benches/peers/round_pipe.py --model qwen2.5-3b --batch 8 --micro-batches 2

A step is timed twice: with updates awaited (`tokens_s`), which gives the numbers of plain training as ours do, and as
it is by default (`stale_tokens_s`), where weights are one step old. Its own models know no Qwen2 (0.1.1), so the
layers of transformers go into the sequence that it takes, with its compiled, chunked loss at the end. It computes every
layer again in backward and takes no budget of the card's memory: what it used is reported. One JSON line.
"""

import os
from typing import Any

import torch
from common import arguments, device_used_gib, model_config, refuse, report, timed
from torch import Tensor, nn

HOST_BYTES = 20
"""A parameter's on the host: bf16 weight and gradient; fp32 master, gradient and two moments. Pinned memory, which is
rounded up to powers of two, comes on top."""


class Embedding(nn.Module):
    """Token ids (rows, seq) to the state that the layers pass on: hidden states, cosines, sines, labels."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embed_tokens, self.rotary = model.embed_tokens, model.rotary_emb

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        hidden = self.embed_tokens(ids)
        cos, sin = self.rotary(hidden, torch.arange(ids.shape[1], device=ids.device)[None])
        return hidden, cos, sin, labels


class Layer(nn.Module):
    """A decoder layer of transformers; causal, without a mask."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, cos, sin, labels = state
        return self.layer(hidden, attention_mask=None, position_embeddings=(cos, sin)), cos, sin, labels


class Loss(nn.Module):
    """Final norm and head: the sum of the loss over `tokens`."""

    def __init__(self, norm: nn.Module, head: nn.Module, tokens: int) -> None:
        super().__init__()
        self.norm, self.head, self.tokens = norm, head, tokens

    def forward(self, state: tuple[Tensor, ...]) -> Tensor:
        from roundpipe.models.function import ChunkedCompileLinearForCausalLMLoss

        hidden, _, _, labels = state
        return ChunkedCompileLinearForCausalLMLoss(self.norm(hidden), self.head, labels, num_items_in_batch=self.tokens)


def main() -> None:
    parser = arguments(__doc__, steps=8, warmup=4)  # its stages are balanced by the times of the first steps
    parser.add_argument("--micro-batches", type=int, default=2, help="parts of a step (default %(default)s)")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        refuse("RoundPipe needs a CUDA device")
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = model_config(given.model)
    config = AutoConfig.for_model(**keys)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    needed, installed = HOST_BYTES * parameters, host_memory()
    if needed > installed:
        refuse(
            f"RoundPipe needs {needed / 2**30:.0f} GiB of host memory, {HOST_BYTES} bytes a parameter; "
            f"{installed / 2**30:.0f} GiB are installed"
        )
    try:
        from roundpipe import RoundPipe, RoundPipeRunConfig
        from roundpipe.optim import Adam
    except ImportError as error:
        refuse(f"roundpipe cannot be imported: {error}")

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to("cpu").train()
    torch.cuda.empty_cache()
    tokens = given.batch * (given.seq - 1)
    parts = [Embedding(model.model), *map(Layer, model.model.layers), Loss(model.model.norm, model.lm_head, tokens)]
    pipe = RoundPipe(
        nn.Sequential(*parts),
        optim_dtype=torch.float32,
        name="model",
        model_run_config=RoundPipeRunConfig(num_microbatch=given.micro_batches),
    )
    trained = list(pipe.optim_parameters())
    optimizer = Adam(trained, lr=1e-5, weight_decay=0.01, decoupled_weight_decay=True)
    losses: list[float] = []

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def step(number: int, stale: bool) -> None:
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, keys["vocab_size"], (given.batch, given.seq), generator=generator)
        losses.append(float(pipe.forward_backward(input_kwargs={"ids": ids, "labels": ids})))
        pipe.step(update, is_async=stale)

    def wait() -> None:
        pipe.optim_updated.wait()
        torch.cuda.synchronize()

    seconds = timed(lambda number: step(number, False), wait, given.steps, given.warmup)
    stale = timed(lambda number: step(number, True), wait, given.steps, 1)
    report(
        "roundpipe",
        given,
        seconds,
        micro_batches=given.micro_batches,
        stale_step_s=round(stale, 5),
        stale_tokens_s=round(given.batch * given.seq / stale, 1),
        gpu_used_gib=device_used_gib(),
        first_loss=losses[0],
        loss=losses[-1],
    )
    # its threads wait for work that no longer comes
    os._exit(0)


def host_memory() -> int:
    """Bytes that this process may ever use."""
    from megatrain.system import hardware

    return hardware.read().memory_limit


if __name__ == "__main__":
    main()
