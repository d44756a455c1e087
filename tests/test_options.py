"""``npu.global_options()``: names, types, defaults and errors as on Ascend."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_device._src.options import GlobalOptions, Option, OptionGroup, global_options
from npu_device._src.options.table import GLOBAL_OPTIONS

RULES = GLOBAL_OPTIONS.rules()


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


def test_there_is_one_object() -> None:
    assert global_options() is global_options()


@pytest.mark.parametrize("path", [path for path, _ in RULES])
def test_every_option_reads_its_default_and_takes_it_back(options: GlobalOptions, path: str) -> None:
    group, name = owner(options, path)
    option = getattr(group, name)
    assert isinstance(option, Option)
    assert option.value is None or isinstance(option.value, str)
    default = option.typed
    setattr(group, name, default)
    assert getattr(group, name).typed == default


@pytest.mark.parametrize(("path", "rule"), [(path, rule) for path, rule in RULES if rule.allowed])
def test_every_allowed_value_is_kept_and_others_are_refused(options: GlobalOptions, path: str, rule: Any) -> None:
    group, name = owner(options, path)
    for value in rule.allowed:
        setattr(group, name, value)
        assert (getattr(group, name).value, getattr(group, name).typed) == (str(value), value)
    wrong = 99 if isinstance(rule.allowed[0], int) else "nonsense"
    with pytest.raises(ValueError, match=rf"{path}.*{wrong}.*expected one of.*{rule.allowed[0]}"):
        setattr(group, name, wrong)
    assert getattr(group, name).typed == rule.allowed[-1]


@pytest.mark.parametrize(("path", "rule"), [(path, rule) for path, rule in RULES if rule.default is not None])
def test_another_type_than_the_default_is_a_type_error(options: GlobalOptions, path: str, rule: Any) -> None:
    group, name = owner(options, path)
    for wrong in (None, 1.5, [], 1 if isinstance(rule.default, (bool, str)) else "1"):
        with pytest.raises(TypeError, match=rf"{path}.*{type(rule.default).__name__}.*found"):
            setattr(group, name, wrong)
    assert getattr(group, name).typed == rule.default


@pytest.mark.parametrize(
    ("path", "given", "text", "typed"),
    [
        ("hcom_parallel", False, "0", False),
        ("is_tailing_optimization", True, "1", True),
        ("graph_run_mode", 0, "0", 0),
        ("dump_config.dump_path", Path("dump"), "dump", Path("dump")),
        ("precision_mode", None, None, None),
        # Scalars of numpy count as Python's.
        ("graph_run_mode", np.int64(0), "0", 0),
        ("hcom_parallel", np.bool_(False), "0", False),
        ("precision_mode", np.str_("force_fp32"), "force_fp32", "force_fp32"),
        ("stream_sync_timeout", np.int32(600), "600", 600),
        # True is 1 where an integer is wanted.
        ("deterministic", True, "1", 1),
        ("topo_sorting_mode", True, "1", 1),
        ("stream_sync_timeout", True, "1", 1),
        # Texts, and the older bool
        ("jit_compile", True, "true", "true"),
        ("jit_compile", np.bool_(False), "false", "false"),
        ("jit_compile", "auto", "auto", "auto"),
    ],
)
def test_a_value_as_text_and_typed(options: GlobalOptions, path: str, given: Any, text: str, typed: Any) -> None:
    group, name = owner(options, path)
    setattr(group, name, given)
    option = getattr(group, name)
    assert (option.value, option.typed, type(option.typed)) == (text, typed, type(typed))


def test_an_option_follows_later_assignments(options: GlobalOptions) -> None:
    option = options.precision_mode
    options.precision_mode = "force_fp16"
    assert option.value == "force_fp16"
    assert GlobalOptions().precision_mode.value is None


def test_an_option_without_default_can_be_unset(options: GlobalOptions) -> None:
    options.precision_mode = "force_fp16"
    options.precision_mode = None
    assert options.precision_mode.value is None
    assert "precision_mode" not in options.as_dict()


def test_aoe_mode_wants_texts(options: GlobalOptions) -> None:
    options.aoe_config.aoe_mode = "4"
    with pytest.raises(ValueError, match=r"2 \(of type int\); expected one of '1', '2', '4'"):
        options.aoe_config.aoe_mode = 2


@pytest.mark.parametrize("size", [-1, 33554433])
def test_a_number_outside_its_range_is_refused(options: GlobalOptions, size: int) -> None:
    options.input_fusion_size = 33554432
    with pytest.raises(ValueError, match=rf"input_fusion_size.*{size}.*0 to 33554432"):
        options.input_fusion_size = size


def test_an_unknown_name_lists_the_valid_ones_and_the_nearest(options: GlobalOptions) -> None:
    with pytest.raises(
        ValueError, match=r"(?s)'precison_mode'; did you mean 'precision_mode'.*Valid names: graph_run_mode"
    ) as raised:
        options.precison_mode = "force_fp16"
    for member in GLOBAL_OPTIONS.members:
        assert member.name in str(raised.value)
    with pytest.raises(
        ValueError, match=r"dump_config has no option 'enable_dmp'; did you mean 'dump_config.enable_dump'"
    ):
        options.dump_config.enable_dmp = True
    with pytest.raises(ValueError, match=r"'dump_path'; did you mean 'dump_config\.dump_path'"):
        options.dump_path = "dump"
    with pytest.raises(ValueError, match="dump_config has no option 'precision_mode'; did you mean 'precision_mode'"):
        options.dump_config.precision_mode = "force_fp16"
    with pytest.raises(ValueError, match=r"'zzz'\.\nValid names"):
        options.zzz = 1


def test_reading_an_unknown_name(options: GlobalOptions) -> None:
    with pytest.raises(AttributeError, match="did you mean 'precision_mode'"):
        _ = options.precison_mode
    assert not hasattr(options, "nothing")
    assert "dump_config" in dir(options)


@pytest.mark.parametrize("name", [member.name for member in GLOBAL_OPTIONS.members if not hasattr(member, "default")])
def test_a_group_can_not_be_assigned(options: GlobalOptions, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.*group.*assign to {name}\."):
        setattr(options, name, {"enable_dump": True})


def test_as_dict_flattens_and_leaves_out_what_is_unset(options: GlobalOptions) -> None:
    options.dump_config.enable_dump = True
    options.dump_config.dump_path = "dump"
    options.experimental.multi_branches_config.dynamic_dims = "1;2"
    flat = options.as_dict()
    assert flat["enable_dump"] == "1"
    assert flat["dump_path"] == "dump"
    assert flat["dynamic_dims"] == "1;2"
    assert flat["hcom_parallel"] == "1"
    assert flat["graph_run_mode"] == "1"
    assert all(isinstance(text, str) for text in flat.values())
    assert "aoe_mode" not in flat
    assert "dump_config" not in flat


def test_no_two_options_share_a_name() -> None:
    names = [rule.name for _, rule in RULES]
    assert len(names) == len(set(names)), "as_dict() would lose one of the two"


def test_deprecated_options_log_a_warning(options: GlobalOptions, caplog: pytest.LogCaptureFixture) -> None:
    options.op_debug_level = 1
    options.precision_mode = "force_fp16"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "'op_debug_level' is deprecated" in caplog.text


def test_assigning_after_open_warns_once_and_is_recorded(
    options: GlobalOptions, caplog: pytest.LogCaptureFixture
) -> None:
    options.precision_mode = "force_fp16"
    assert not caplog.records
    options.freeze()
    options.dump_config.enable_dump = True
    options.precision_mode = "force_fp32"
    assert len(caplog.records) == 1
    assert "'dump_config.enable_dump' was assigned after npu.open()" in caplog.text
    assert (options.dump_config.enable_dump.typed, options.precision_mode.value) == (True, "force_fp32")
    with pytest.raises(ValueError, match="expected one of"):
        options.precision_mode = "nonsense"


def test_what_public_scripts_set(options: GlobalOptions) -> None:
    options.auto_tune_mode = "RL,GA"
    options.graph_memory_max_size = str(26 * 1024**3)
    options.variable_memory_max_size = str(4 * 1024**3)
    options.precision_mode = "allow_mix_precision"
    options.modify_mixlist = "ops_info.json"
    options.fusion_switch_file = "fusion_switch.cfg"
    options.profiling_config.enable_profiling = True
    options.profiling_config.profiling_options = '{"output":"./","training_trace":"on"}'
    options.dump_config.dump_step = "0|5|10"
    options.dump_config.dump_mode = "all"
    options.experimental.multi_branches_config.input_shape = "data:-1,3"
    assert options.as_dict()["auto_tune_mode"] == "RL,GA"


def test_options_can_be_copied(options: GlobalOptions) -> None:
    twin = copy.deepcopy(options)
    twin.dump_config.dump_path = "dump"
    assert options.dump_config.dump_path.value is None
