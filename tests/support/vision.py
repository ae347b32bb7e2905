"""Tiny vision-language models, and micro-batches with images as their processors would make them."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

VOCAB = 96
IMAGE, VIDEO = 90, 91
"""Token ids that stand where the features of an image or a video go; no text has one of 88 and above."""
_TEXTS = 88
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
TOWER: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 40}
SQUARE: dict[str, Any] = {"num_attention_heads": 2, "image_size": 16, **TOWER}
PATCHES: dict[str, Any] = {
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    **TOWER,
}
MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seeing:
    """One architecture, tiny."""

    title: str
    kind: str
    """Its `model_type`."""
    config: dict[str, Any]
    tower: tuple[str, ...]
    """RunComponents of the names of what makes features of pixels."""
    tokens: int | None
    """Features of an image; None where its sides decide."""
    types: str | None = None
    """The input that tells which tokens are an image's."""
    seed: int = 0
    """Of the rows: another one where a gradient cancels to nearly nothing, such as that of a key's bias."""
    sizes: bool = False
    """Whether the model asks for the sides of each image."""


SEEING: dict[str, Seeing] = {
    "qwen2.5-vl": Seeing(
        title="Qwen2.5-VL",
        kind="qwen2_5_vl",
        config={
            "text_config": {
                **TEXT,
                "rope_parameters": MROPE,
            },
            "vision_config": {"depth": 2, "window_size": 16, "fullatt_block_indexes": [1], **PATCHES},
            **TOKENS,
        },
        tower=("visual",),
        tokens=None,
        types="mm_token_type_ids",
    ),
    "qwen3-vl": Seeing(
        title="Qwen3-VL",
        kind="qwen3_vl",
        config={
            "text_config": {
                **TEXT,
                "head_dim": 8,
                "rope_parameters": {**MROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
            },
            "vision_config": {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1], **PATCHES},
            **TOKENS,
        },
        tower=("visual",),
        tokens=None,
        types="mm_token_type_ids",
    ),
    "llava": Seeing(
        title="LLaVA",
        kind="llava",
        config={
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {
                "model_type": "clip_vision_model",
                "num_hidden_layers": 3,
                "patch_size": 8,
                "projection_dim": 24,
                **SQUARE,
            },
            "image_token_index": IMAGE,
            "image_token_id": IMAGE,
            "image_seq_length": 4,
        },
        tower=("vision_tower",),
        tokens=4,
    ),
    "gemma3": Seeing(
        title="Gemma 3",
        kind="gemma3",
        config={
            "text_config": {
                **TEXT,
                "head_dim": 16,
                "sliding_window": 8,
                "query_pre_attn_scalar": 16,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "vision_config": {
                "model_type": "siglip_vision_model",
                "num_hidden_layers": 2,
                "patch_size": 4,
                "vision_use_head": False,
                **SQUARE,
            },
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
            "image_token_id": IMAGE,
            "boi_token_index": 92,
            "eoi_token_index": 93,
        },
        tower=("vision_tower",),
        tokens=4,
        types="token_type_ids",
    ),
    "qwen2-vl": Seeing(
        title="Qwen2-VL",
        kind="qwen2_vl",
        config={
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {
                "depth": 2,
                "embed_dim": 24,
                "hidden_size": 32,
                "num_heads": 2,
                "patch_size": 4,
                "mlp_ratio": 2,
            },
            **TOKENS,
        },
        tower=("visual",),
        tokens=None,
        types="mm_token_type_ids",
    ),
    "qwen3-vl-moe": Seeing(
        title="Qwen3-VL-MoE",
        kind="qwen3_vl_moe",
        config={
            "text_config": {
                **TEXT,
                "head_dim": 8,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "rope_parameters": {**MROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
            },
            "vision_config": {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1], **PATCHES},
            **TOKENS,
        },
        tower=("visual",),
        tokens=None,
        types="mm_token_type_ids",
    ),
    "qwen3.5": Seeing(
        title="Qwen3.5",
        kind="qwen3_5",
        config={
            "text_config": {
                **TEXT,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                "head_dim": 8,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
            },
            "vision_config": {"depth": 2, "num_position_embeddings": 64, **PATCHES},
            **TOKENS,
        },
        tower=("visual",),
        tokens=None,
        types="mm_token_type_ids",
    ),
    "paligemma": Seeing(
        title="PaliGemma",
        kind="paligemma",
        config={
            "text_config": {"model_type": "gemma", **TEXT, "head_dim": 8},
            "vision_config": {
                "model_type": "siglip_vision_model",
                "num_hidden_layers": 2,
                "patch_size": 8,
                "vision_use_head": False,
                "projection_dim": 32,
                **SQUARE,
            },
            "projection_dim": 32,
            "image_token_index": IMAGE,
            "image_token_id": IMAGE,
        },
        tower=("vision_tower",),
        tokens=4,
        types="token_type_ids",
        seed=9,
    ),
    "aya-vision": Seeing(
        title="Aya Vision",
        kind="aya_vision",
        config={
            "text_config": {"model_type": "cohere2", **TEXT},
            "vision_config": {
                "model_type": "siglip_vision_model",
                "num_hidden_layers": 2,
                "patch_size": 4,
                "vision_use_head": False,
                **SQUARE,
            },
            "image_token_index": IMAGE,
            "image_token_id": IMAGE,
        },
        tower=("vision_tower",),
        tokens=4,
    ),
    "internvl": Seeing(
        title="InternVL",
        kind="internvl",
        config={
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": [16, 16],
                "patch_size": [4, 4],
                **TOWER,
            },
            "image_token_id": IMAGE,
        },
        tower=("vision_tower",),
        tokens=4,
    ),
    "mistral3": Seeing(
        title="Mistral 3",
        kind="mistral3",
        config={
            "text_config": {"model_type": "mistral", **TEXT},
            "vision_config": {"model_type": "pixtral", "num_hidden_layers": 2, "patch_size": 4, **SQUARE},
            "image_token_index": IMAGE,
            "image_token_id": IMAGE,
            "spatial_merge_size": 2,
        },
        tower=("vision_tower",),
        tokens=4,
        sizes=True,
    ),
}


CHIEF = ("qwen2.5-vl", "qwen3-vl", "llava", "gemma3")
"""Those that every test runs; the others run what tells them from these."""


def see(name: str, **changes: Any) -> Any:
    """A tiny stock model with real, somewhat uneven weights."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    family = SEEING[name]
    config = AutoConfig.for_model(family.kind, **{**family.config, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


def images(
    name: str,
    rows: list[list[tuple[int, int]]],  # of each row, the images: height and width in merged patches
    *,
    seed: int = 0,
    seq: int = 24,
    padded: tuple[int, int] = (0, 0),  # tokens of padding: behind row 0, before row 1
) -> dict[str, Tensor]:
    """A micro-batch of text with images in it. A model of square images takes each as such."""
    family = SEEING[name]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, _TEXTS, (len(rows), seq), generator=generator)
    mask = torch.ones_like(ids)
    pixels, grids = [], []
    for row, sides in enumerate(rows):
        at = 2
        if row == 0 and padded[0]:
            mask[row, seq - padded[0] :] = 0
        if row == 1 and padded[1]:
            mask[row, : padded[1]] = 0
            at += padded[1]
        for height, width in sides:
            count = family.tokens or height * width
            ids[row, at : at + count] = IMAGE
            at += count + 2
            if family.tokens is None:
                pixels.append(torch.randn(4 * height * width, 3 * 2 * 4 * 4, generator=generator))
                grids.append([1, 2 * height, 2 * width])
            else:
                pixels.append(torch.randn(1, 3, 16, 16, generator=generator))
        assert at <= seq
    labels = ids.masked_fill((ids == IMAGE) | (mask == 0), -100)
    batch = {"input_ids": ids, "labels": labels}
    if not bool(mask.all()):
        batch["attention_mask"] = mask
    if pixels:
        batch["pixel_values"] = torch.cat(pixels)
    if pixels and family.sizes:
        batch["image_sizes"] = torch.full((len(pixels), 2), 16)
    if grids:
        batch["image_grid_thw"] = torch.tensor(grids)
    if family.types is not None:
        batch[family.types] = (ids == IMAGE).to(torch.int64)
    return batch


def seeing_steps(name: str, number: int) -> list[list[dict[str, Tensor]]]:
    """Steps of three micro-batches: images of several sizes and numbers, no image, and one image."""
    first = SEEING[name].seed
    return [
        [
            images(name, [[(2, 2), (1, 3)], [(3, 2)], []], seed=first + 3 * s, padded=(5, 4)),
            images(name, [[], []], seed=first + 3 * s + 1, padded=(0, 3)),
            images(name, [[(2, 1)]], seed=first + 3 * s + 2, seq=11),
        ]
        for s in range(number)
    ]
