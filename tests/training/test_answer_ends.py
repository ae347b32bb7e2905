"""What answers are taught to end with ends what the exported model generates, or a warning says that it does not."""

import json
from pathlib import Path

import pytest

from megatrain.config import Config
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
    from megatrain.errors import ConfigError

    config = settings(tmp_path)
    config["model"] = config["model"] | {"config": MODEL | {"vocab_size": 300, "pad_token_id": 300}}
    with pytest.raises(ConfigError, match=r"pad_token_id is 300, and the vocabulary has 300 entries \(vocab_size\)"):
        prepare_run(Config.from_dict(config), folder=None)
