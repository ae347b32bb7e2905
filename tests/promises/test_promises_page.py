"""The page of promises: every test that it names is there, and it names every test."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def named() -> set[Path]:
    """Files and folders that the page names."""
    words = re.findall(r"`([^`\s]+)`", (ROOT / "docs/promises.md").read_text(encoding="utf-8"))
    paths = [word for word in words if word.endswith((".py", ".rs", "/")) and word not in ("tests/", "crates/")]
    return {ROOT / path if path.startswith("crates/") else ROOT / "tests" / path for path in paths}


def test_every_test_that_is_named_is_there() -> None:
    missing = [path for path in named() if not path.exists()]
    assert named()
    assert missing == []


def test_every_test_is_named() -> None:
    patterns = ("tests/**/test_*.py", "tests/**/check_*.py", "tests/gpu/*.py", "crates/*/tests/**/*.rs")
    tests = [path for pattern in patterns for path in ROOT.glob(pattern) if "support" not in path.parts]
    missing = [path for path in tests if named().isdisjoint({path, *path.parents})]
    assert len(tests) > 100
    assert missing == []
