"""What answers are taught to end with ends what the exported model generates, or a warning says that it does not."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.training.setup import prepare_run
from support.runs import MODEL, settings
from support.tiny_tokenizer import tiny_tokenizer

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize("stops", [None, "both", "other"])
def test_a_warning_says_so_where_generation_does_not_stop_at_the_end_of_an_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stops: str | None
) -> None:
    tokenizer = tiny_tokenizer(specials=("<|im_start|>", "<|im_end|>"), template=TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    end, eos = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id
    if stops is not None:
        listed = [eos, end] if stops == "both" else eos
        (tmp_path / "tokenizer" / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    talk = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "how are you?"}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 8)
    config = settings(tmp_path, data={"train": str(tmp_path / "chat.jsonl"), "eval": [], "seq_len": 64})
    config["model"] = {"config": MODEL, "tokenizer": str(tmp_path / "tokenizer")}
    prepare_run(Config.from_dict(config), folder=None).close()
    said = [record.getMessage() for record in caplog.records if "does not stop there" in record.getMessage()]
    if stops == "both":
        assert not said
    else:
        where = "its configuration" if stops is None else str(tmp_path / "tokenizer" / "generation_config.json")
        (warning,) = said
        assert f"taught to end with <|im_end|> ({end})" in warning
        assert f"{where} has eos_token_id {eos};" in warning


def test_a_padding_token_outside_the_vocabulary_is_refused_by_its_key(tmp_path: Path) -> None:
    config = settings(tmp_path)
    config["model"] = config["model"] | {"config": MODEL | {"vocab_size": 300, "pad_token_id": 300}}
    with pytest.raises(ConfigError, match=r"pad_token_id is 300, and the vocabulary has 300 entries \(vocab_size\)"):
        prepare_run(Config.from_dict(config), folder=None)


@pytest.mark.parametrize("value", [-1, 300, [2, 300], "x", [[1]], {"a": 1}, True, 1.0], ids=str)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_that_is_no_token_of_the_model_is_refused_by_its_file(tmp_path: Path, file: str, value: Any) -> None:
    AutoConfig.for_model(**MODEL, vocab_size=300).save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / file
    written = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(written | {"eos_token_id": value}))
    config = settings(tmp_path)
    config["model"] = {"path": str(tmp_path / "model"), "init": "random", "tokenizer": config["model"]["tokenizer"]}
    with pytest.raises(ConfigError, match="eos_token_id") as refused:
        prepare_run(Config.from_dict(config), folder=None)
    if file == "generation_config.json" or value in (-1, 300, [2, 300]):  # of others transformers says so itself
        where = str(path) if file == "generation_config.json" else "the configuration of llama"
        assert str(refused.value).startswith(f"{where}: eos_token_id is {value!r}, and ")
        assert "write a number from 0 to 299, a list of such, or null" in str(refused.value)
    path.write_text(json.dumps(written | {"eos_token_id": [0, 299]}))
    prepare_run(Config.from_dict(config), folder=None).close()
