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
