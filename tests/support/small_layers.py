"""A decoder layer of a small model, for tests of what a compiler makes of it."""

import torch
from torch import nn
from transformers import AutoConfig

from megatrain.models.decoder import Decoder
from megatrain.models.modules import copy_without

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


def decoder(family: str, precision: str = "bf16", **keys: object) -> Decoder:
    """A model without values. `keys` stand in the place of SIZES for a family that names its sizes otherwise."""
    return Decoder.from_config(AutoConfig.for_model(family, **(keys or SIZES)), precision=precision)


def real_layer(model: Decoder) -> nn.Module:
    """The model's first layer with random weights."""
    layer = copy_without(model.layers[0]).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for tensor in layer.parameters():
        nn.init.normal_(tensor, std=0.02, generator=generator)
    return layer
