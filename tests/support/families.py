"""Tiny configurations of the architectures that are trained against plain PyTorch, and of those that are refused."""

import dataclasses
from typing import Any

import torch

from megatrain.compat import PACKAGES, numbers
from support.reference import NO_DROPOUT

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
    Refusal(title="BERT as a decoder", kind="bert", reason="ties its embedding to a head that is not a plain matmul"),
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
    Refusal(title="Fuyu", kind="fuyu", reason="needs more than hidden states from its base model"),
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


COEFFICIENT = 0.3  # so large that a fault in the term cannot hide behind the cross-entropy
ASKED = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
"""What a configuration asks for so that the router's auxiliary loss is part of the loss."""
