"""A script's settings for the NPU's compiler before it runs a graph (Ascend's ``util`` and ``npu_plugin``).

There is no such compiler here: the calls check what they can, and change nothing. Iterations per loop have an effect,
and are in ``iterations``.
"""

from __future__ import annotations

from typing import Any

from npu_device._src.training import device


def set_graph_exec_config(fetch: Any, dynamic_input: bool = False, **settings: Any) -> Any:
    """Set a fetch's options for varying shapes. Without effect; returns the fetch.

    Source: Ascend TF Adapter 1.x, ``util.set_graph_exec_config``.
    """
    return fetch


def keep_tensors_dtypes(graph: Any, input_tensors: Any) -> None:
    """Keep the dtypes of tensors under mixed precision. Without effect: tensors keep the script's dtypes.

    Source: Ascend TF Adapter 1.x, ``util.keep_tensors_dtypes``.
    """


def npu_compile(sess: Any, *fetches: Any) -> None:
    """Compile what fetches need ahead of the first run. Without effect: nothing is compiled.

    Source: Ascend TF Adapter 1.x, ``util.npu_compile``.
    """


def check_aoe_mode(aoe_mode: str) -> None:
    """Check a mode of the tuner.

    Raises:
        ValueError: it isn't "1", "2" or "4".

    Source: Ascend TF Adapter 1.x, ``util.check_aoe_mode``.
    """
    if aoe_mode not in ("1", "2", "4"):
        raise ValueError(f"aoe_mode must be '1', '2' or '4'; found {aoe_mode!r}")


def npu_resource_init(graph_run_mode: int = 1, **settings: Any) -> None:
    """Start the device by ``npu.open()``. The settings have no effect.

    Source: Ascend TF Adapter 1.x, ``npu_plugin.npu_resource_init``.
    """
    device.open()


def npu_resource_shutdown() -> None:
    """Stop the device by ``npu.close()``.

    Source: Ascend TF Adapter 1.x, ``npu_plugin.npu_resource_shutdown``.
    """
    device.close()
