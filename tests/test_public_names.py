"""No public name goes, no parameter, and no default changes: scripts for Ascend stand on them."""

from __future__ import annotations

import importlib
import types

import pytest
from public_names import Names, added, gone, is_public, kept, modules, names


def test_every_name_and_parameter_is_still_there() -> None:
    assert len(kept()) > 700
    assert not gone(kept(), names())


def test_new_names_are_in_the_file() -> None:
    assert not added(kept(), names()), "run: python tests/tools/public_names.py"


OLD: Names = {"a.f": ["x", "y=1", "*", "name=None"], "a.values": None}


@pytest.mark.parametrize(
    ("new", "is_gone"),
    [
        (OLD, False),
        ({**OLD, "a.g": []}, False),
        ({**OLD, "a.f": ["x", "y=1", "z=2", "*", "name=None", "other=0"]}, False),
        ({**OLD, "a.f": ["x", "y=1", "name=None"]}, False),
        ({**OLD, "a.f": ["x", "y=1", "*"]}, True),
        ({**OLD, "a.f": ["x", "y=2", "*", "name=None"]}, True),
        ({**OLD, "a.f": ["x", "z=2", "y=1", "*", "name=None"]}, True),
        ({**OLD, "a.f": ["x", "*", "y=1", "name=None"]}, True),
        ({**OLD, "a.f": ["x", "y=1", "*", "name=None", "needed"]}, True),
        ({**OLD, "a.f": None}, True),
        ({"a.f": OLD["a.f"]}, True),
    ],
)
def test_what_counts_as_gone(new: Names, is_gone: bool) -> None:
    assert bool(gone(OLD, new)) == is_gone


def test_compat_v1_has_each_module_of_npu_bridge() -> None:
    for name in modules():
        package, _, below = name.partition(".")
        if package == "npu_bridge" and below:
            copy = importlib.import_module(f"npu_device.compat.v1.{below}")
            for key, thing in vars(importlib.import_module(name)).items():
                if is_public(key) and not isinstance(thing, types.ModuleType):
                    is_defined_here = getattr(thing, "__module__", "") == name
                    assert getattr(copy, key) is thing or is_defined_here, f"{name}.{key}"
