"""Model FLOPs: 6 × (matmul parameters, head included, embedding look-up not) a token plus causal attention (half of the
square), as the PaLM paper counts them (arXiv 2204.02311, appendix B). Recompute is not counted.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from megatrain.models.hf_config import text_config


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelCount:
    """What a model costs a token, read off its configuration and its matmul parameters."""

    matmul_params: int
    """Parameters that multiply every token: linear layers and head (a tied embedding counts once, as the head);
    of routed experts only those that a token meets."""
    attention_width: int
    """Heads × head width of a layer with attention."""
    windows: tuple[int | None, ...] = ()
    """Of each layer with attention, how far a token looks back; None is to the start."""

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward of one token in a causal sequence of `seq_len` tokens, recompute not counted."""
        pairs = 0.0
        for window in self.windows:
            reach = min(seq_len, window or seq_len)
            pairs += reach * seq_len - reach * reach / 2  # half of the square when the window spans the sequence
        # Two products (scores, values) of 2 FLOPs each, three times: forward and the two halves of backward.
        return 6.0 * self.matmul_params + 12.0 * self.attention_width * pairs / seq_len


def count_model(config: Any, tensors: Iterable[tuple[str, int, tuple[int, ...]]], layers: int) -> ModelCount:
    """Counts a decoder: `tensors` are (name, unit, shape), units 1…`layers` its layers; `config` is the Hugging Face
    configuration with `num_attention_heads` and so on, vocabulary and hidden size the head's."""
    text = text_config(config)
    params = float(int(text.vocab_size) * int(text.hidden_size))
    experts = _first(text, "num_experts", "num_local_experts", "n_routed_experts")
    routed = experts_per_token(text) / experts if experts else 1.0
    for name, unit, shape in tensors:
        if 1 <= unit <= layers and len(shape) >= 2:
            params += math.prod(shape) * (routed if "experts" in name and "shared" not in name else 1.0)
    heads = int(text.num_attention_heads)
    width = int(getattr(text, "head_dim", None) or int(text.hidden_size) // heads)
    windows = _windows(text, layers)
    return ModelCount(matmul_params=round(params), attention_width=heads * width, windows=tuple(windows))


def experts_per_token(text: Any) -> int:
    """Of the routed experts, how many a token meets, by the configuration of the language part; 1 without experts."""
    return _first(text, "num_experts_per_tok", "moe_top_k") or 1


def _first(config: Any, *names: str) -> int | None:
    return next((int(value) for name in names if isinstance(value := getattr(config, name, None), int)), None)


def _windows(text: Any, layers: int) -> list[int | None]:
    """Of each layer with attention, how far it looks back; linear and convolution layers have none."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        return [window if getattr(text, "use_sliding_window", True) else None] * layers
    return [window if "sliding" in kind else None for kind in kinds if "attention" in kind and "linear" not in kind]
