"""Exports: what stock transformers loads, in the type asked for, with tokenizer and template as they were."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from megatrain.checkpoint import checkpoint, hf_folder
from megatrain.checkpoint.export import export_checkpoint, folder_bytes, save_pretrained
from megatrain.checkpoint.save import save
from megatrain.errors import CheckpointError, ConfigError, StorageError
from megatrain.models.decoder import Decoder
from megatrain.system import safetensors_io
from megatrain.training.sampling import encode, find_model, generate, sample
from support.fake_core import MemoryCore, engine

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{# kept as it is: ä #}"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Bytes as tokens, the first of 96 ids."""
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())[:90])}
    model = Tokenizer(models.BPE(vocab=vocab | {"</s>": 90}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", chat_template=template)


def write(source: SimpleNamespace, out: Path, **options: object) -> None:
    save_pretrained(source.decoder, source.core, out, **options)


def stock(folder: Path) -> torch.nn.Module:
    """The model as stock transformers loads it, with nothing missing, unexpected or drawn anew."""
    model, told = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(told.values()), told
    return model


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp32"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("from_disk", [False, True])
def test_every_export_loads_in_stock_transformers_in_the_type_asked_for(
    tmp_path: Path, precision: str, dtype: str, tied: bool, from_disk: bool
) -> None:
    source = engine(precision, tied, seed=1)
    if from_disk:
        save(tmp_path / "step-1", source, {}, step=1)
        export_checkpoint(tmp_path / "step-1", tmp_path / "out", dtype=dtype)
    else:
        write(source, tmp_path / "out", dtype=dtype)
    asked = DTYPES[precision if dtype == "auto" else dtype]
    model = stock(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(asked).removeprefix("torch.")
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert names == set(source.decoder.tensors)
    for name, ref in source.decoder.tensors.items():
        value = model.state_dict()[name]
        assert value.dtype == asked
        if asked == torch.bfloat16 and precision == "bf16":
            wanted = source.core.planes[ref.unit, ref.tensor].weights.view(ref.shape)
        else:
            wanted = source.core.master(ref).to(asked)
        assert torch.equal(value, wanted), name
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head.data_ptr() == embedding.data_ptr()) == tied


def test_logits_of_the_export_are_those_of_the_weights(tmp_path: Path) -> None:
    source = engine("fp32", tied=True, seed=2)
    write(source, tmp_path / "out")
    twin = AutoModelForCausalLM.from_config(source.decoder.config, dtype=torch.float32).eval()
    twin.load_state_dict({name: source.core.master(ref) for name, ref in source.decoder.tensors.items()}, strict=False)
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert torch.equal(stock(tmp_path / "out")(ids).logits, twin(ids).logits)


def test_large_models_are_cut_into_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_io.plan_shards, "__defaults__", (20_000,))
    source = engine("bf16", seed=3)
    write(source, tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert set(index["weight_map"]) == set(source.decoder.tensors)
    assert set(index["weight_map"].values()) == {path.name for path in files}
    assert index["metadata"]["total_size"] == sum(2 * ref_numel(ref.shape) for ref in source.decoder.tensors.values())
    stock(tmp_path / "out")


def ref_numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def test_stock_safetensors_reads_what_we_write(tmp_path: Path) -> None:
    source = engine("bf16", seed=3)
    write(source, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert all(file.get_tensor(name).numel() for name in source.decoder.tensors)


def test_tokenizer_files_and_template_are_copied_byte_for_byte(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    tokenizer().save_pretrained(origin)
    (origin / "generation_config.json").write_text('{"temperature": 0.55,   "max_new_tokens": 3}')
    (origin / "model.safetensors").write_bytes(b"not to be copied")
    write(engine("bf16", seed=4), tmp_path / "out", tokenizer_dir=origin, tokenizer=tokenizer("another"))
    copied = {path.name for path in origin.iterdir()} - {"model.safetensors"}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= copied
    for name in copied:
        assert (tmp_path / "out" / name).read_bytes() == (origin / name).read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TEMPLATE


@pytest.mark.parametrize("with_code", [False, True])
def test_what_belongs_to_the_model_is_not_taken_from_the_folder_of_its_tokenizer(
    tmp_path: Path, with_code: bool
) -> None:
    """Code comes along where a configuration names it: of the tokenizer its own, of two alike the model's."""
    folders = tmp_path / "model", tmp_path / "tokenizer"
    for folder in folders:
        tokenizer().save_pretrained(folder)
        for name in (*hf_folder.MODEL_FILES, "shared.py", f"tokenizer_of_{folder.name}.py"):
            (folder / name).write_text(json.dumps({"of": folder.name}))
    own, of_tokenizer = folders
    (of_tokenizer / "tokenizer.json").write_text((of_tokenizer / "tokenizer.json").read_text() + "\n")
    source = engine("bf16", seed=4)
    if with_code:
        source.decoder.config.auto_map = {"AutoConfig": "shared.Config"}
        described = json.loads((of_tokenizer / "tokenizer_config.json").read_text())
        described["auto_map"] = {"AutoTokenizer": ["tokenizer_of_tokenizer.Own", None]}
        (of_tokenizer / "tokenizer_config.json").write_text(json.dumps(described))
    write(source, tmp_path / "out", model_dir=own, tokenizer_dir=of_tokenizer, tokenizer=tokenizer("another"))
    code = {"shared.py": own, "tokenizer_of_model.py": own, "tokenizer_of_tokenizer.py": of_tokenizer}
    for name, origin in {
        **dict.fromkeys(hf_folder.MODEL_FILES, own),
        **dict.fromkeys(("tokenizer.json", "tokenizer_config.json"), of_tokenizer),
        **(code if with_code else {}),
    }.items():
        assert (tmp_path / "out" / name).read_bytes() == (origin / name).read_bytes(), name
    assert {path.name for path in (tmp_path / "out").glob("*.py")} == (set(code) if with_code else set())

    write(source, tmp_path / "anew", model_dir=own, tokenizer=tokenizer("another"))
    assert AutoTokenizer.from_pretrained(tmp_path / "anew").chat_template == "another"
    assert (tmp_path / "anew/generation_config.json").read_bytes() == (own / "generation_config.json").read_bytes()


def test_a_tokenizer_object_is_saved_where_the_source_has_no_files(tmp_path: Path) -> None:
    write(engine("bf16", seed=4), tmp_path / "out", tokenizer=tokenizer())
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.chat_template == TEMPLATE
    assert again("abc")["input_ids"] == tokenizer()("abc")["input_ids"]


def test_a_checkpoints_tokenizer_reaches_its_export(tmp_path: Path) -> None:
    save(tmp_path / "step-1", engine("bf16", seed=4), {}, step=1, tokenizer=tokenizer())
    assert checkpoint.verify(tmp_path / "step-1") == []
    export_checkpoint(tmp_path / "step-1", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }


def test_integer_buffers_and_frozen_values_are_exported_untouched(tmp_path: Path) -> None:
    source = engine("bf16", seed=5)
    ref = source.decoder.tensors["model.norm.weight"]
    names = SimpleNamespace(**{k: getattr(ref, k) for k in ("name", "unit", "tensor", "shape", "is_buffer", "pieces")})
    names.dtype, names.role = torch.int64, "frozen"
    counted = torch.arange(32)
    source.core.planes[ref.unit, ref.tensor].weights = counted
    decoder = SimpleNamespace(
        tied=False,
        tensors={**source.decoder.tensors, ref.name: names},
        aliases={},
        config=source.decoder.config,
        model=source.decoder.model,
        precision="bf16",
        layout=None,
    )
    save_pretrained(decoder, source.core, tmp_path / "out", dtype="fp32")
    saved = load_file(tmp_path / "out" / "model.safetensors")[ref.name]
    assert saved.dtype == torch.int64
    assert torch.equal(saved, counted)


def test_the_rotary_scaling_is_in_the_exported_config(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500.0}
    source = engine("bf16", seed=6, rope_parameters=scaling, max_position_embeddings=256)
    write(source, tmp_path / "out")
    assert stock(tmp_path / "out").config.rope_parameters["factor"] == 4.0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("mine")
    with pytest.raises(ConfigError, match="exists already and is not empty"):
        write(engine("bf16", seed=7), out)
    assert (out / "precious").read_text() == "mine"
    write(engine("bf16", seed=7), out, overwrite=True)
    assert not (out / "precious").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = engine("bf16", seed=7)

    def broken(*_: object) -> None:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(source.core, "read", broken)
    with pytest.raises(StorageError, match="the disk is gone"):
        write(source, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_is_not_complete_is_not_exported(tmp_path: Path) -> None:
    save(tmp_path / "step-1", engine("bf16", seed=7), {}, step=1)
    (tmp_path / "step-1" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="not complete"):
        export_checkpoint(tmp_path / "step-1", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "residual.safetensors", "config.json", "tokenizer.json"])
def test_a_checkpoint_with_a_changed_byte_is_not_exported(tmp_path: Path, name: str) -> None:
    save(tmp_path / "step-1", engine("bf16", seed=7), {}, step=1, tokenizer=tokenizer())
    data = bytearray((tmp_path / "step-1" / name).read_bytes())
    data[len(data) * 2 // 3] ^= 1
    (tmp_path / "step-1" / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"step-1 is damaged: {name} .* take an earlier one"):
        export_checkpoint(tmp_path / "step-1", tmp_path / "out", dtype="fp32")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_removed_meanwhile_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "step-1", engine("bf16", seed=7), {}, step=1)
    plan = safetensors_io.plan_shards

    def remove(*arguments: Any) -> Any:
        (tmp_path / "step-1" / "model.safetensors").unlink()
        return plan(*arguments)

    monkeypatch.setattr(safetensors_io, "plan_shards", remove)
    with pytest.raises(CheckpointError, match=r"step-1 cannot be read any more .*output\.keep"):
        export_checkpoint(tmp_path / "step-1", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_moments_that_an_export_does_not_need_may_be_damaged(tmp_path: Path) -> None:
    save(tmp_path / "step-1", engine("bf16", seed=7), {}, step=1)
    moments = tmp_path / "step-1" / "exp_avg.safetensors"
    moments.write_bytes(moments.read_bytes()[:-1] + b"x")
    export_checkpoint(tmp_path / "step-1", tmp_path / "out", dtype="fp32")
    stock(tmp_path / "out")


def test_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    source = engine("fp32")
    save(tmp_path / "step-1", source, {}, step=1)
    layout: Any = "nested"
    with pytest.raises(ConfigError, match="layout must be source or library, not 'nested'"):
        save_pretrained(source.decoder, source.core, tmp_path / "out", layout=layout)
    with pytest.raises(ConfigError, match="layout must be source or library, not 'nested'"):
        export_checkpoint(tmp_path / "step-1", tmp_path / "out", layout=layout)
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------- generation


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints and no export."""
    for step in (1, 2):
        folder = tmp_path / "checkpoints" / f"step-{step}"
        save(folder, engine("fp32", tied=True, seed=step), {}, step=step, tokenizer=tokenizer())
    return tmp_path


def test_a_run_is_sampled_from_its_export_or_its_last_checkpoint_or_the_step_asked_for(run: Path) -> None:
    assert find_model(run) == run / "checkpoints" / "step-2"
    assert find_model(run, "1") == run / "checkpoints" / "step-1"
    export_checkpoint(run / "checkpoints" / "step-2", run / "export")
    assert find_model(run) == run / "export"
    assert find_model(run, "last") == run / "checkpoints" / "step-2"
    assert find_model(run / "checkpoints" / "step-1") == run / "checkpoints" / "step-1"


def test_generation_is_that_of_stock_transformers(run: Path) -> None:
    text = "".join(generate(run, "abc", max_new_tokens=8, temperature=0, raw=True))
    folder = run / "checkpoints" / "step-2"
    model, words = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([words("abc")["input_ids"]])
    theirs = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=90
    )
    assert text == words.decode(theirs[0, 3:], skip_special_tokens=True)
    assert text


def test_the_same_seed_gives_the_same_text(run: Path) -> None:
    first, again, other = ("".join(generate(run, "abc", max_new_tokens=12, seed=seed)) for seed in (5, 5, 6))
    assert first == again != other


def test_the_prompt_goes_through_the_chat_template_unless_raw() -> None:
    words = tokenizer()
    assert encode(words, "hi")[0].tolist() == words("<user>hi\n")["input_ids"]
    assert encode(words, "hi", raw=True)[0].tolist() == words("hi")["input_ids"]
    assert encode(tokenizer(None), "")[0].tolist() == [90]


def test_samples_during_training_are_the_likeliest_continuation() -> None:
    source = engine("fp32", tied=True, seed=2)
    model = AutoModelForCausalLM.from_config(source.decoder.config, dtype=torch.float32).eval()
    model.load_state_dict({n: source.core.master(r) for n, r in source.decoder.tensors.items()}, strict=False)

    class Computing:
        @torch.no_grad()
        def logits(self, input_ids: Tensor) -> Tensor:
            return model(input_ids).logits[0, -1]

    ids = encode(tokenizer(None), "abc")
    theirs = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, eos_token_id=90
    )
    words = tokenizer(None)
    assert sample(Computing(), words, "abc", 6) == words.decode(theirs[0, 3:], skip_special_tokens=True)
    assert sample(Computing(), words, "abc", 6, max_length=3) == ""


def test_what_cannot_be_sampled_is_refused_with_a_reason(run: Path, tmp_path: Path) -> None:
    for source, step, words in (
        (tmp_path / "nowhere", None, "no folder"),
        (run, "many", "a number or last"),
        (run / "checkpoints" / "step-1", "1", "not a run"),
    ):
        with pytest.raises(ConfigError, match=words):
            find_model(source, step)
    with pytest.raises(CheckpointError, match="does not exist"):
        find_model(run, "7")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="neither an export nor a complete checkpoint"):
        find_model(empty)
    with pytest.raises(ConfigError, match="positions"):
        generate(run, "abc", max_new_tokens=1000)
    with pytest.raises(ConfigError, match="top_p"):
        generate(run, "abc", top_p=0)


def test_decoder_and_double_agree_on_what_is_stored() -> None:
    decoder = Decoder.from_config({"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4,
                                   "num_key_value_heads": 2, "intermediate_size": 48, "num_hidden_layers": 1,
                                   "vocab_size": 50}, precision="bf16")  # fmt: skip
    core = MemoryCore(decoder)
    values = torch.tensor([1.0, 1.0000001, -3.14159274, 1e-30, 65504.0])
    ref = decoder.tensors["model.norm.weight"]
    core.write(ref.unit, ref.tensor, "master", values)
    out = torch.empty(5)
    core.read(ref.unit, ref.tensor, "master", out)
    assert torch.equal(out, values)


def test_a_tokenizer_is_reckoned_by_its_files_where_it_is_copied_and_by_its_entries_where_it_is_saved(
    tmp_path: Path,
) -> None:
    made = tokenizer()
    made.save_pretrained(tmp_path)
    files = sum(path.stat().st_size for path in tmp_path.iterdir())
    without = folder_bytes([], None, None)
    assert folder_bytes([], made, tmp_path) == folder_bytes([], None, tmp_path) == without + files
    assert without + files <= folder_bytes([], made, None) <= without + files + (1 << 20)
    (tmp_path / "processor_config.json").write_text("{}")
    assert folder_bytes([], made, tmp_path) == folder_bytes([], made, tmp_path, tmp_path) == without + files + 2


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PER_LAYER = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("kind", "rope", "older"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5}),
        (
            "llama",
            LLAMA3,
            {"rope_theta": 5e5, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
        ),
        (
            "stablelm",
            {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
        ),
        (
            "gemma3_text",
            PER_LAYER,
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
    ],
)
def test_older_readers_find_the_rotary_positions_where_they_look(
    tmp_path: Path, kind: str, rope: dict[str, Any], older: dict[str, Any]
) -> None:
    """`rope_theta` and `rope_scaling` are what transformers before 5 and most other readers look at."""
    config = AutoConfig.for_model(kind, rope_parameters=rope)
    expected = config.to_dict()
    described = json.loads(config.to_json_string(use_diff=True))
    try:
        both = type(config).from_dict(copy.deepcopy({**described, **older})).to_dict()
    except Exception as error:  # whatever this release says of keys that it does not take
        pytest.skip(f"this transformers does not take the older form for {kind}: {error}")
    if both != expected:
        pytest.skip(f"this transformers reads {kind} otherwise with both forms, so only one is written")
    for name, settings in (("alone", described), ("nested", {"model_type": "gemma3", "text_config": described})):
        if name == "nested" and kind != "gemma3_text":
            continue
        (tmp_path / name).mkdir()
        hf_folder.write_config(tmp_path / name, settings, torch.float32)
        written = json.loads((tmp_path / name / "config.json").read_text())
        held = written["text_config"] if name == "nested" else written
        assert {key: held[key] for key in (*older, "rope_parameters")} == {**older, "rope_parameters": rope}
        again = AutoConfig.from_pretrained(tmp_path / name)
        again = again.text_config if name == "nested" else again
        assert again.rope_parameters == expected["rope_parameters"]


def test_keys_that_transformers_would_read_otherwise_are_left_out(tmp_path: Path) -> None:
    for described in (
        {"model_type": "unheard-of", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"model_type": "llama", "rope_parameters": {"rope_type": "default"}},
        {"model_type": "gpt2"},
    ):
        hf_folder.write_config(tmp_path, described, torch.float32)
        assert json.loads((tmp_path / "config.json").read_text()) == {**described, "dtype": "float32"}
