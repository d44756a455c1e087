"""``Profiler``, Ascend's ``with`` block around code to profile: TensorFlow's own profiler."""

from __future__ import annotations

import tensorflow as tf


class Profiler:
    """Profiles a block with TensorFlow's profiler; TensorBoard shows the result.

    Args:
        level, aic_metrics: without effect; they concern the NPU's counters.
        output_path: directory for the profile.

    Raises:
        RuntimeError: on entry, when another profile is being taken.

    Source: Ascend TF Adapter 1.x, ``profiler.Profiler``.
    """

    def __init__(self, level: str = "L1", aic_metrics: str = "PipeUtilization", output_path: str = "./") -> None:
        self._output_path = output_path

    def __enter__(self) -> Profiler:
        try:
            tf.profiler.experimental.start(self._output_path)
        except tf.errors.AlreadyExistsError:
            raise RuntimeError(
                "Profiler: another profile is being taken in this process, by another Profiler or by tf.profiler.\n"
                "What to do: leave that block, or call tf.profiler.experimental.stop(), first."
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        tf.profiler.experimental.stop()
