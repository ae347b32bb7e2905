"""Tiny configurations of the architectures that are trained against plain PyTorch, and of those that are refused."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from megatrain.supported import PACKAGES, dotted, numbers
from reference import NO_DROPOUT
from seeing import SEEING

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture, tiny."""

    title: str
    """What people call it."""
    kind: str
    """Its `model_type`."""
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Beside `BASE`."""
    experts: bool = False
    """Whether it has experts, which transformers computes one by one (eager) or grouped."""


MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **MOE,
}

FAMILIES: dict[str, Family] = {
    "llama2": Family(title="Llama 2", kind="llama", changes={"num_key_value_heads": 4}),
    "llama3": Family(
        title="Llama 3",
        kind="llama",
        changes={
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 2.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "deepseek-llm": Family(title="DeepSeek-LLM", kind="llama", changes={"num_hidden_layers": 3}),
    "qwen2": Family(title="Qwen2, Qwen2.5", kind="qwen2", changes={"tie_word_embeddings": True}),
    "qwen3": Family(title="Qwen3", kind="qwen3", changes={"head_dim": 16}),
    "mistral": Family(title="Mistral", kind="mistral", changes={"sliding_window": 8}),
    "gemma": Family(title="Gemma", kind="gemma", changes={"head_dim": 16}),
    "gemma2": Family(
        title="Gemma 2", kind="gemma2", changes={"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}
    ),
    "gemma3": Family(
        title="Gemma 3, text",
        kind="gemma3_text",
        changes={
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": Family(title="Phi-3", kind="phi3", changes={"num_key_value_heads": 4, "sliding_window": 8}),
    "phi4": Family(title="Phi-4", kind="phi3", changes={"partial_rotary_factor": 0.75, "head_dim": 16}),
    "phi": Family(title="Phi-1.5, Phi-2", kind="phi", changes={}),
    "glm4": Family(title="GLM-4", kind="glm4", changes={"head_dim": 8}),
    "olmo2": Family(title="OLMo 2", kind="olmo2"),
    "olmo3": Family(
        title="OLMo 3",
        kind="olmo3",
        changes={"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "smollm3": Family(title="SmolLM3", kind="smollm3", changes={"no_rope_layers": [1, 0]}),
    "granite": Family(
        title="Granite",
        kind="granite",
        changes={
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
        },
    ),
    "gpt2": Family(
        title="GPT-2", kind="gpt2", changes={"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **NO_DROPOUT}
    ),
    "starcoder2": Family(title="StarCoder2", kind="starcoder2", changes={"sliding_window": 8}),
    "cohere": Family(title="Cohere", kind="cohere", changes={"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": Family(
        title="Cohere 2",
        kind="cohere2",
        changes={"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "falcon": Family(title="Falcon", kind="falcon", changes={"ffn_hidden_size": 48}),
    "bloom": Family(title="BLOOM", kind="bloom", changes={"n_layer": 2, "n_head": 4}),
    "opt": Family(
        title="OPT", kind="opt", changes={"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "pad_token_id": 0}
    ),
    "gpt-neox": Family(title="GPT-NeoX, Pythia", kind="gpt_neox"),
    "mpt": Family(title="MPT", kind="mpt", changes={"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "stablelm": Family(title="StableLM", kind="stablelm"),
    "nemotron": Family(title="Nemotron", kind="nemotron", changes={"head_dim": 8}),
    "exaone4": Family(
        title="EXAONE 4",
        kind="exaone4",
        changes={"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "ernie4.5": Family(title="ERNIE 4.5", kind="ernie4_5"),
    "seed-oss": Family(
        title="Seed-OSS", kind="seed_oss", changes={"head_dim": 8, "residual_dropout": 0.0, "attention_dropout": 0.0}
    ),
    "apertus": Family(title="Apertus", kind="apertus"),
    "glm": Family(title="GLM-4-9B (glm)", kind="glm", changes={"head_dim": 8}),
    "llama4": Family(
        title="Llama 4, text",
        kind="llama4_text",
        changes={
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 8,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "interleave_moe_layer_step": 2,
        },
    ),
    "lfm2": Family(
        title="LFM2", kind="lfm2", changes={"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}
    ),
    "mixtral": Family(
        title="Mixtral", kind="mixtral", changes={"num_local_experts": 4, "num_experts_per_tok": 2}, experts=True
    ),
    "qwen3-moe": Family(
        title="Qwen3-MoE",
        kind="qwen3_moe",
        changes={"num_experts": 4, "head_dim": 8, "mlp_only_layers": [0], **MOE},
        experts=True,
    ),
    "qwen2-moe": Family(
        title="Qwen2-MoE",
        kind="qwen2_moe",
        changes={"num_experts": 4, "shared_expert_intermediate_size": 24, **MOE},
        experts=True,
    ),
    "deepseek-v2": Family(
        title="DeepSeek-V2",
        kind="deepseek_v2",
        changes={**DEEPSEEK, "topk_method": "group_limited_greedy"},
        experts=True,
    ),
    "deepseek-v3": Family(title="DeepSeek-V3", kind="deepseek_v3", changes=DEEPSEEK, experts=True),
    "gpt-oss": Family(
        title="GPT-OSS",
        kind="gpt_oss",
        changes={
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 32,
            },
        },
        experts=True,
    ),
    "glm4-moe": Family(
        title="GLM-4-MoE",
        kind="glm4_moe",
        changes={
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "head_dim": 8,
            **MOE,
        },
        experts=True,
    ),
    "olmoe": Family(title="OLMoE", kind="olmoe", changes={"num_experts": 4, "num_experts_per_tok": 2}, experts=True),
    "afmoe": Family(
        title="AFMoE (Trinity)",
        kind="afmoe",
        changes={
            "num_experts": 4,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "head_dim": 8,
            "mup_enabled": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            **MOE,
        },
        experts=True,
    ),
    "granitemoe": Family(
        title="GraniteMoE", kind="granitemoe", changes={"num_local_experts": 4, "num_experts_per_tok": 2}, experts=True
    ),
    "phimoe": Family(
        title="Phi-3.5-MoE", kind="phimoe", changes={"num_local_experts": 4, "num_experts_per_tok": 2}, experts=True
    ),
    "qwen3-next": Family(
        title="Qwen3-Next",
        kind="qwen3_next",
        changes={"num_experts": 4, "shared_expert_intermediate_size": 24, **MOE, **HYBRID},
        experts=True,
    ),
    "qwen3.5": Family(title="Qwen3.5, text", kind="qwen3_5_text", changes=HYBRID),
    "qwen3.5-moe": Family(
        title="Qwen3.5-MoE, text",
        kind="qwen3_5_moe_text",
        changes={"num_experts": 4, "shared_expert_intermediate_size": 24, **MOE, **HYBRID},
        experts=True,
    ),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An architecture or setting that is not trained."""

    title: str
    kind: str
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    reason: str
    """Part of the message."""


def of_kind(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """What the configuration of a `model_type` has of `given`, written out with the type."""
    from transformers import CONFIG_MAPPING

    owner = CONFIG_MAPPING[kind]
    known = {field.name for field in dataclasses.fields(owner)} | set(owner.attribute_map)
    return {"model_type": kind} | {name: value for name, value in given.items() if name in known}


GEMMA_PER_LAYER: dict[str, Any] = {
    "head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
SECOND_INPUT = "a second input computed from embeddings"
ON_STUBS = "could not be run on stubs"
REFUSED: tuple[Refusal, ...] = (
    Refusal(title="T5", kind="t5", reason="is an encoder-decoder"),
    Refusal(title="BART", kind="bart", reason="is an encoder-decoder"),
    Refusal(
        title="Gemma 3n",
        kind="gemma3n_text",
        changes={**GEMMA_PER_LAYER, "laurel_rank": 4, "activation_sparsity_pattern": None},
        reason=SECOND_INPUT,
    ),
    Refusal(
        title="Gemma 4 (per-layer embeddings)",
        kind="gemma4_text",
        changes={**GEMMA_PER_LAYER, "global_head_dim": 8},
        reason=SECOND_INPUT,
    ),
    Refusal(title="DeepSeek-V4", kind="deepseek_v4", reason="passes state from layer to layer"),
    Refusal(title="BERT as a decoder", kind="bert", reason="ties its embedding to a head that is no plain matmul"),
    Refusal(title="RWKV", kind="rwkv", reason="has no attention heads"),
    Refusal(title="Mamba", kind="mamba", reason="has no attention heads"),
    Refusal(title="Gemma 4 (with vision)", kind="gemma4", reason=SECOND_INPUT),
    Refusal(title="Gemma 3n (with vision)", kind="gemma3n", reason="also has an audio part"),
    Refusal(title="Llama 4 (with vision)", kind="llama4", reason=ON_STUBS),
    Refusal(title="Llama 3.2 Vision", kind="mllama", reason="layers that do not run once each, in order"),
    Refusal(
        title="LLaVA-NeXT",
        kind="llava_next",
        changes={"text_config": {"model_type": "llama", **BASE}},
        reason="could not be run on a stub of an image",
    ),
    Refusal(title="Fuyu", kind="fuyu", reason="asks more of its base than hidden states"),
)

RANDOM_ROUTING = ("phimoe",)
"""Routers that draw random numbers in training, so that no other program has their numbers: replayed in recompute."""

ROUTER_LOSS = ("mixtral", "qwen3-moe", "qwen2-moe", "olmoe", "gpt-oss", "granitemoe", "qwen3-next", "qwen3.5-moe")
"""Where stock transformers adds a router's auxiliary loss when `output_router_logits` is set, and its numbers can be
compared."""

BY_DOCUMENT = ("lfm2", "bloom", "mpt", "opt", "gpt-oss", "afmoe", "qwen3-next", "qwen3.5", "qwen3.5-moe")
"""Where stock transformers lets documents of a packed row see each other (a state is carried from token to token, or
masks are built without looking at positions), so that the documents are the reference, each by itself."""
PACKS_SINCE = {"falcon": (5, 24)}
"""Families that are among them in releases of transformers before this one."""
CHUNKS_OF_DOCUMENTS_SINCE = {"llama4": (5, 23)}
"""The release since which chunks of attention are counted from the start of the document, not of the packed row."""

DENSE_MASKS = ("gemma2", "falcon")
"""Soft caps, and attention of its own: documents of a packed row are kept apart by a dense mask."""

CASES = [
    (name, experts)
    for name, family in FAMILIES.items()
    for experts in (("eager", "grouped_mm") if family.experts else (None,))
]
"""Families and the ways to compute their experts."""


def build(name: str, experts: str | None = None, **changes: Any) -> Any:
    """A tiny stock model with real, somewhat uneven weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family = FAMILIES[name]
    options = {"experts_implementation": experts} if experts else {}
    config = AutoConfig.for_model(family.kind, **{**BASE, **family.changes, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


HEAD = """# Architectures

Written by `python tests/families.py`; a test fails when it is not current. Each row is a tiny random model of stock
transformers, which `tests/test_families.py` trains on every run:

- *padded*: three clipped AdamW steps of two padded micro-batches (one behind, one before) in fp32 on the CPU. Losses,
  gradient norms, and of every tensor the gradient, both moments and the weight differ from an fp64 run by at most 1e-5,
  or by three times what plain fp32 PyTorch does, the largest of three ways to split the rows.
- *packed*: the same with several documents a row and all activations recomputed; documents do not see each other.
  *dense mask*: kept apart by one, which makes attention about 3 times as slow on a card; elsewhere attention takes
  documents of any length.
  *by document*: stock would let them (a state is carried from token to token, or masks are built without looking at
  positions), so the layers that do are given each document as a row of its own, and so is the reference. It costs a
  call of such a layer for each length of documents, eight lengths an octave, and at most an eighth of filling.
- *experts*: how transformers computes them; each way is trained. `batched_mm` gathers weights and is refused.
- *router loss*: with `output_router_logits` in the model's configuration, `tests/test_router.py` trains it with the
  router's auxiliary loss. It is taken over all tokens of the optimizer step, padding left out, of all layers: as stock
  transformers takes it over the step as one batch, however the step is split into micro-batches. *none in stock*: stock
  adds no such term, so none is added here.
- *in and out*: a folder of stock `save_pretrained` is read, trained and exported. Its keys are the source's, stock
  `from_pretrained` finds none missing or unexpected, and logits are equal.

A source is read in whichever form the hub has it, and exported in that form or in the library's: beside experts apart
and fused, tensors that are published transposed (Qwen3-VL-MoE), with interleaved rows or heads, or several in one
(`tests/test_layouts.py`, `tests/test_conversion.py`). Weights that are published in MXFP4 (GPT-OSS) or in FP8 with a
scale for each block (DeepSeek-V3) are dequantised as they are read, to the values that stock gives with
`dequantize=True`; they are trained and exported unquantised (`tests/test_quantised.py`). Other ways to quantise are
refused by name.

| Architecture | `model_type` | padded | packed | experts | router loss | in and out |
|---|---|---|---|---|---|---|"""
SEEING_HEAD = """
## With vision

Images are merged by the model's own code: its vision tower and projector belong to the embed unit, are sent with it,
and are trained or frozen (`freeze: ["*visual*"]`). A micro-batch holds what the model's processor makes:
`pixel_values`, `image_grid_thw`, `token_type_ids`, … Features that a model adds behind its first layers (Qwen3-VL) are
added there. What no layer depends on (the last block of LLaVA's tower) is left as it is, and so is all that sees
images in a step without one, as in PyTorch. `tests/test_vision.py` trains each:

- *trained*, *frozen tower*: three clipped AdamW steps as above, of three micro-batches each: rows of two, one and no
  image, of several sizes where the model takes them, padded behind and before; text alone; one image. All parameters
  are trained, or all but the tower's (and all activations recomputed).
- *in and out*: as above, in the layout of published checkpoints.

| Architecture | `model_type` | trained | frozen tower | in and out |
|---|---|---|---|---|"""
BETWEEN = """
[^1]: Its router draws random numbers in training, so no other program has the same ones. Recomputation is bit-equal
    to keeping activations instead.

[^2]: Before transformers 5.23, which we follow, its chunks of attention are counted from the start of the row, and
    since then from the start of the document.

Others of the same form run too: what is needed is found by running the model's own code on stubs, not by its name.
What cannot be trained exactly is refused before anything is loaded:

| Refused | `model_type` | because it |
|---|---|---|"""


def table() -> str:
    """The page of the documentation: what `test_families.py` runs."""
    lines = [HEAD]
    for name, family in FAMILIES.items():
        padded = "replayed [^1]" if name in RANDOM_ROUTING else "yes"
        packing = "by document" if name in BY_DOCUMENT else "dense mask" if name in DENSE_MASKS else padded
        if since := PACKS_SINCE.get(name):
            packing += f"; by document before transformers {dotted(since)}"
        packing += " [^2]" if name in CHUNKS_OF_DOCUMENTS_SINCE else ""
        experts = "eager, grouped_mm" if family.experts else ""
        router = "replayed [^1]" if name in RANDOM_ROUTING else "yes" if name in ROUTER_LOSS else "none in stock"
        router = router if family.experts else ""
        lines.append(f"| {family.title} | `{family.kind}` | {padded} | {packing} | {experts} | {router} | yes |")
    lines.append(SEEING_HEAD)
    lines += [f"| {family.title} | `{family.kind}` | yes | yes | yes |" for family in SEEING.values()]
    lines.append(BETWEEN)
    lines += [f"| {r.title} | `{r.kind}` | {r.reason} |" for r in REFUSED]
    return "\n".join(lines) + "\n"


def by_document(name: str) -> bool:
    """Whether the installed transformers lets documents of a packed row see each other."""
    return name in BY_DOCUMENT or _installed() < PACKS_SINCE.get(name, ())


def as_if_alone(name: str) -> bool:
    """Whether a document in a packed row is computed as it would be by itself."""
    return _installed() >= CHUNKS_OF_DOCUMENTS_SINCE.get(name, ())


def records_router(name: str) -> bool:
    """Whether the installed transformers says where a family's router has its logits. The newest that the tests run
    does for every one; where an older one does not, the auxiliary loss is refused."""
    recorded = getattr(build(name).base_model, "_can_record_outputs", None) or {}
    return "router_logits" in recorded or _installed()[:2] >= PACKAGES["transformers"].newest


def _installed() -> tuple[int, ...]:
    import transformers

    return numbers(transformers.__version__)


PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"

if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(table(), encoding="utf-8")
