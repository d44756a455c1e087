"""The tests that `make check` adds: the package comes from the environment, complete, and not from a repository.

Its name keeps it out of the suite, which runs on the repository.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


def printed(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.parametrize("name", ["npu_device", "npu_bridge", "hccl"])
def test_the_package_is_the_installed_one(name: str) -> None:
    file = importlib.import_module(name).__file__
    assert file is not None
    assert Path(file).is_relative_to(sys.prefix), file


def test_version_and_types_are_shipped() -> None:
    import npu_device

    assert npu_device.__version__ == importlib.metadata.version("npu_device")
    assert (Path(npu_device.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("command", ["npurun", "npu-trace"])
def test_commands_explain_themselves(command: str) -> None:
    assert command in printed(BIN / command, "--help")


def test_pages_are_shipped() -> None:
    listed = printed(BIN / "npurun", "docs")
    assert "messages  " in listed and "two_machines  " in listed
    assert printed(BIN / "npurun", "docs", "messages").startswith("# Messages and what to do\n")
