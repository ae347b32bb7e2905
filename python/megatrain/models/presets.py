"""Shapes of public models for `bench` and `plan`, with random weights: nothing is downloaded."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a decoder of the Qwen2 architecture."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool

    def config(self) -> dict[str, Any]:
        """A value of `model.config`: the keys of a Hugging Face `config.json`."""
        return {
            "model_type": "qwen2",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "use_cache": False,
        }


SHAPES = {
    "tiny": Shape(layers=4, hidden=256, intermediate=704, heads=4, kv_heads=2, vocab=1024, tied=False),
    "qwen2.5-0.5b": Shape(layers=24, hidden=896, intermediate=4864, heads=14, kv_heads=2, vocab=151936, tied=True),
    "qwen2.5-1.5b": Shape(layers=28, hidden=1536, intermediate=8960, heads=12, kv_heads=2, vocab=151936, tied=True),
    "qwen2.5-3b": Shape(layers=36, hidden=2048, intermediate=11008, heads=16, kv_heads=2, vocab=151936, tied=True),
    "qwen2.5-7b": Shape(layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4, vocab=152064, tied=False),
    "qwen2.5-14b": Shape(layers=48, hidden=5120, intermediate=13824, heads=40, kv_heads=8, vocab=152064, tied=False),
    "qwen2.5-32b": Shape(layers=64, hidden=5120, intermediate=27648, heads=40, kv_heads=8, vocab=152064, tied=False),
    "qwen2.5-72b": Shape(layers=80, hidden=8192, intermediate=29568, heads=64, kv_heads=8, vocab=152064, tied=False),
}
"""By name as on the hub, in lower case."""
