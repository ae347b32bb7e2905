"""Writes two pages of the site from the program itself: every setting from the schema, every command from its help."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, "settings.md", content=settings()))
    files.append(File.generated(config, "commands.md", content=commands()))
    results = ROOT / "benches" / "results"  # traces that the pages of results link to
    for trace in sorted(results.rglob("*.json.gz")):
        path = trace.relative_to(results).as_posix()
        files.append(File(path, str(results), config["site_dir"], config["use_directory_urls"]))
    return files


def megatrain(*arguments: str) -> str:
    """Standard output of a command of the installed package (`make docs` installs this tree's), 100 columns wide."""
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "megatrain", *arguments]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def settings() -> str:
    schema = json.loads(megatrain("schema"))
    lines = [
        "# Settings",
        "",
        "Every key of a configuration file, with its default. `megatrain train CONFIG.yaml --dry-run` prints the",
        "effective ones, and a run stores them in its `config.yaml`. A key can be set on the command line as",
        "`section.key=value`. Sizes are written as `20GiB`, durations as `30min`.",
    ]
    for name, section in schema["properties"].items():
        fields = _object(section)
        if fields is None:
            lines += ["", f"## `{name}`", "", section.get("description", ""), "", *_table({name: section}, "")]
        else:
            lines += ["", f"## `{name}`", "", section.get("description", ""), "", *_table(fields, f"{name}.")]
    return "\n".join(lines) + "\n"


def _object(schema: dict[str, Any]) -> dict[str, Any] | None:
    """The fields of a section that has fixed ones, whatever short forms it has beside them."""
    for form in [schema, *schema.get("anyOf", [])]:
        if form.get("properties"):
            return form["properties"]
        items = form.get("items", {})
        if isinstance(items, dict) and items.get("properties"):
            return items["properties"]
    return None


def _table(fields: dict[str, Any], prefix: str) -> list[str]:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    inner: list[str] = []
    for name, field in fields.items():
        default = f"`{_text(field['default'])}`" if "default" in field else "required"
        if field.get("default", 0) is None:
            default = "–"
        choices = next((form["enum"] for form in [field, *field.get("anyOf", [])] if "enum" in form), [])
        meaning = field.get("description", "").replace("|", r"\|").replace("\n", " ")
        if choices:
            meaning += " One of " + ", ".join(f"`{choice}`" for choice in choices) + "."
        rows.append(f"| `{name}` | {default} | {meaning} |")
        nested = _object(field)
        if nested:
            inner += ["", f"### `{prefix}{name}`", "", *_table(nested, f"{prefix}{name}.")]
    return rows + inner


def _text(default: Any) -> str:
    return default if isinstance(default, str) and default else json.dumps(default)


def commands() -> str:
    from megatrain.cli import parser

    built = parser.build()
    (verbs,) = [action for action in built._actions if isinstance(action, argparse._SubParsersAction)]
    lines = ["# Commands", "", "```text", megatrain("--help").rstrip(), "```"]
    for verb in verbs.choices:
        lines += ["", f"## megatrain {verb}", "", "```text", megatrain(verb, "--help").rstrip(), "```"]
    return "\n".join(lines) + "\n"
