"""Small GGUF files."""

from pathlib import Path

import pytest
import torch

VOCAB = 88


def write_gguf(path: Path, vocab_size: int = VOCAB) -> None:
    """A llama of two layers with a tied head, its weights in fp32."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    file = gguf.GGUFWriter(str(path), "llama")
    file.add_block_count(2)
    file.add_context_length(64)
    file.add_embedding_length(32)
    file.add_feed_forward_length(48)
    file.add_head_count(4)
    file.add_head_count_kv(4)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_vocab_size(vocab_size)
    shapes = {"token_embd": (vocab_size, 32), "output_norm": (32,)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.{name}": (32, 32) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        shapes |= {f"blk.{layer}.{name}": (48, 32) for name in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{layer}.ffn_down": (32, 48)}
        shapes |= {f"blk.{layer}.{name}": (32,) for name in ("attn_norm", "ffn_norm")}
    for name, shape in shapes.items():
        file.add_tensor(f"{name}.weight", torch.randn(shape).numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
