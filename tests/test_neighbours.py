"""Ascend's own wheels in the same environment: the import refuses them. And the names of what a script may catch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from npu_device import errors
from npu_device._src.neighbours import _OWN_NAMES, _modules, require_own_folders

ROOT = Path(__file__).parent.parent


def test_the_list_is_what_the_repository_has() -> None:
    for folder, names in _OWN_NAMES.items():
        assert set(_modules(str(ROOT / folder))) == set(names.split()), folder


@pytest.mark.parametrize(
    ("folder", "stranger"), [("npu_device", "_npu_device_backends.so"), ("hccl", "_hccl.py")]
)
def test_a_mixture_is_refused(folder: str, stranger: str, tmp_path: Path) -> None:
    for name in _OWN_NAMES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    # What an editor, Python or an older version without modules has left is no stranger.
    (tmp_path / "npu_device" / "old" / "__pycache__").mkdir(parents=True)
    (tmp_path / "npu_device" / ".DS_Store").touch()
    require_own_folders(str(tmp_path))
    (tmp_path / folder / stranger).touch()
    code = (
        f"import {folder}" if folder == "npu_device" else "from hccl.manage.api import get_rank_id"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert str(Path(folder, stranger)) in done.stderr and "python -m venv" in done.stderr


def test_errors_have_one_base_and_keep_their_own() -> None:
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    assert all(issubclass(each, errors.NpuDeviceError) for each in classes)
    assert issubclass(errors.MismatchError, RuntimeError) and issubclass(
        errors.CheckpointError, OSError
    )
