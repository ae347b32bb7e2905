"""Tokenizers: trained ones behave like any other, existing ones are found without a network, mismatches are refused."""

import json
import logging
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatrain.config import Config
from megatrain.data.train_tokenizer import (
    END_TOKEN,
    PAD_TOKEN,
    build_tokenizer,
    load_tokenizer,
    train_bpe,
    with_vocabulary,
)
from megatrain.errors import ConfigError
from megatrain.system import hardware
from megatrain.training.setup import prepare_model
from support.runs import MODEL
from support.tiny_tokenizer import TEXT, tiny_tokenizer

ODD = "héllo  日本 x1234=\n\t\tif a_b:\r\n 'tis"


def config(tmp_path, **model):
    path = tmp_path / "rows.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps({"text": f"{TEXT} {number}"}) + "\n" for number in range(20)))
    settings = {"config": {"model_type": "llama"}, "tokenizer": {"train": "bpe", "vocab_size": 300}, **model}
    return Config.from_dict(
        {"model": settings, "data": {"train": str(path), "eval": 0.2, "cache": str(tmp_path / "cache")}}
    )


def test_any_text_survives_a_trained_tokenizer():
    tokenizer = train_bpe([TEXT], 300)
    assert len(tokenizer) == 300
    assert tokenizer.decode(tokenizer(ODD)["input_ids"]) == ODD
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (END_TOKEN, PAD_TOKEN, None)


def test_training_is_deterministic():
    one, other = (train_bpe(iter([TEXT, ODD]), 320).backend_tokenizer.to_str() for _ in range(2))
    assert one == other


def test_a_trained_tokenizer_is_a_normal_folder(tmp_path):
    tokenizer = train_bpe([TEXT], 300)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert loaded(ODD)["input_ids"] == tokenizer(ODD)["input_ids"]
    assert loaded.decode(loaded(ODD)["input_ids"]) == ODD
    assert loaded.eos_token_id == tokenizer.eos_token_id


def test_a_trained_tokenizer_is_cached_by_content(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="megatrain")
    first = build_tokenizer(config(tmp_path))
    assert "training a tokenizer" in caplog.text
    caplog.clear()
    again = build_tokenizer(config(tmp_path))
    assert "training" not in caplog.text
    assert again(ODD)["input_ids"] == first(ODD)["input_ids"]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "another text " * 50}) + "\n" + '{"text": "b"}\n' * 9)
    build_tokenizer(config(tmp_path))
    assert "training a tokenizer" in caplog.text


def test_a_cached_tokenizer_saves_the_files_of_the_one_that_was_trained(tmp_path):
    for name in ("trained", "cached"):
        build_tokenizer(config(tmp_path)).save_pretrained(tmp_path / name)
    trained, cached = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("trained", "cached")
    )
    assert cached == trained


def test_little_text_gives_fewer_tokens_and_says_so(tmp_path, caplog):
    (tmp_path / "rows.jsonl").write_text('{"text": "a b"}\n' * 40)
    tokenizer = build_tokenizer(
        Config.from_dict(
            {
                "model": {"config": {"model_type": "llama"}, "tokenizer": {"train": "bpe", "vocab_size": 1000}},
                "data": {"train": str(tmp_path / "rows.jsonl"), "cache": str(tmp_path / "cache")},
            }
        )
    )
    assert len(tokenizer) < 1000
    said = f"the data has pairs for {len(tokenizer)} tokens only, so that is the size used"
    assert f"model.tokenizer.vocab_size is 1000, but {said}" in caplog.text


def test_a_local_tokenizer_needs_no_network(tmp_path):
    tiny_tokenizer(bos="<s>", adds_bos=True).save_pretrained(tmp_path / "model")
    loaded = build_tokenizer(config(tmp_path, tokenizer=str(tmp_path / "model")))
    assert loaded("hello")["input_ids"][0] == loaded.bos_token_id


def test_a_template_is_taken_from_text_or_file(tmp_path):
    tiny_tokenizer(template="{{ 'old' }}").save_pretrained(tmp_path / "model")
    (tmp_path / "t.jinja").write_text("{{ 'from file' }}")
    for setting, text in ((None, "old"), ("{{ 'given' }}", "given"), (str(tmp_path / "t.jinja"), "from file")):
        tokenizer = build_tokenizer(config(tmp_path, tokenizer=str(tmp_path / "model"), chat_template=setting))
        assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == text
    (tmp_path / "t.jinja").write_text("no template")
    for name, message in (("t.jinja", "holds no Jinja template"), ("none.jinja", "cannot be read")):
        with pytest.raises(ConfigError, match=rf"model\.chat_template: .*{name} {message}"):
            build_tokenizer(config(tmp_path, tokenizer=str(tmp_path / "model"), chat_template=str(tmp_path / name)))


def test_what_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.tokenizer: .* holds no tokenizer \(tokenizer\.json\)"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model\.path: no tokenizer can be loaded from"):
        load_tokenizer(tmp_path, key="model.path")


@pytest.mark.parametrize("content", ["[]", "5", '{"added_tokens_decoder": 5}', "[" * 100_000])
def test_files_of_a_tokenizer_that_hold_something_else_are_named(tmp_path: Path, content: str) -> None:
    train_bpe(TEXT, 300).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"model\.tokenizer: no tokenizer can be loaded from"):
        load_tokenizer(str(tmp_path), key="model.tokenizer")


def test_a_model_config_gets_the_vocabulary_of_its_tokenizer():
    tokenizer = tiny_tokenizer()
    filled = with_vocabulary({"model_type": "llama"}, tokenizer)
    assert filled["vocab_size"] == len(tokenizer)
    assert filled["eos_token_id"] == tokenizer.eos_token_id
    assert filled["pad_token_id"] == tokenizer.pad_token_id
    assert with_vocabulary({"vocab_size": 512, "eos_token_id": 3}, tokenizer)["eos_token_id"] == 3
    with pytest.raises(ConfigError, match=r"model\.config\.vocab_size is 100, and the tokenizer has \d+ tokens"):
        with_vocabulary({"vocab_size": 100}, tokenizer)


def test_a_tokenizer_of_more_tokens_than_the_embedding_has_rows_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL | {"vocab_size": 280}))
    asked = config(tmp_path, config=None, path=str(tmp_path / "model"), init="random")
    with pytest.raises(
        ConfigError,
        match=r"300 tokens and the model's embedding 280 rows, and growing the vocabulary is not supported.*"
        r"model\.tokenizer.*model\.resize_token_embeddings\(300\) and save_pretrained",
    ):
        prepare_model(asked, hardware.read())
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL | {"vocab_size": 320}))
    assert prepare_model(asked, hardware.read()).decoder.num_embeddings == 320, "never shrunk"


def test_the_tokenizer_of_a_model_of_unknown_type_is_loaded_without_a_remark_on_the_type(tmp_path: Path) -> None:
    train_bpe(["some words, and some more words"] * 9, 300).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    source, ear = logging.getLogger("transformers.configuration_utils"), Ear()
    source.addHandler(ear)
    before = source.level
    source.setLevel(logging.WARNING)  # other tests quieten the whole library
    try:
        AutoTokenizer.from_pretrained(tmp_path)
        assert any("You are using a model of type" in line for line in heard), "nothing is left to be silenced"
        heard.clear()
        load_tokenizer(tmp_path)
        source.warning("something else")
        assert heard == ["something else"]
    finally:
        source.setLevel(before)
        source.removeHandler(ear)
