"""`megatrain init` and `megatrain schema`: quick, without torch, and true to what the loader accepts."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.cli.json_schema import document
from megatrain.config import Config
from megatrain.config.parsing import all_keys

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text('{"text": "a row"}\n')
    model = tmp_path / "small"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 512}))
    (model / "tokenizer.json").write_text("{}")
    return tmp_path


def test_the_configuration_that_is_written_is_what_a_run_accepts(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "data" / "rows.jsonl").write_text(json.dumps({"text": "a row" * 400}) + "\n")
    (here / "data" / "more.jsonl").write_text((json.dumps({"text": "a row" * 400}) + "\n") * 3400)
    assert main(["init", "small", "data/*.jsonl"]) == 0
    said = capsys.readouterr()
    assert "train.yaml" in said.out
    assert not said.err
    config = Config.load(here / "train.yaml")
    assert config.model.path == str(here / "small")
    assert [source.path for source in config.data.train] == [str(here / "data/*.jsonl")]
    assert config.data.seq_len == 512, "the model has no more positions"
    assert config.train.batch_tokens == 65536, "the default, of which these data make enough steps"
    assert config.output.dir == str(here / "runs/small")
    given = Config.from_dict({"model": "small", "data": "data/*.jsonl"})
    assert (config.train, config.eval, config.plan) == (given.train, given.eval, given.plan), "the rest are defaults"


def test_what_is_suggested_in_comments_is_accepted_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "OWNER/NAME", "data/rows.jsonl", "--out", "mine.yaml"]) == 0
    assert "OWNER/NAME is no folder here, so it will be looked for on the hub" in capsys.readouterr().err
    text = (here / "mine.yaml").read_text()
    suggested = re.sub(r"^(\s*)# ((?:  )*(?:#  ?)?)([a-z_]+:)", r"\1\2\3", text, flags=re.MULTILINE)
    (here / "all.yaml").write_text(suggested)
    config = Config.load(here / "all.yaml")
    assert (config.model.path, config.eval.every, config.plan.micro_batch) == ("OWNER/NAME", 1, 1)
    assert len(config.data.eval) == 1
    assert config.memory.gpu == 20 << 30


def chats(count: int, words: int) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "word " * words}]}
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("name", "text", "seq_len", "batch_tokens", "steps"),
    [
        ("chats.jsonl", "".join(json.dumps(row) + "\n" for row in chats(80, 40)), 256, 256, 23),
        ("chats.json", json.dumps(chats(80, 40), indent=2), 256, 256, 29),
        ("chats.jsonl", "".join(json.dumps(row) + "\n" for row in chats(1000, 300)), 1024, 8192, 49),
        ("long.jsonl", json.dumps(chats(1, 9000)[0]) + "\n", 4096, 4096, 3),
        ("outlier.jsonl", "".join(json.dumps(row) + "\n" for row in [*chats(300, 40), *chats(1, 16000)]), 256, 512, 43),
        ("text.txt", "word " * 20_000, 512, 512, 49),
        ("rows.csv", "text,source\n" + f"{'word ' * 200},here\n" * 100, 512, 512, 50),
    ],
)
def test_few_rows_are_given_windows_and_steps_of_their_size(
    here: Path, name: str, text: str, seq_len: int, batch_tokens: int, steps: int
) -> None:
    (here / name).write_text(text)
    assert main(["init", "OWNER/NAME", name]) == 0
    written = (here / "train.yaml").read_text()
    config = Config.load(here / "train.yaml")
    assert (config.data.seq_len, config.train.batch_tokens) == (seq_len, batch_tokens)
    assert f"# With {batch_tokens:,}, an epoch of about" in written
    assert f"(by the size of the data) has {steps} steps; with the default of 65,536, " in written
    assert f"# {seq_len:,} here: " in written


def test_rows_that_are_not_read_leave_the_defaults(here: Path) -> None:
    (here / "broken.json").write_text('{"text": ')
    (here / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a row"}\n'))
    for data in ("broken.json", "rows.jsonl.gz", "python:stdlib"):
        assert main(["init", "OWNER/NAME", data, "--out", f"{data[:6]}.yaml"]) == 0
        config = Config.load(here / f"{data[:6]}.yaml")
        assert (config.data.seq_len, config.train.batch_tokens) == (4096, 65536)


def test_an_export_gives_the_name_of_its_run(here: Path) -> None:
    (here / "runs" / "shop").mkdir(parents=True)
    (here / "small").rename(here / "runs" / "shop" / "export")
    assert main(["init", "runs/shop/export", "data"]) == 0
    assert Config.load(here / "train.yaml").output.dir == str(here / "runs/shop-2"), "not the folder of the run itself"


@pytest.mark.parametrize("name", ["1e5", "null", "a: b", "it's"])
def test_a_path_that_yaml_would_read_as_something_else_is_quoted(here: Path, name: str) -> None:
    (here / f"{name}.jsonl").write_text('{"text": "a row"}\n')
    (here / name).write_text('{"text": "a row"}\n')
    (here / "small").rename(here / f"{name} model")
    assert main(["init", f"{name} model", f"{name}.jsonl"]) == 0
    config = Config.load(here / "train.yaml")
    assert config.model.path == str(here / f"{name} model")
    assert config.data.train[0].path == str(here / f"{name}.jsonl")


def test_a_file_that_exists_is_never_replaced(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "train.yaml").write_text("mine: all mine\n")
    assert main(["init", "small", "data"]) == 2
    assert "--out train.yaml exists already" in capsys.readouterr().err
    assert (here / "train.yaml").read_text() == "mine: all mine\n"


@pytest.mark.parametrize("words", [["init", "small", "data"], ["schema"]])
def test_both_answer_without_torch(here: Path, words: list[str]) -> None:
    program = (
        "import sys; from megatrain.cli import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=here, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def accepts(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    """Whether a value is valid, by the words of JSON Schema that ours uses."""
    if "$ref" in schema:
        return accepts(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root)
    if "anyOf" in schema and not any(accepts(one, value, root) for one in schema["anyOf"]):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value is not schema["const"]:
        return False
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    kinds = {
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "null": value is None,
        "number": number,
        "integer": number and float(value).is_integer(),
    }
    if "type" in schema and not kinds[schema["type"]]:
        return False
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return False
    if number and not schema.get("exclusiveMinimum", -1e300) < value < schema.get("exclusiveMaximum", 1e300):
        return False
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 1 << 30):
            return False
        return all(accepts(schema.get("items", {}), item, root) for item in value)
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        if not set(schema.get("required", ())) <= set(value):
            return False
        return all(
            accepts(known[name], inner, root) if name in known else others is not False and accepts(others, inner, root)
            for name, inner in value.items()
        )
    return True


def valid(text: str) -> bool:
    from megatrain.config import yaml12

    schema = document()
    return accepts(schema, yaml12.load(text, "test"), schema)


def test_the_schema_has_every_key_with_a_description() -> None:
    def keys(schema: dict[str, Any], prefix: str = "") -> set[str]:
        found = set()
        for name, inner in schema.get("properties", {}).items():
            assert inner["description"], prefix + name
            found.add(prefix + name)
            for part in (inner, *inner.get("anyOf", ()), inner.get("items", {})):
                for deeper in (part, *part.get("anyOf", ()), part.get("items", {})):
                    found |= keys(deeper, f"{prefix}{name}.")
        return found

    assert set(all_keys(Config)) <= keys(document())


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_the_schema_accepts_the_examples(path: Path) -> None:
    assert valid(path.read_text()) is ("model:" in path.read_text())


def test_the_schema_accepts_what_a_run_writes_and_what_init_writes(here: Path) -> None:
    assert main(["init", "small", "data"]) == 0
    assert valid((here / "train.yaml").read_text())
    assert valid(Config.load(here / "train.yaml").to_yaml())


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("model: a/b\ndata: rows.jsonl", True),
        ("model: a/b\ndata: [one.jsonl, {path: two.jsonl, weight: 2}]", True),
        ("model: a/b\ndata: {train: x, eval: 0.05}\ntrain:", True),
        ("model: a/b\noutput: {save_every: 30min, export: false}\nmemory: {gpu: 12GiB}", True),
        ("model: a/b\ntrain: {schedule: linear, betas: [0.9, 0.95], lr: 1e-5}", True),
        ("model: a/b\ntrain: {lrr: 1}", False),
        ("model: a/b\ntrain: {lr: fast}", False),
        ("model: a/b\ndata: {train: x, eval: 2.5}", False),
        ("model: a/b\noutput: {save_every: 30 parsecs}", False),
        ("data: rows.jsonl", False),
    ],
)
def test_the_schema_agrees_with_the_loader(tmp_path: Path, text: str, good: bool) -> None:
    assert valid(text) is good
    (tmp_path / "config.yaml").write_text(text)
    try:
        Config.load(tmp_path / "config.yaml")
    except ValueError:
        assert not good
    else:
        assert good


def test_the_schema_is_written_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--out", str(tmp_path / "schema.json")]) == 0
    assert json.loads((tmp_path / "schema.json").read_text()) == document()
    capsys.readouterr()
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == document()
