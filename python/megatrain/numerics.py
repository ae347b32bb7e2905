"""The numerics key: everything that changes rounding, and nothing that a plan may choose.

Two runs of one key on one kind of device give the same bits (on CUDA with `deterministic: true`). It follows from
configuration, model and kind of device by fixed rules, and is stored with every checkpoint.
"""

from typing import Any

import torch

from megatrain.loss import default_chunk
from megatrain.model import Decoder


def key(
    decoder: Decoder,
    device: torch.device,
    *,
    micro_batch: tuple[int, int] | None,
    micro_batches: int | None,
    grad_precision: str,
    loss_chunk: int | None,
    compiled: bool,
    deterministic: bool,
) -> dict[str, Any]:
    """The key as JSON. `micro_batch` (rows, seq) and `micro_batches` are the nominal split of a step."""
    import transformers

    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "precision": decoder.precision,
        "grad_precision": grad_precision,
        "micro_batch": list(micro_batch) if micro_batch is not None else None,
        "micro_batches": micro_batches,
        "loss_chunk": loss_chunk or default_chunk(decoder.vocab_size, device.type),
        "attention": getattr(decoder.config, "_attn_implementation", None),
        "experts": getattr(decoder.config, "_experts_implementation", None),
        "compiled": compiled,
        "deterministic": deterministic,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def differences(stored: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """What differs between two keys, a sentence each."""
    return [
        f"{name}: {stored.get(name)!r} -> {current.get(name)!r}"
        for name in sorted({*stored, *current})
        if stored.get(name) != current.get(name)
    ]
