"""Scopes that tag operations for the NPU's compiler. There is none here: a block runs as it would without.

Source: Ascend TF Adapter 2.x, ``npu_device.utils.scope`` and ``npu.keep_dtype_scope``, ``npu.npu_recompute_scope``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def keep_dtype_scope() -> Iterator[None]:
    """Keep the dtype of the block's operations under mixed precision on an NPU. Without effect here.

    >>> with keep_dtype_scope():
    ...     1 + 1
    2
    """
    yield


@contextlib.contextmanager
def npu_recompute_scope() -> Iterator[None]:
    """Recompute the block's activations in backward instead of keeping them, on an NPU.

    Without effect here; ``tf.recompute_grad`` does this in TensorFlow.
    """
    yield


@contextlib.contextmanager
def npu_optimizer_scope() -> Iterator[None]:
    """Mark the block as the optimizer's part of the graph on an NPU. Without effect here."""
    yield


@contextlib.contextmanager
def npu_gradients_scope() -> Iterator[None]:
    """Mark the block as the backward part of the graph on an NPU. Without effect here."""
    yield


@contextlib.contextmanager
def without_npu_compile_scope() -> Iterator[None]:
    """Run the block's operations on the host on an NPU. Without effect here."""
    yield


@contextlib.contextmanager
def npu_variable_scope(placement: object = None) -> Iterator[None]:
    """Choose the engine for the block's variables (``NpuExecutePlacement``) on an NPU. Without effect here."""
    yield


@contextlib.contextmanager
def npu_stage_scope(stage: int) -> Iterator[None]:
    """Set the pipeline stage that the block belongs to on an NPU. Without effect here."""
    yield


@contextlib.contextmanager
def npu_mem_type_scope() -> Iterator[None]:
    """Put the block's variables into another kind of memory on an NPU. Without effect here."""
    yield


@contextlib.contextmanager
def npu_weight_prefetch_scope(buffer_pool_id: int = 0, buffer_pool_size: int = 536870912) -> Iterator[None]:
    """Prefetch the block's weights into a pool of so many bytes on an NPU. Without effect here."""
    yield


@contextlib.contextmanager
def op_specified_engine_scope(engine_name: str, kernel_lib_name: str) -> Iterator[None]:
    """Choose the engine and the kernel library for the block on an NPU. Without effect here."""
    yield


@contextlib.contextmanager
def npu_qos_label_scope(label: object) -> Iterator[None]:
    """Set the quality of service for the block on an NPU. Without effect here."""
    yield


@contextlib.contextmanager
def subgraph_multi_dims_scope(index: int) -> Iterator[None]:
    """Make the block a subgraph with shapes of its own on an NPU. Without effect here."""
    yield


@contextlib.contextmanager
def npu_graph_slice_scope(slice_num: int | None = None) -> Iterator[None]:
    """Cut the block into slices to save memory on an NPU. Without effect here."""
    yield


@contextlib.contextmanager
def disable_autofuse() -> Iterator[None]:
    """Keep the block's operations from being fused on an NPU. Without effect here."""
    yield


@contextlib.contextmanager
def limit_core_num_scope(*arguments: object, **keywords: object) -> Iterator[None]:
    """Limit how many cores the block uses on an NPU. Without effect here."""
    yield
