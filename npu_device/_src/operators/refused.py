"""Ascend's operators that can't be provided here: calling them raises an error that says what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn


def deformable_conv2d(*arguments: Any, **keywords: Any) -> NoReturn:
    """Raise NotImplementedError: TensorFlow has no such operation."""
    del arguments, keywords
    raise NotImplementedError(
        "npu_cube_ops.deformable_conv2d is an operator of the NPU; TensorFlow has none for CPUs and GPUs.\n"
        "What to do: sample the input at the shifted places with tf.gather_nd, four neighbours each, weight them "
        "bilinearly, and give the result to tf.nn.conv2d with the kernel's size as its stride."
    )


def embeddingrankid(*arguments: Any, **keywords: Any) -> NoReturn:
    """Raise NotImplementedError: the operation gives addresses in other NPUs' memory."""
    del arguments, keywords
    raise NotImplementedError(
        "npu_cpu_ops.embeddingrankid gives addresses in the memory of NPUs, which CPUs and GPUs under TensorFlow don't "
        "have.\nWhat to do: the rank that owns a row is index % rank_size (or index // rows_per_rank); exchange the "
        "rows with hccl_ops.all_to_all_v."
    )


def dynamic_augru_grad(*arguments: Any, **keywords: Any) -> NoReturn:
    """Raise NotImplementedError: TensorFlow differentiates ``dynamic_augru`` itself."""
    del arguments, keywords
    raise NotImplementedError(
        "gen_npu_ops.dynamic_augru_grad was removed in 0.2.0: TensorFlow differentiates gen_npu_ops.dynamic_augru.\n"
        "What to do: tape.gradient of its results, or tf.gradients in a session's graph."
    )
