"""The small names: loop size, saturation mode, scopes, run contexts, ``npu_compat_function``."""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import npu_init
from npu_device import npu_device
from npu_device._src.no_effect import modes
from npu_device._src.options import global_options
from npu_device._src.training.fit import small_names
from npu_device._src.training.fit.small_names import npu_compat_function
from npu_device.configs import npu_run_context, run_context_options
from npu_device.utils import scope


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins as a new process would."""
    modes.forget_loop_size()
    monkeypatch.setattr(small_names, "_warned", False)
    monkeypatch.delenv("NPU_LOOP_SIZE", raising=False)


def test_loop_size_is_one_at_first_and_can_be_set(caplog: pytest.LogCaptureFixture) -> None:
    assert modes.get_npu_loop_size() == 1
    modes.set_npu_loop_size(np.int64(7))
    with pytest.raises(TypeError):
        modes.set_npu_loop_size(1.5)
    modes.set_npu_loop_size(0)
    assert modes.get_npu_loop_size() == 7
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "found 0; it stays 7" in caplog.text


@pytest.mark.parametrize(("text", "size"), [("100", 100), ("", 1), ("many", 1), ("0", 1)])
def test_loop_size_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, text: str, size: int
) -> None:
    monkeypatch.setenv("NPU_LOOP_SIZE", text)
    assert modes.get_npu_loop_size() == size
    modes.set_npu_loop_size(5)
    assert modes.get_npu_loop_size() == 5


def test_stupid_repeat_logs_a_line_so_often(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        npu_device.stupid_repeat("hello", 3)
    assert [record.getMessage() for record in caplog.records] == ["hello"] * 3


def test_early_scheduling_is_recorded() -> None:
    assert modes.get_schedule_aicore_task_early() is False
    for early in (True, False):
        modes.set_schedule_aicore_task_early(early)
        assert modes.get_schedule_aicore_task_early() is early


@pytest.mark.parametrize(
    ("mode", "levels"), [(1, []), (2, []), (0, [logging.WARNING]), (3, [logging.ERROR])]
)
def test_a_saturation_mode_changes_nothing_and_may_be_warned_of(
    mode: int, levels: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    modes.set_device_sat_mode(mode)
    assert [record.levelno for record in caplog.records] == levels
    assert modes.is_inf_nan_enabled() is True


def test_scopes_change_nothing() -> None:
    scopes = [
        scope.keep_dtype_scope,
        scope.npu_recompute_scope,
        scope.npu_optimizer_scope,
        scope.npu_gradients_scope,
        scope.without_npu_compile_scope,
        scope.npu_mem_type_scope,
        scope.npu_weight_prefetch_scope,
        scope.npu_graph_slice_scope,
        scope.disable_autofuse,
        functools.partial(scope.npu_stage_scope, 1),
        functools.partial(scope.op_specified_engine_scope, "AIcoreEngine", "aicore"),
        functools.partial(scope.npu_qos_label_scope, "low"),
        functools.partial(scope.subgraph_multi_dims_scope, 0),
        functools.partial(scope.limit_core_num_scope, 1, vector=2),
    ]

    def inside(x: Any) -> Any:
        for make in scopes:
            with make(), scope.keep_dtype_scope():
                x = x * 2
        return x

    assert int(tf.function(inside)(tf.constant(3))) == int(inside(3)) == 3 * 2 ** len(scopes)
    for make in scopes:
        with pytest.raises(KeyError), make():
            raise KeyError


def test_placements_are_accepted() -> None:
    for placement in npu_init.NpuExecutePlacement:
        with npu_init.npu_scope.npu_variable_scope(placement):
            assert placement.value == placement.name


def test_run_context_options_behave_as_global_options() -> None:
    options = run_context_options()
    assert options is not run_context_options()
    options.experimental.graph_memory_optimize_config.recompute = "manual"
    with pytest.raises(ValueError, match="run_context_options has no option 'nothing'"):
        options.nothing = 1
    assert global_options().experimental.graph_memory_optimize_config.recompute.value is None
    with npu_run_context(), npu_run_context(options):
        pass
    for wrong in (global_options(), {}):
        context: Any = wrong
        with (
            pytest.raises(ValueError, match=r"npu\.configs\.run_context_options\(\)"),
            npu_run_context(context),
        ):
            pass


def test_compat_function_in_both_forms(caplog: pytest.LogCaptureFixture) -> None:
    def in_a_graph(x: Any) -> Any:
        return x + (1 if tf.executing_eagerly() else 2)

    decorate = npu_compat_function(input_signature=[tf.TensorSpec([], tf.int32)], jit_compile=False)
    assert (
        int(npu_compat_function(in_a_graph)(tf.constant(1)))
        == int(decorate(in_a_graph)(tf.constant(1)))
        == 3
    )
    assert not caplog.records
    with pytest.raises(TypeError):
        npu_compat_function(nonsense=True)


@pytest.mark.parametrize("flag", ["jit_compile", "experimental_compile"])
def test_compat_function_drops_xla_and_says_so_once(
    flag: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        # XLA can't compile strings: this fails if the flag got through.
        compiled = npu_compat_function(**{flag: True})(tf.strings.as_string)
        assert compiled(tf.constant(5)).numpy() == b"5"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert flag in caplog.text
