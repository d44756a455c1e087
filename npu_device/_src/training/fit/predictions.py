"""The outputs of ``predict`` of all ranks, in the order of the batch, if each output has rows for the samples.

Others, such as a mean over the batch or a table, don't follow from what the ranks have: the whole batch gives them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.fit.step_context import StepContext
from npu_device._src.training.watching import training_state
from npu_device._src.world.share import Share, named_leaves, spec_of_any_length

# One line without quotes, which an Assert of TensorFlow would print escaped.
_VARYING_ROWS = (
    "predict of a replicated model: {name} has no fixed number of rows for each sample, so that the parts of the ranks "
    "may not be what one process returns. What to do: return rows for each sample, padded where there are fewer, and "
    "compute the rest from what predict returns. Rows and samples:"
)


@compat.do_not_convert
def of_all_ranks(context: StepContext, batch: Any, share: Share, outputs: Any) -> Any:
    """Return all ranks' outputs in the order of the batch; None, on every rank, if some haven't rows for the samples.

    Raises InvalidArgumentError, perhaps as the graph runs, for an output whose rows depend on what the samples are.
    """
    leaves = tf.nest.flatten(outputs)
    if not all(map(_is_gatherable, leaves)) or not _have_rows(context, batch, share, leaves):
        return None
    names = {id(leaf): name for name, leaf in named_leaves("output", outputs)}

    def of_all(leaf: tf.Tensor) -> tf.Tensor:
        gathered = context.world.gather(share.counted(leaf))
        rows = tf.shape(gathered)[0]
        # A sample may have several rows, but each the same number of them. All ranks see the same here.
        is_right = rows % tf.maximum(share.total, 1) == 0
        name = names.get(id(leaf), "an output")
        text = _VARYING_ROWS.format(name=name.replace("'", ""))
        tf.debugging.Assert(is_right, [text, rows, share.total])
        return gathered

    return tf.nest.map_structure(of_all, outputs)


def _is_gatherable(leaf: Any) -> bool:
    if not isinstance(leaf, tf.Tensor) or leaf.shape.rank == 0:
        return False
    return leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype.is_bool


def _have_rows(context: StepContext, batch: Any, share: Share, leaves: list) -> bool:
    """Return whether the first axis of each output depends on the number of samples."""
    if not isinstance(share.total, int):
        # What is known without the number of samples doesn't depend on it.
        return all(map(_is_of_any_length, leaves))
    # By chance, a fixed length may equal the length of a share, on some ranks only: a share's shapes tell nothing.
    spec = tf.nest.map_structure(spec_of_any_length, batch)
    key = repr(spec)
    if key not in context.predicts_rows:
        context.predicts_rows[key] = False
        # A step that needs the number of samples can have the whole batch.
        with contextlib.suppress(Exception):
            outputs = training_state.trace_step(context.model, context.own_step, spec)
            context.predicts_rows[key] = all(map(_is_of_any_length, tf.nest.flatten(outputs)))
    return context.predicts_rows[key]


def _is_of_any_length(output: Any) -> bool:
    shape = tf.TensorShape(output.shape)
    return shape.rank is None or shape[0] is None
