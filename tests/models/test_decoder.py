"""Cutting models into units, and refusing those that cannot be streamed."""

import dataclasses
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import megatrain
from megatrain.config.default_length import max_positions
from megatrain.engine.layer_cost import measure
from megatrain.engine.profile import plan_request
from megatrain.errors import ConfigError
from megatrain.models.decoder import Decoder
from megatrain.models.hf_config import load_config
from megatrain.models.meta_init import build_without_storage
from megatrain.names import format_names
from megatrain.weights.state_format import StateFormat
from support.families import of_kind
from support.reference import SIZES, batches, build, check_training, config, engine, scaled


def decoder(kind: str = "llama", **changes: Any) -> Decoder:
    return Decoder.from_config(config(kind, **changes))


def test_every_tensor_of_the_state_dict_is_in_one_unit_under_its_own_name() -> None:
    for kind, tied in (("llama", False), ("llama", True), ("gpt2", True)):
        cut, stock = decoder(kind, tie_word_embeddings=tied), build(kind, tie_word_embeddings=tied)
        assert set(cut.tensors) | set(cut.aliases) == set(stock.state_dict())
        assert set(cut.tensors) == dict(stock.named_parameters()).keys()
        assert [u.name for u in cut.units] == ["embed", *(f"layers.{i}" for i in range(4)), "head"]
        assert all(cut.tensors[t.name] is t for unit in cut.units for t in unit.tensors)
        assert cut.num_parameters == sum(p.numel() for p in stock.parameters())


def test_embed_and_head_hold_what_runs_before_and_after_the_layers() -> None:
    plain, tied, gpt2 = decoder(), decoder(tie_word_embeddings=True), decoder("gpt2")
    assert [t.name for t in plain.units[0].tensors] == ["model.embed_tokens.weight"]
    assert [t.name for t in plain.units[-1].tensors] == ["model.norm.weight", "lm_head.weight"]
    assert [t.name for t in tied.units[-1].tensors] == ["model.norm.weight"]
    assert tied.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert [t.name for t in gpt2.units[0].tensors] == ["transformer.wte.weight", "transformer.wpe.weight"]
    assert [t.name for t in gpt2.units[-1].tensors] == ["transformer.ln_f.weight", "transformer.ln_f.bias"]


def test_a_decoder_is_frozen_and_complete() -> None:
    cut = decoder()
    with pytest.raises(dataclasses.FrozenInstanceError):
        cut.tied = True  # type: ignore[misc]
    fields = {field.name: getattr(cut, field.name) for field in dataclasses.fields(cut)}
    assert Decoder.from_fields(**fields).units is cut.units
    del fields["units"]
    with pytest.raises(TypeError, match=r"fields \['units'\] are missing or unknown"):
        Decoder.from_fields(**fields)


def test_threads_that_record_at_once_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Decoder(build()).recorder
    long, short = (torch.zeros(1, seq, dtype=torch.int64) for seq in (9, 4))
    wanted = [recorder.record(ids).kwargs[-1]["position_embeddings"] for ids in (long, short)]
    call, begun = recorder.call, threading.Event()

    def slow(*given: Any) -> Any:
        if not begun.is_set():
            begun.set()
            time.sleep(0.3)
        return call(*given)

    monkeypatch.setattr(recorder, "call", slow)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(recorder.record, long)
        assert begun.wait(30)
        records = [recorder.record(short), first.result()]
    for record, rotary in zip(reversed(records), wanted, strict=True):
        assert len(record.args) == recorder.num_layers
        found = record.kwargs[-1]["position_embeddings"]
        assert all(torch.equal(one, other) for one, other in zip(found, rotary, strict=True))


def test_names_within_a_unit_are_those_of_its_own_modules() -> None:
    for kind in ("llama", "gpt2"):
        cut = decoder(kind)
        for index, layer in enumerate(cut.layers):
            names = [name for name, _ in layer.named_parameters()]
            split = cut.splits[cut.structure_of[index]]
            assert not isinstance(split, str)
            by_half = sorted(names, key=split.half_of)  # so that both orders of summing a norm are one
            assert cut.local_names(index + 1) == {name: i for i, name in enumerate(by_half)}
        assert list(cut.local_names(0)) == [t.name for t in cut.units[0].tensors]
        assert list(cut.local_names(5)) == [t.name for t in cut.units[5].tensors]


def test_building_allocates_no_parameters_and_real_buffers() -> None:
    cut = Decoder.from_config(config(vocab_size=1 << 20, hidden_size=1 << 14, num_attention_heads=128))
    assert all(p.device.type == "meta" for p in cut.model.parameters())
    assert all(b.device.type == "cpu" for b in cut.model.buffers())
    assert cut.num_parameters > 1 << 34


@pytest.mark.parametrize("rope", [None, *ROPE_INIT_FUNCTIONS])
def test_buffers_equal_a_normally_built_models_whatever_was_in_memory_before(rope: str | None) -> None:
    model = scaled(rope) if rope else build()
    junk = [torch.full((1 << 12,), float("nan")) for _ in range(256)]
    del junk
    ours, stock = dict(Decoder.from_config(model.config).model.named_buffers()), dict(model.named_buffers())
    assert set(ours) == set(stock)
    assert all(torch.equal(ours[name], stock[name]) for name in stock)


def test_layers_of_one_shape_but_different_windows_have_different_structures() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    mixed = decoder("qwen2", layer_types=kinds, use_sliding_window=True, sliding_window=8)
    assert mixed.structure_of == (0, 1, 0, 1)
    assert decoder("qwen2").structure_of == (0, 0, 0, 0)
    frozen = Decoder.from_config(config(), freeze=["*.layers.2.*"])
    assert frozen.structure_of == (0, 0, 1, 0)


def test_heads_with_scale_and_cap_are_told_from_plain_ones() -> None:
    assert (decoder().head.plain, decoder().head.logit_scale, decoder().head.softcap) == (True, 1.0, None)
    gemma = decoder("gemma2", head_dim=16, query_pre_attn_scalar=16, final_logit_softcapping=20.0).head
    assert (gemma.plain, gemma.logit_scale, gemma.softcap) == (True, 1.0, 20.0)
    granite = decoder("granite", logits_scaling=8.0).head
    assert (granite.plain, granite.logit_scale, granite.softcap) == (True, 0.125, None)
    assert decoder("gptj", n_embd=64, n_layer=4, n_head=4, rotary_dim=8).head.bias == "lm_head.bias"


def test_a_head_of_its_own_kind_runs_the_models_own_forward() -> None:
    from transformers import LlamaForCausalLM

    class Squared(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * output.logits.abs()
            return output

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Squared(config()).train()
    ours = engine(model, plan={"loss_chunk": 16})
    assert not ours.decoder.head.plain
    check_training(model, [batches(2, seed=s) for s in range(2)], plan={"loss_chunk": 16})


def test_positions_count_rotary_scaling() -> None:
    assert max_positions(config()) == 64
    assert max_positions(scaled("dynamic").config) == 128


def test_parameters_that_the_forward_never_uses_stay_as_torch_leaves_them() -> None:
    model = build()
    for index, layer in enumerate(model.model.layers):
        layer.register_parameter("spare", torch.nn.Parameter(torch.full((3,), float(index))))
    model.model.register_parameter("spare", torch.nn.Parameter(torch.ones(2)))
    ours, exact = check_training(model, [batches(2, seed=s) for s in range(2)])
    assert set(exact.gradients) == {n for n, t in ours.decoder.tensors.items() if t.role == "trainable"}
    assert torch.equal(ours.weight("model.layers.3.spare"), torch.full((3,), 3.0))
    assert torch.equal(ours.weight("model.spare"), torch.ones(2))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("t5", {}, "encoder-decoder"),
    ("llama", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type 'spiral'"),
    ("gemma4_text", {"head_dim": 16}, "second input computed from embeddings"),
    ("opt", {"ffn_dim": 128, "word_embed_proj_dim": 64, "layerdrop": 0.1}, "layerdrop"),
]


@pytest.mark.parametrize(("kind", "changes", "reason"), REFUSED, ids=[r[0] for r in REFUSED])
def test_what_cannot_be_trained_exactly_is_refused_by_name(kind: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Decoder.from_config(of_kind(kind, SIZES | changes))


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (
            {"model_type": "llama", "hiden_size": 32},
            r"model\.config\.hiden_size is not a key of llama; did you mean model\.config\.hidden_size\?",
        ),
        (
            {"model_type": "gpt2", "n_layers": 2},
            r"n_layers is not a key of gpt2; did you mean model\.config\.n_layer\?",
        ),
        (
            {"model_type": "llava", "text_config": {"model_type": "llama", "hiden_size": 32}},
            r"model\.config\.text_config\.hiden_size is not a key of llama",
        ),
        ({"model_type": "llama", "colour": "red"}, r"model\.config\.colour is not a key of llama; remove it"),
        (
            {"model_type": "llama", "colour": "red", "transformers_version": "99.1.0"},
            r"colour is not a key of llama \(transformers 99\.1\.0 has written it, and [\d.]+ is installed: upgrade",
        ),
        (
            {"model_type": "llama5", "transformers_version": "99.1.0"},
            r"'llama5', which the installed transformers does not know \(transformers 99\.1\.0 has written it",
        ),
        (
            {"model_type": "llama", "colour": "red", "transformers_version": "4.0"},
            "colour is not a key of llama; remove",
        ),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\], not the name of a kind of model"),
        ({"model_type": "lama"}, "'lama', which the installed transformers does not know; did you mean llama"),
        ({"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}, r"model\.config: .*\(30\).*heads \(4\)"),
        ({"model_type": "llama", "hidden_size": "many"}, r"model\.config: .*'hidden_size' expected int"),
        ({"model_type": "phi3", "vocab_size": 64}, "phi3: pad_token_id is 32000, and the vocabulary has 64"),
        ({"model_type": "clip"}, "clip is not a causal language model"),
        (
            {"model_type": "musicgen"},
            "encoder-decoder|musicgen: .*text_encoder",
        ),  # releases differ in what they see first
        ({"model_type": "whisper"}, "encoder-decoder"),
        ({"model_type": "falcon_mamba"}, "falcon_mamba has no attention heads"),
        ({"model_type": "zamba", "num_hidden_layers": 2}, "zamba: .*num_hidden_layers"),
        ({"model_type": "prophetnet", "num_hidden_layers": 2}, "prophetnet: .*num_encoder_layers"),
        ({"model_type": "reformer"}, "reformer cannot be built: .*is_decoder=True"),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_a_configuration_that_is_no_models_is_refused_with_what_to_write(written: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Decoder.from_config(written)


HUGE = 10**9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": HUGE}, "num_hidden_layers is 1000000000, more than the 4,096 that a model may have"),
        ({"head_dim": HUGE}, "head_dim is 1000000000, more than the 1,048,576"),
        ({"hidden_size": HUGE}, "hidden_size is 1000000000, more than the 1,048,576"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings is 10{30}, more than the 9,2"),
        ({"model_type": "gpt2", "n_layer": HUGE}, "n_layer is 1000000000, more than the 4,096"),
        ({"model_type": "qwen2", "num_hidden_layers": HUGE}, "num_hidden_layers is"),  # lists its layers by kind
        ({"model_type": "llava", "text_config": {"model_type": "qwen2", "num_hidden_layers": HUGE}},
         r"text_config\.num_hidden_layers is"),
        ({"model_type": "llava", "vision_config": {"image_size": HUGE}}, r"vision_config\.image_size is"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_size_of_no_model_is_refused_before_it_is_built(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    written = {"model_type": "llama", **(SIZES if "model_type" not in changes else {}), **changes}
    with pytest.raises(ConfigError, match=rf"^model\.config\.{words}"):
        load_config(written)
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(ConfigError, match=rf"config\.json: {words}"):
        load_config(tmp_path)
    if changes.keys() <= SIZES.keys():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
        with pytest.raises(ConfigError, match=rf"^model\.config\.{words}"):
            load_config(tmp_path, overrides=changes)
        made = config()
        made.__dict__.update(changes)  # by hand, or as a GGUF file says
        with pytest.raises(ConfigError, match=f"^llama: {words}"):
            Decoder.from_config(made)


@pytest.mark.parametrize("key", ["text_config", "decoder", "vision_config"])
@pytest.mark.parametrize("value", [{"a": 1}, {}, 5, [], "x"], ids=str)
def test_what_stands_in_the_place_of_a_part_of_a_model_and_is_none_is_refused(
    tmp_path: Path, key: str, value: Any
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, key: value}))
    with pytest.raises(ConfigError, match=rf"llama: {key} is {re.escape(repr(value))}, which LlamaConfig does not"):
        Decoder.from_config(tmp_path)


def test_keys_that_the_models_class_or_code_reads_are_taken() -> None:
    generic = {"torch_dtype": "bfloat16", "architectures": ["X"], "transformers_version": "5", "auto_map": {}}
    old = {"rope_theta": 500.0, "bos_token_id": 1, "num_labels": 2, "use_cache": False}
    found = load_config({"model_type": "llama", **SIZES, **generic, **old})
    assert found.rope_parameters["rope_theta"] == 500.0
    assert load_config({"model_type": "qwen2", **SIZES, "head_dim": 8}).head_dim == 8  # read by the model alone
    assert load_config({"model_type": "gpt2", "hidden_size": 32}).n_embd == 32


def test_keys_of_a_vendor_in_a_folder_are_told_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **SIZES, "vendor_flag": 1}))
    with caplog.at_level("INFO", logger="megatrain"):
        assert Decoder.from_config(tmp_path).num_layers == 4
    assert "keys that llama does not know: ['vendor_flag']" in caplog.text
    path.write_text(json.dumps({"model_type": "llama", **SIZES, "hidden_size": 30}))
    with pytest.raises(ConfigError, match=r"no configuration of a model in .*hidden size \(30\)"):
        Decoder.from_config(tmp_path)


def test_a_folder_of_a_newer_transformers_says_so(tmp_path: Path) -> None:
    keys = {"model_type": "llama9", "architectures": ["Llama9"], "transformers_version": "99.1.0"}
    (tmp_path / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no configuration of a model in .*transformers 99\.1\.0 has written it"):
        load_config(tmp_path)


TOWER = [f"model.tower.layers.{i}.{name}.weight" for i in range(24) for name in ("attn.q", "attn.k", "mlp.up", "norm")]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], ""),
        (["a.1.weight"], "a.1.weight"),
        (["a", "b", "c", "d", "e", "f"], "a, b, c, d and 2 more"),
        ([f"layers.{i}.gate" for i in range(9)] + ["extra.0.bias"], "layers.*.gate (9), extra.0.bias"),
        (
            TOWER,
            " (24), ".join(f"model.tower.layers.*.{n}.weight" for n in ("attn.q", "attn.k", "mlp.up", "norm"))
            + " (24)",
        ),
        (
            [*TOWER, "model.tower.patch"],
            (
                "model.tower.layers.*.attn.* (48), model.tower.layers.*.mlp.* (24), "
                "model.tower.layers.*.norm.* (24), model.tower.patch"
            ),
        ),
        ([f"{n}.0.{m}" for n in "abcde" for m in "xy"], "a.*.* (2), b.*.* (2), c.*.* (2), d.*.* (2) and 2 more"),
    ],
)
def test_however_many_parameters_are_listed_in_a_line(names: list[str], said: str) -> None:
    assert format_names(names) == said


def test_a_model_with_many_unused_parameters_says_so_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    model.model.tower = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(50))
    with caplog.at_level("WARNING", logger="megatrain"):
        ours = engine(model)
        ours.step(batches(1))
    (said,) = [record.getMessage() for record in caplog.records if "get no gradient" in record.getMessage()]
    assert said.endswith(": model.tower.*.weight (50), model.tower.*.bias (50)")
    assert {t.role for t in ours.decoder.tensors.values() if "tower" in t.name} == {"frozen"}


ZERO = [
    ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
    ("mistral", {"sliding_window": -1}, "sliding_window is -1"),
    ("gemma3_text", {"head_dim": 16, "sliding_window": 0}, "sliding_window is 0"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 2}, "sliding_window is 0"),
    ("llama4_text", {"attention_chunk_size": 0, "num_local_experts": 2}, "attention_chunk_size is 0"),
]


@pytest.mark.parametrize(("kind", "changes", "words"), ZERO, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_window_without_the_token_itself_is_refused(
    kind: str, changes: dict[str, Any], words: str, attention: str
) -> None:
    settings = config(kind, **changes)
    with pytest.raises(ConfigError, match=f"{kind}: {words}.*null for full attention"):
        Decoder.from_config(settings, attention=attention)
    model = build_without_storage(settings, torch.float32, attention)
    with pytest.raises(ConfigError, match=f"{type(model).__name__}: {words}.*null for full attention"):
        Decoder(model)


def test_a_window_that_no_layer_has_is_not_looked_at() -> None:
    assert decoder("qwen2", use_sliding_window=False, sliding_window=0).num_layers == 4
    assert decoder("mistral", sliding_window=None).num_layers == 4
    assert decoder("mistral", sliding_window=1).num_layers == 4


def test_an_experts_implementation_that_gathers_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="batched_mm"):
        Decoder.from_config(config("mixtral", num_local_experts=4), experts="batched_mm")


def test_state_passed_from_layer_to_layer_is_refused() -> None:
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaModel

    class Sharing(LlamaModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs, shared={})

    model = LlamaForCausalLM(config())
    model.model = Sharing(config())
    with pytest.raises(ConfigError, match="passes state from layer to layer"):
        Decoder(model)


def test_a_model_that_changes_hidden_states_between_layers_is_refused() -> None:
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaModel

    class Scaling(LlamaModel):
        def forward(self, input_ids: Any, **_: Any) -> Any:
            hidden = self.embed_tokens(input_ids)
            for layer in self.layers:
                hidden = layer(hidden) * 2.0
            return (self.norm(hidden),)

    model = LlamaForCausalLM(config())
    model.model = Scaling(config())
    with pytest.raises(ConfigError, match="changes the hidden states between its layers"):
        Decoder(model)


def test_unknown_attention_and_a_config_without_a_type_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be auto, sdpa or eager"):
        Decoder.from_config(config(), attention="flash_attention_9")
    with pytest.raises(ConfigError, match="model_type"):
        Decoder.from_config({"hidden_size": 64})
    with pytest.raises(ConfigError, match="no configuration of a model"):
        Decoder.from_config("/nowhere/at/all")


@pytest.mark.parametrize("version", ["4.57.1", "5.16.3", "6.0.0"])
def test_a_transformers_that_was_not_tried_is_refused_with_the_range(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(ConfigError, match=f"transformers {version} is installed; megatrain works with 5.17"):
        Decoder.from_config(config())


def test_a_torch_that_is_too_old_is_refused_with_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.1+cu126")
    with pytest.raises(ConfigError, match=r"torch 2\.8\.1\+cu126 is installed; megatrain works with 2\.9 or newer"):
        Decoder.from_config(config())


def test_freezing_nothing_or_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match="'\\*query\\*' matches no parameter"):
        Decoder.from_config(config(), freeze=["*query*"])
    with pytest.raises(ConfigError, match="leaves no parameter to train"):
        Decoder.from_config(config(), freeze=["*"])


def test_a_frozen_tensor_keeps_the_type_it_was_stored_in() -> None:
    stored = {"model.layers.0.mlp.up_proj.weight": torch.bfloat16}
    cut = Decoder.from_config(config(), freeze=["*up_proj*"], frozen_dtypes=stored)
    assert cut.tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert cut.tensors["model.layers.1.mlp.up_proj.weight"].dtype == torch.float32
    assert cut.tensors["model.layers.0.mlp.down_proj.weight"].role == "trainable"


def test_a_parameter_without_values_is_an_error_that_names_it() -> None:
    model = build()
    layer = model.model.layers[2].mlp
    layer.up_proj.weight = torch.nn.Parameter(layer.up_proj.weight.to("meta"))
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.mlp\.up_proj\.weight has no values"):
        megatrain.Engine(model, device="cpu", micro_batch=(1, 8), micro_batches=1)


def test_a_buffer_without_values_is_an_error_that_names_it() -> None:
    with torch.device("meta"):
        model = build_without_storage(config(), torch.float32)
    with pytest.raises(ConfigError, match=r"buffer model\.rotary_emb\.inv_freq has no values"):
        Decoder(model)


def test_the_request_counts_every_parameter_and_measures_what_a_layer_keeps() -> None:
    cut = decoder()
    request = plan_request(
        cut,
        micro_batch=(2, 32),
        micro_batches=3,
        grad_precision="bf16",
        state_format=StateFormat(),
        update="just_in_time",
        budget={"device": 1 << 30, "host": 1 << 30},
        device="cpu",
    )
    counted = sum(torch.Size(t["shape"]).numel() for u in request["units"] for t in u["tensors"])
    assert counted == cut.num_parameters
    assert request["grad_precision"] == "fp32"  # fp32 training sends fp32 gradients
    one, two = measure(cut, cut.units[1], 1, 32, "cpu"), measure(cut, cut.units[1], 2, 32, "cpu")
    assert two.kept_bytes == 2 * one.kept_bytes > 0
    matmuls = 2 * 64 * sum(p.numel() for p in cut.layers[0].parameters() if p.ndim == 2)
    causal_attention = 2 * 2 * 2 * 4 * 32 * 32 * 16 // 2
    assert two.flops == matmuls + causal_attention
