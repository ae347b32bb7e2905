"""The faulty disk, built once."""

import shutil
from pathlib import Path

import pytest

from support import faulty_disk


@pytest.fixture(scope="session")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that stands between a process and its disk."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc, to build the faulty disk, is not installed")
    return faulty_disk.build(tmp_path_factory.mktemp("disk"))
