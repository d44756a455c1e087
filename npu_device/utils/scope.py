"""Scopes that tag operations for the NPU's compiler. There is none here: a block runs as it would without.

Source: Ascend TF Adapter 2.x, ``npu_device.utils.scope`` and ``npu.keep_dtype_scope``, ``npu.npu_recompute_scope``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def keep_dtype_scope() -> Iterator[None]:
    """On an NPU: operations in the block keep their dtype under mixed precision. Without effect here.

    >>> with keep_dtype_scope():
    ...     1 + 1
    2
    """
    yield


@contextlib.contextmanager
def npu_recompute_scope() -> Iterator[None]:
    """On an NPU: activations of the block are computed again in backward instead of kept.

    Without effect here; ``tf.recompute_grad`` does this in TensorFlow.
    """
    yield


@contextlib.contextmanager
def npu_optimizer_scope() -> Iterator[None]:
    """On an NPU: marks the block as the optimizer's part of the graph. Without effect here."""
    yield


@contextlib.contextmanager
def npu_gradients_scope() -> Iterator[None]:
    """On an NPU: marks the block as the backward part of the graph. Without effect here."""
    yield


@contextlib.contextmanager
def without_npu_compile_scope() -> Iterator[None]:
    """On an NPU: operations in the block run on the host. Without effect here."""
    yield


@contextlib.contextmanager
def npu_variable_scope(placement: object = None) -> Iterator[None]:
    """On an NPU: the engine for the variables of the block (``NpuExecutePlacement``). Without effect here."""
    yield


@contextlib.contextmanager
def npu_stage_scope(stage: int) -> Iterator[None]:
    """On an NPU: the stage of a pipeline that the block belongs to. Without effect here."""
    yield


@contextlib.contextmanager
def npu_mem_type_scope() -> Iterator[None]:
    """On an NPU: variables of the block go to another kind of memory. Without effect here."""
    yield


@contextlib.contextmanager
def npu_weight_prefetch_scope(buffer_pool_id: int = 0, buffer_pool_size: int = 536870912) -> Iterator[None]:
    """On an NPU: weights of the block are fetched ahead, into a pool of so many bytes. Without effect here."""
    yield


@contextlib.contextmanager
def op_specified_engine_scope(engine_name: str, kernel_lib_name: str) -> Iterator[None]:
    """On an NPU: the engine and the kernel library for the block. Without effect here."""
    yield


@contextlib.contextmanager
def npu_qos_label_scope(label: object) -> Iterator[None]:
    """On an NPU: the quality of service for the block. Without effect here."""
    yield


@contextlib.contextmanager
def subgraph_multi_dims_scope(index: int) -> Iterator[None]:
    """On an NPU: the block is a subgraph with shapes of its own. Without effect here."""
    yield


@contextlib.contextmanager
def npu_graph_slice_scope(slice_num: int | None = None) -> Iterator[None]:
    """On an NPU: the block is cut into slices to save memory. Without effect here."""
    yield


@contextlib.contextmanager
def disable_autofuse() -> Iterator[None]:
    """On an NPU: operations of the block aren't fused. Without effect here."""
    yield


@contextlib.contextmanager
def limit_core_num_scope(*arguments: object, **keywords: object) -> Iterator[None]:
    """On an NPU: how many cores the block may use. Without effect here."""
    yield
