"""Files of weights into the store: bit for bit, in little memory, and refused with a reason when they are damaged."""

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from megatrain.errors import ConfigError
from megatrain.models.decoder import Decoder
from megatrain.system.safetensors_io import DamagedFile, read_shard
from megatrain.weights.initialize import DrawnBy, initialize
from megatrain.weights.loader import load
from megatrain.weights.matching import match
from megatrain.weights.source import TensorWeights, open_weights, resolve
from support import private_memory
from support.fake_core import MemoryCore, engine, llama


def reference(tied: bool = False, dtype: torch.dtype = torch.float32, **changes: object) -> torch.nn.Module:
    """A stock model with random weights that no power of two hides."""
    settings = {k: v for k, v in llama(tied, **changes).items() if k != "model_type"}
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(LlamaConfig(**settings), dtype=dtype)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A bf16 model in several shards, as stock transformers writes it."""
    folder = tmp_path / "sharded"
    reference(dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    return folder


def loaded(folder: Path, precision: str = "bf16", tied: bool = False) -> SimpleNamespace:
    target = engine(precision, tied)
    load(open_weights(resolve(str(folder))), target.decoder, target.core)
    return target


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("shard_size", ["20KB", "5GB"])
@pytest.mark.parametrize("tied", [False, True])
def test_one_file_or_many_load_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, precision: str, shard_size: str, tied: bool
) -> None:
    model = reference(tied, dtype)
    model.save_pretrained(tmp_path / "model", max_shard_size=shard_size)
    target = loaded(tmp_path / "model", precision, tied)
    values = model.state_dict()
    for name, ref in target.decoder.tensors.items():
        assert torch.equal(target.core.master(ref), values[name].float()), name
    assert set(values) == set(target.decoder.tensors) | set(target.decoder.aliases)


def test_the_base_models_prefix_may_be_missing_or_extra(tmp_path: Path) -> None:
    model = reference(tied=True)
    values = {
        name.removeprefix("model."): value for name, value in model.state_dict().items() if name != "lm_head.weight"
    }
    save_file({name: value.contiguous() for name, value in values.items()}, tmp_path / "model.safetensors")
    target = loaded(tmp_path, "fp32", tied=True)
    ref = target.decoder.tensors["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(target.core.master(ref), model.state_dict()[ref.name])


def test_a_head_saved_beside_its_tied_embedding_is_accepted_when_equal_and_refused_when_not(tmp_path: Path) -> None:
    values = {name: value.clone() for name, value in reference(tied=True).state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    loaded(tmp_path, "fp32", tied=True)
    values["lm_head.weight"][5, 5] += 1
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"one tied weight.*tie_word_embeddings: false"):
        loaded(tmp_path, "fp32", tied=True)


def test_a_tied_weight_stored_only_under_the_heads_name_is_found(tmp_path: Path) -> None:
    values = {name: value.clone() for name, value in reference(tied=True).state_dict().items()}
    wanted = values.pop("model.embed_tokens.weight")
    save_file(values, tmp_path / "model.safetensors")
    target = loaded(tmp_path, "fp32", tied=True)
    assert torch.equal(target.core.master(target.decoder.tensors["model.embed_tokens.weight"]), wanted)


def test_missing_extra_and_misshapen_tensors_are_all_named() -> None:
    target = engine("fp32")
    values = dict(reference().state_dict())
    del values["model.norm.weight"]
    values["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)
    values["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    values["model.layers.1.mlp.up_proj.weight"] = torch.zeros(48, 32, dtype=torch.int8)
    with pytest.raises(ConfigError) as caught:
        match(TensorWeights(values, "here"), target.decoder)
    for words in (
        "lacks model.norm.weight",
        "model.layers.9.mlp.up_proj.weight",
        "which the model does not have",
        "[3, 3]",
        "[48, 32]",
        "int8",
    ):
        assert words in str(caught.value)


def test_experts_are_read_as_published_and_as_the_library_holds_them(tmp_path: Path) -> None:
    settings: dict[str, Any] = {k: v for k, v in llama().items() if k != "model_type"}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MixtralConfig(**settings, num_local_experts=4, num_experts_per_tok=2))
    decoder = Decoder.from_config(model.config, precision="fp32")
    for folder, published in (("apart", True), ("fused", False)):
        model.save_pretrained(tmp_path / folder, save_original_format=published)
        core = MemoryCore(decoder)
        found = load(open_weights(resolve(str(tmp_path / folder))), decoder, core)
        assert any(".experts.0." in name for name in found) == published
        for name, ref in decoder.tensors.items():
            assert torch.equal(core.planes[ref.unit, ref.tensor].weights.view(ref.shape), model.state_dict()[name])


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    settings: dict[str, Any] = {k: v for k, v in llama().items() if k != "model_type"}
    model = AutoModelForCausalLM.from_config(MixtralConfig(**settings, num_local_experts=4, num_experts_per_tok=2))
    model.save_pretrained(tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    del values["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.1\.block_sparse_moe\.experts\.2\.w3\.weight"):
        match(TensorWeights(values, "here"), Decoder.from_config(model.config, precision="fp32"))


def test_rotary_buffers_of_older_files_are_left_out() -> None:
    values = dict(reference().state_dict()) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    target = engine("fp32")
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in match(TensorWeights(values, ""), target.decoder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(bad: float) -> None:
    values = {name: value.clone() for name, value in reference().state_dict().items()}
    values["model.layers.2.mlp.down_proj.weight"][1, 2] = bad
    target = engine("bf16")
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.mlp\.down_proj\.weight in here .*not finite"):
        load(TensorWeights(values, "here"), target.decoder, target.core)


def test_frozen_tensors_keep_exactly_what_the_source_had() -> None:
    values = {name: value.clone() for name, value in reference().state_dict().items()}
    names = [name for name in values if "embed" in name]
    target = SimpleNamespace(
        decoder=Decoder.from_config(
            llama(), precision="bf16", freeze=["*embed*"], frozen_dtypes=dict.fromkeys(names, torch.float32)
        )
    )
    target.core = MemoryCore(target.decoder)
    load(TensorWeights(values, "here"), target.decoder, target.core)
    for name in names:
        ref = target.decoder.tensors[name]
        assert ref.role == "frozen"
        assert torch.equal(target.core.planes[ref.unit, ref.tensor].weights.view(ref.shape), values[name])
    narrow = engine("bf16", freeze=["*embed*"])
    with pytest.raises(ConfigError, match=r"torch\.bfloat16 cannot hold exactly"):
        load(TensorWeights(values, "here"), narrow.decoder, narrow.core)


def test_progress_ends_at_the_sum(sharded: Path) -> None:
    target = engine("bf16")
    seen: list[tuple[int, int]] = []
    load(open_weights(resolve(str(sharded))), target.decoder, target.core, progress=lambda *told: seen.append(told))
    assert max(done for done, _ in seen) == {total for _, total in seen}.pop()


# -------------------------------------------------------------------------------------------- H20, damaged files


def second_shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        open_weights(resolve(str(folder)))
    return str(caught.value)


def test_a_shard_cut_by_one_byte_or_in_half_is_refused_with_both_sizes(sharded: Path) -> None:
    path = second_shard(sharded)
    data = path.read_bytes()
    for length in (len(data) - 1, len(data) // 2):
        path.write_bytes(data[:length])
        said = refusal(sharded)
        assert path.name in said
        assert f"expected {len(data)} bytes, found {length}" in said
        assert "did not finish" in said


def test_a_shard_cut_inside_its_header_is_refused_with_both_sizes(sharded: Path) -> None:
    path = second_shard(sharded)
    path.write_bytes(path.read_bytes()[:100])
    said = refusal(sharded)
    assert path.name in said
    assert "it has 100" in said


@pytest.mark.parametrize("length", [0, 5])
def test_an_empty_shard_is_refused(sharded: Path, length: int) -> None:
    path = second_shard(sharded)
    path.write_bytes(path.read_bytes()[:length])
    said = refusal(sharded)
    assert path.name in said
    assert f"{length} bytes, expected at least 8" in said


def test_a_random_header_length_is_refused(sharded: Path) -> None:
    path = second_shard(sharded)
    data = path.read_bytes()
    for claimed in (0x1234567890ABCDEF, len(data) * 3, 3):
        path.write_bytes(claimed.to_bytes(8, "little") + data[8:])
        said = refusal(sharded)
        assert path.name in said
        assert str(len(data)) in said


def test_bytes_after_the_last_tensor_are_refused(sharded: Path) -> None:
    path = second_shard(sharded)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"abc")
    said = refusal(sharded)
    assert path.name in said
    assert f"expected {size} bytes, found {size + 3}" in said
    assert "appended" in said


def test_a_large_file_pointer_is_told_as_what_it_is(sharded: Path) -> None:
    path = second_shard(sharded)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4969988\n")
    said = refusal(sharded)
    assert path.name in said
    assert "expected 4969988 bytes" in said
    assert "git lfs pull" in said


def test_a_missing_shard_is_refused_with_what_it_should_hold(sharded: Path) -> None:
    path = second_shard(sharded)
    path.unlink()
    said = refusal(sharded)
    assert path.name in said
    assert "missing" in said
    assert "tensors" in said


def test_an_index_that_names_a_key_no_shard_has_is_refused(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    described = json.loads(index.read_text())
    described["weight_map"]["model.layers.7.mlp.up_proj.weight"] = second_shard(sharded).name
    index.write_text(json.dumps(described))
    said = refusal(sharded)
    assert "model.layers.7.mlp.up_proj.weight" in said
    assert second_shard(sharded).name in said


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": "../../etc/passwd"}}', '{"weight_map": {}}'])
def test_a_broken_index_is_refused(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    assert "is not an index of shards" in refusal(sharded)


def test_a_header_whose_offsets_do_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for entry in (
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        "text",
    ):
        header = json.dumps({"a": entry}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        with pytest.raises(DamagedFile, match="damaged"):
            read_shard(path)


def test_shards_may_be_links_as_in_a_hub_snapshot(sharded: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for number, path in enumerate(sorted(sharded.iterdir())):
        shutil.copyfile(path, blobs / f"{number:x}")
        (snapshot / path.name).symlink_to(blobs / f"{number:x}")
    loaded(snapshot)


def test_pickles_are_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    assert "pytorch_model.bin, a pickle" in refusal(tmp_path)


def test_a_folder_without_weights_and_a_path_that_is_not_there_are_refused(tmp_path: Path) -> None:
    assert "holds no weights" in refusal(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        resolve(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="no package"):
        resolve("python:no_such_package_of_weights")


def test_offline_a_hub_id_that_is_not_cached_is_refused_as_such(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        from megatrain.errors import ConfigError
        from megatrain.weights.source import resolve
        try:
            resolve("some-owner/some-model")
        except ConfigError as error:
            print(error)
        """
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "some-owner/some-model" in result.stdout
    assert "HF_HUB_OFFLINE" in result.stdout


# ------------------------------------------------------------------------------------- H08, memory while loading


@pytest.mark.parametrize("num_shards", [1, 4])
def test_loading_needs_no_private_memory_beyond_its_buffers(tmp_path: Path, num_shards: int) -> None:
    """256 MiB of bf16 weights into a store that is there already: what is added stays below one tensor's size."""
    tensors = {f"t{i}": torch.full((64 << 20 >> 1,), float(i), dtype=torch.bfloat16) for i in range(4)}
    folder = tmp_path / "model"
    folder.mkdir()
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        for i in range(4):
            save_file({f"t{i}": tensors[f"t{i}"]}, folder / f"model-{i}.safetensors")
        weight_map = {f"t{i}": f"model-{i}.safetensors" for i in range(4)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    added = private_memory.output_of(
        f"""
        import threading
        from types import SimpleNamespace as Space
        import torch
        torch.set_num_threads(1)
        from megatrain.weights.loader import load
        from megatrain.weights.source import open_weights, resolve

        refs = {{f"t{{i}}": Space(unit=0, tensor=i, name=f"t{{i}}", shape=(64 << 20 >> 1,), dtype=torch.bfloat16,
                role="trainable", pieces=()) for i in range(4)}}
        store = [torch.full((64 << 20 >> 1,), 9, dtype=torch.bfloat16) for _ in range(4)]
        lock, peak = threading.Lock(), [0]

        class Core:
            def write(self, unit, tensor, plane, source, start=0):
                store[tensor][start:start + len(source)] = source
                with lock:
                    peak[0] = max(peak[0], private())

        before = private()
        decoder = Space(tensors=refs, aliases={{}}, model=None, set_layout=lambda layout: None)
        load(open_weights(resolve({str(folder)!r})), decoder, Core(), threads=2)
        assert all((store[i] == i).all() for i in range(4))
        print(peak[0] - before)
        """
    )
    assert int(added) < 64 << 20


# ------------------------------------------------------------------------------------------------ random weights


def drawn(seed: int, precision: str = "bf16", **changes: object) -> SimpleNamespace:
    target = engine(precision, **changes)
    initialize(target.decoder, target.core, seed)
    return target


def test_random_weights_depend_on_the_seed_and_on_nothing_else() -> None:
    torch.manual_seed(1)
    first = drawn(0)
    torch.manual_seed(2)
    assert first.core.equals(drawn(0).core)
    assert not first.core.equals(drawn(1).core)
    deeper, ref = drawn(0, num_hidden_layers=5), first.decoder.tensors["model.layers.2.mlp.up_proj.weight"]
    assert torch.equal(first.core.master(ref), deeper.core.master(deeper.decoder.tensors[ref.name]))


def test_random_weights_have_the_distribution_of_the_models_own_rule() -> None:
    target = drawn(0, "fp32", initializer_range=0.05)
    state = torch.random.get_rng_state()
    initialize(target.decoder, target.core, 0)
    assert torch.equal(state, torch.random.get_rng_state())
    for name, ref in target.decoder.tensors.items():
        values = target.core.master(ref)
        if "norm" in name:
            assert torch.equal(values, torch.ones_like(values))
        else:
            assert values.std() == pytest.approx(0.05, rel=0.1)
            assert abs(float(values.mean())) < 0.01
    layers = [target.core.master(target.decoder.tensors[f"model.layers.{i}.mlp.up_proj.weight"]) for i in range(3)]
    assert not torch.equal(layers[0], layers[1])


def test_a_rule_in_which_a_parent_draws_its_childrens_weights_is_kept() -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 8, "n_head": 4, "n_positions": 32, "vocab_size": 128}
    decoder = Decoder.from_config(config, precision="fp32")
    core = MemoryCore(decoder)
    initialize(decoder, core, 0)
    plain = core.master(decoder.tensors["transformer.h.3.mlp.c_fc.weight"])
    scaled = core.master(decoder.tensors["transformer.h.3.mlp.c_proj.weight"])
    assert plain.std() == pytest.approx(0.02, rel=0.05)
    assert scaled.std() == pytest.approx(0.02 / 4, rel=0.05)
    assert not core.master(decoder.tensors["transformer.h.0.ln_1.bias"]).any()
    undropped = Decoder.from_config(
        config | dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0), precision="fp32"
    )
    halves = undropped.halves
    assert len(halves.units) > len(decoder.units)
    cut = MemoryCore(halves)
    initialize(halves, cut, 0)
    for name, ref in decoder.tensors.items():
        assert torch.equal(core.master(ref), cut.master(halves.tensors[name])), f"{name} depends on how layers are cut"


def test_large_tensors_are_drawn_in_pieces() -> None:
    def filled(most: int, fill: Callable[[torch.Tensor], object]) -> torch.Tensor:
        values = torch.full((6, 7), torch.nan)
        torch.manual_seed(4)
        with DrawnBy("cpu", most):
            fill(values)
        return values

    def normal(values: torch.Tensor) -> object:
        return torch.nn.init.normal_(values, std=0.5)

    def pieces(draw: Callable[[torch.Tensor], torch.Tensor], *sizes: int) -> torch.Tensor:
        torch.manual_seed(4)
        return torch.cat([draw(torch.empty(size)) for size in sizes])

    def drawn_normal(values: torch.Tensor) -> torch.Tensor:
        return values.normal_(std=0.5)

    assert torch.equal(filled(42, normal).view(-1), pieces(drawn_normal, 42))  # as without
    assert torch.equal(filled(20, normal).view(-1), pieces(drawn_normal, 20, 20, 2))
    across = filled(20, lambda values: torch.nn.init.uniform_(values.t(), -1, 1))
    assert torch.equal(across.t().reshape(-1), pieces(lambda values: values.uniform_(-1, 1), 20, 20, 2))
    assert not filled(5, lambda values: torch.nn.init.trunc_normal_(values, std=0.1)).isnan().any()


@pytest.mark.parametrize("old", ["whole", "without its shards", "damaged"])
def test_of_two_sets_of_weights_the_one_that_stock_loads_is_read_and_both_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, old: str
) -> None:
    """`model.safetensors` beside an older index and its shards."""
    torch.manual_seed(8)
    settings = {k: v for k, v in llama().items() if k != "model_type"}
    AutoModelForCausalLM.from_config(LlamaConfig(**settings)).save_pretrained(tmp_path, max_shard_size="20KB")
    index, shards = tmp_path / "model.safetensors.index.json", list(tmp_path.glob("model-*.safetensors"))
    reference().save_pretrained(tmp_path / "new")
    shutil.copy(tmp_path / "new" / "model.safetensors", tmp_path / "model.safetensors")
    if old == "damaged":
        index.write_text("{")
    for shard in shards if old == "without its shards" else []:
        shard.unlink()
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    with caplog.at_level("WARNING"):
        target = loaded(tmp_path, "fp32")
    for name, ref in target.decoder.tensors.items():
        assert torch.equal(target.core.master(ref), wanted[name]), name
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1, told
    assert "model.safetensors is read" in told[0]
    assert index.name in told[0]


def test_an_index_of_a_single_file_is_no_second_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference().save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with caplog.at_level("WARNING"):
        loaded(tmp_path, "fp32")
    assert not caplog.records
