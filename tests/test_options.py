"""``npu.global_options()``: names, types, defaults and errors as on Ascend."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_device._src.options import GlobalOptions, Option, OptionGroup
from npu_device._src.options.table import RULES


@pytest.fixture
def options() -> GlobalOptions:
    """Options of its own for each test; the process's stay as they are."""
    return GlobalOptions()


def owner(options: OptionGroup, path: str) -> tuple[Any, str]:
    """The group that an option stands in, and its name there."""
    *groups, name = path.split(".")
    for group in groups:
        options = getattr(options, group)
    return options, name


@pytest.mark.parametrize("rule", RULES, ids=[rule.path for rule in RULES])
def test_an_option_takes_its_default_and_allowed_values_only(
    options: GlobalOptions, rule: Any
) -> None:
    path = rule.path
    group, name = owner(options, path)
    option = getattr(group, name)
    assert isinstance(option, Option)
    assert option.value is None or isinstance(option.value, str)
    setattr(group, name, option.typed)
    assert getattr(group, name).typed == option.typed == rule.default
    for value in rule.allowed:
        setattr(group, name, value)
        assert (option.value, option.typed) == (str(value), value)
    kept = option.typed
    if rule.allowed:
        wrong = 99 if isinstance(rule.allowed[0], int) else "nonsense"
        with pytest.raises(
            ValueError, match=rf"{path}.*{wrong}.*expected one of.*{rule.allowed[0]}"
        ):
            setattr(group, name, wrong)
    if rule.default is not None:  # another type
        for wrong in (None, 1.5, [], 1 if isinstance(rule.default, (bool, str)) else "1"):
            with pytest.raises(TypeError, match=rf"{path}.*{type(rule.default).__name__}.*found"):
                setattr(group, name, wrong)
    assert option.typed == kept


@pytest.mark.parametrize(
    ("path", "given", "text", "typed"),
    [
        ("hcom_parallel", False, "0", False),
        ("input_fusion_size", 33554432, "33554432", 33554432),
        ("dump_config.dump_path", Path("dump"), "dump", Path("dump")),
        ("precision_mode", None, None, None),
        # Scalars of numpy count as Python's.
        ("graph_run_mode", np.int64(0), "0", 0),
        ("hcom_parallel", np.bool_(False), "0", False),
        ("precision_mode", np.str_("force_fp32"), "force_fp32", "force_fp32"),
        # True is 1 where an integer is wanted.
        ("topo_sorting_mode", True, "1", 1),
        ("stream_sync_timeout", True, "1", 1),
        # Texts, and the older bool
        ("jit_compile", True, "true", "true"),
        ("jit_compile", np.bool_(False), "false", "false"),
    ],
)
def test_a_value_as_text_and_typed(
    options: GlobalOptions, path: str, given: Any, text: str, typed: Any
) -> None:
    group, name = owner(options, path)
    setattr(group, name, given)
    option = getattr(group, name)
    assert (option.value, option.typed, type(option.typed)) == (text, typed, type(typed))


def test_an_option_follows_later_assignments_and_can_be_unset(options: GlobalOptions) -> None:
    option = options.precision_mode
    options.precision_mode = "force_fp16"
    assert (option.value, GlobalOptions().precision_mode.value) == ("force_fp16", None)
    twin = copy.deepcopy(options)
    options.precision_mode = None
    assert (options.precision_mode.value, twin.precision_mode.value) == (None, "force_fp16")
    assert "precision_mode" not in options.as_dict()


def test_refused_values_and_unknown_names_with_the_nearest(options: GlobalOptions) -> None:
    names = ", ".join(dict.fromkeys(rule.path.partition(".")[0] for rule in RULES))
    for path, wrong, says in (
        ("aoe_config.aoe_mode", 2, r"2 \(of type int\); expected one of '1', '2', '4'"),
        ("input_fusion_size", -1, "input_fusion_size.*-1.*0 to 33554432"),
        ("input_fusion_size", 33554433, "input_fusion_size.*33554433.*0 to 33554432"),
        (
            "precison_mode",
            True,
            r"(?s)'precison_mode'; did you mean 'precision_mode'.*Valid names: graph_run_mode",
        ),
        (
            "dump_config.enable_dmp",
            True,
            "dump_config has no option 'enable_dmp'; did you mean 'dump_config.enable_d",
        ),
        ("dump_path", True, r"'dump_path'; did you mean 'dump_config\.dump_path'"),
        ("zzz", True, rf"'zzz'\.\nValid names: {names}"),
        ("dump_config", True, r"dump_config.*group.*assign to dump_config\."),
    ):
        group, name = owner(options, path)
        with pytest.raises(ValueError, match=says):
            setattr(group, name, wrong)
    with pytest.raises(AttributeError, match="did you mean 'precision_mode'"):
        _ = options.precison_mode
    assert not hasattr(options, "nothing")
    assert "dump_config" in dir(options)


def test_as_dict_flattens_and_leaves_out_what_is_unset(options: GlobalOptions) -> None:
    options.dump_config.enable_dump = True
    options.experimental.multi_branches_config.dynamic_dims = "1;2"
    flat = options.as_dict()
    assert (flat["enable_dump"], flat["dynamic_dims"]) == ("1", "1;2")
    assert (flat["hcom_parallel"], flat["graph_run_mode"]) == ("1", "1")
    assert all(isinstance(text, str) for text in flat.values())
    assert "aoe_mode" not in flat and "dump_config" not in flat
    names = [rule.path.rpartition(".")[2] for rule in RULES]
    assert len(names) == len(set(names)), "as_dict() would lose one of the two"


def test_options_that_are_deprecated_or_late_are_warned_of(
    options: GlobalOptions, caplog: pytest.LogCaptureFixture
) -> None:
    """Of deprecated options, and once of the first one that is assigned after ``npu.open()``."""
    options.op_debug_level = 1
    options.precision_mode = "force_fp16"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "'op_debug_level' is deprecated" in caplog.text
    caplog.clear()
    options.freeze()
    options.dump_config.enable_dump = True
    options.precision_mode = "force_fp32"
    assert len(caplog.records) == 1
    assert "'dump_config.enable_dump' was assigned after npu.open()" in caplog.text
    assert (options.dump_config.enable_dump.typed, options.precision_mode.value) == (
        True,
        "force_fp32",
    )
