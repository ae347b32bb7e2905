"""Every command that the documents show: it exists, it parses, and those of README and docs are run."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from megatrain.cli import main, parser
from megatrain.config import Config
from megatrain.config.schema import DEFAULT_BATCH_TOKENS
from support.runs import MODEL, write_rows

VERBS = ("train", "plan", "probe", "doctor", "data", "bench", "eval", "generate", "export", "report", "init", "schema")
ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.yaml"))]


def commands(document: Path) -> list[str]:
    """Lines of a shell block, or of a comment that is indented like one."""
    text = document.read_text(encoding="utf-8")
    if document.suffix == ".yaml":
        return [line[3:].strip() for line in text.splitlines() if line.startswith("#   ")]
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    inline = re.findall(r"`((?:megatrain|make) [^`]+)`", text)
    return [line.split(" #")[0].strip() for line in [*lines, *inline] if line.strip()]


SHOWN = [(document.name, command) for document in DOCUMENTS for command in commands(document)]


PLACEHOLDERS = {
    "RUN": "runs/quickstart",
    "CONFIG.yaml": "examples/quickstart.yaml",
    "PROMPT": "the quick",
    "FILE": "examples/here.yaml",
    "/mnt/nvme/spill": ".",
}
"""Words of the pages, and what stands for them here."""


def words(command: str) -> list[str]:
    return [PLACEHOLDERS.get(word, word) for word in shlex.split(command.split(" #", maxsplit=1)[0])]


def test_the_readme_shows_the_two_commands_that_set_everything_up() -> None:
    shown = commands(ROOT / "README.md")
    assert "make quickstart" in shown
    assert "make test" in shown


@pytest.mark.parametrize(("document", "command"), SHOWN)
def test_every_command_shown_exists(document: str, command: str) -> None:
    given = words(command)
    if given[0] == "make":
        done = subprocess.run(["make", "-n", *given[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    elif given[0] == "megatrain":
        if "…" in command or len(given) == 2:
            assert given[1] in VERBS, command  # the pattern of a command, or a word about a verb
            return
        arguments, rest = parser.build().parse_known_args(given[1:])
        assert not [word for word in rest if "=" not in word], (document, rest)
        if arguments.verb in ("train", "plan", "data") and (ROOT / given[2]).suffix == ".yaml":
            assert Config.load(ROOT / given[2], getattr(arguments, "settings", []))
    else:
        assert given[0] in ("pip", "git", "cd", "python3", "."), f"{document}: {command}"


_ONE_STEP = ["--batch", "1", "--seq", "64", "--steps", "1", "--warmup", "0"]
SHORTER = {"megatrain bench --model tiny": _ONE_STEP, "megatrain bench --model RUN --trace FILE": _ONE_STEP}
"""What is added to a command whose numbers are for people, who wait for minutes."""
RUN = [
    command
    for command in dict.fromkeys(command for name, command in SHOWN if name.endswith(".md"))
    if command.startswith("megatrain ") and "…" not in command and command != "megatrain plan"
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `examples` as in ours, its quickstart with a smaller model, two steps and another text, trained."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "examples", folder / "examples")
    document = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text(encoding="utf-8"))
    document["model"] |= {
        "config": MODEL | {"max_position_embeddings": 128},
        "tokenizer": {"train": "bpe", "vocab_size": 300},
    }
    document["data"] |= {"train": str(write_rows(folder / "rows.jsonl")), "seq_len": 32, "cache": str(folder / "cache")}
    document["train"] |= {"steps": 2, "batch_tokens": 128}
    (folder / "examples" / "quickstart.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    assert main(["train", str(folder / "examples" / "quickstart.yaml")]) == 0
    return folder


@pytest.mark.parametrize("command", RUN)
def test_every_command_of_the_pages_is_run(
    command: str, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("XDG_CACHE_HOME", str(checkout / "user-cache"))  # where probe keeps a machine
    assert main(words(command)[1:] + SHORTER.get(command, [])) == 0
    assert capsys.readouterr().out


def test_the_example_itself_is_planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["plan", "examples/quickstart.yaml"]) == 0
    assert "exp_avg_sq" in capsys.readouterr().out


def test_the_loss_function_that_the_readme_shows_gives_the_built_in_loss() -> None:
    from support.reference import batches, build, engine, error

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (shown,) = [block for block in blocks if "def loss_fn" in block]
    model, data = build(), batches(2, padded=True)
    plain, own = engine(model), engine(model)
    names = {"engine": own, "micro_batches": data}
    exec(shown, names)
    first, second = plain.step(data), names["out"]
    assert second.loss == pytest.approx(first.loss, rel=1e-6)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
    assert all(error(own.weight(name), plain.weight(name)) < 1e-5 for name in plain.decoder.tensors)


def test_the_two_halves_of_a_step_that_the_readme_shows_make_a_step_with_the_plan_that_it_names() -> None:
    from megatrain.errors import ConfigError
    from support.reference import batches, build, engine, error, supervised

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "optimizer_step" in block]
    assert 'needs `plan={"accumulate": True}`' in text
    model, data = build(), batches(4)
    plain = engine(model)
    sizes = {"micro_batch": (2, 32), "micro_batches": 2}
    names = {"parts": [data[:2], data[2:]], "num_tokens": sum(supervised(batch) for batch in data)}
    with pytest.raises(ConfigError, match="'accumulate': True"):
        exec(shown, names | {"engine": engine(model, **sizes)})
    names["engine"] = own = engine(model, plan={"accumulate": True}, **sizes)
    exec(shown, names)
    first, second = plain.step(data), names["out"]
    assert second.loss == pytest.approx(first.loss, rel=1e-6)
    assert second.num_tokens == first.num_tokens
    assert all(error(own.weight(name), plain.weight(name)) < 1e-5 for name in plain.decoder.tensors)


def test_the_code_on_the_page_about_python_runs_as_one_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    from support.reference import build

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda _: build())  # in place of a download
    exec("\n".join(blocks), {})
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "trained"}


def test_the_defaults_in_the_page_about_finetuning_are_those_of_the_settings() -> None:
    text = (ROOT / "docs" / "finetune.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `(\w+)\.(\w+)` \| ([^|]+) \|", text, re.MULTILINE)
    assert len(shown) == 8
    config = Config.from_dict({"model": "owner/name"})
    for section, name, default in shown:
        value = getattr(getattr(config, section), name)
        if name == "batch_tokens":
            value = DEFAULT_BATCH_TOKENS
        assert value == (() if default == "none" else yaml.safe_load(default.replace("1e-5", "1.0e-5"))), name


def test_the_host_memory_in_the_page_about_finetuning_is_14_and_12_bytes_a_parameter() -> None:
    text = (ROOT / "docs" / "finetune.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (\d+)B \| (\d+) GiB \| (\d+) GiB \|", text, re.MULTILINE)
    parameters = {"3": 3.09e9, "7": 7.616e9, "14": 14.77e9, "70": 70.6e9}  # of Qwen2.5's and Llama 3's
    assert [size for size, *_ in shown] == list(parameters)
    for size, *found in shown:
        for gib, bytes_each in zip(found, (14, 12), strict=True):
            assert float(gib) == pytest.approx(bytes_each * parameters[size] / 2**30, rel=0.015), size


def test_every_page_of_the_site_is_in_its_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}" in text, page.name


def test_every_file_that_the_readme_links_to_is_there() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target


def test_ci_runs_the_readmes_own_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    text = script.read_text(encoding="utf-8")
    assert re.search(r"^make (-k )?test\b", text, re.MULTILINE)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
