"""XLA in the training of several ranks. It can't compile a step that waits for other ranks: ``replicate`` has it
compile the call of the model alone, forward and backward, and the reduction stays outside.
"""

from __future__ import annotations

import logging
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.fit.replaced import Replaced
from npu_device._src.training.opening import device

_log = logging.getLogger("npu_device")
LAYERS_OF_SCRIPTS = (
    "Lambda",
    "TFOpLambda",
    "SlicingOpLambda",
    "ClassMethod",
    "InstanceMethod",
    "InstanceProperty",
)


# ``bool`` can't be subclassed, and Keras only asks whether ``jit_compile`` is true.
class _CallOnly(int):
    """False for Keras, in a model whose calls the steps compile themselves."""


def turn_off(model: Any, addition: str = "") -> None:
    """Set ``jit_compile`` of a Keras model to False before its step is traced, with a warning that may have an
    ``addition``; not on a single device.
    """
    job = device.unless_child()
    if job is None or not getattr(model, "jit_compile", False):
        return
    model.jit_compile = False
    if job.cluster.rank == 0:
        _log.warning(
            "jit_compile is off for %s %r: XLA can't compile a step that waits for other ranks%s. Keras 3 turns it on "
            "by itself on a GPU; jit_compile=False in model.compile leaves this message out.",
            type(model).__name__,
            model.name,
            addition,
        )


def compile_call_only(model: Any) -> None:
    """Let XLA compile the call of a replicated model instead of its step; if that can't be done, see ``turn_off``."""
    if getattr(model, "jit_compile", False):
        reason = _why_not(model)
        if reason:
            turn_off(model, f", nor the call of this model alone, because {reason}")
        else:
            model.jit_compile = _CallOnly(0)


def compiles_call(model: Any) -> bool:
    """Return True if the steps of a model compile its call."""
    return isinstance(getattr(model, "jit_compile", False), _CallOnly) and not model.run_eagerly


def compile_call(model: Any, replaced: Replaced) -> None:
    """Have XLA compile the call of a model while a step is traced, and so the backward pass."""

    def compiled(call: Callable, *args: Any, **kwargs: Any) -> Any:
        return tf.function(call, autograph=False, jit_compile=True)(*args, **kwargs)

    replaced.replace(model, "call", compiled)


def _why_not(model: Any) -> str:
    # A compiled call can't wait for other ranks. Only its outputs leave it, not losses or masks.
    for layer in compat.all_layers(model):
        layer_class = type(layer)
        name = layer_class.__name__
        if not compat.belongs_to_keras(layer_class) or name in LAYERS_OF_SCRIPTS:
            return f"{name} {layer.name!r} can hold any code of the script"
        if getattr(layer, "synchronized", False):
            return f"{layer.name!r} normalises over all ranks"
        is_regularized = getattr(layer, "activity_regularizer", None) is not None
        if is_regularized or name == "ActivityRegularization":
            return f"{layer.name!r} adds a loss"
        if getattr(layer, "mask_zero", False) or name == "Masking":
            return f"{layer.name!r} makes a mask, which the loss reads"
        if getattr(layer, "noise_shape", None) is not None:
            return f"{layer.name!r} may draw numbers that all ranks share"
    for layer, generator in compat.layers_that_draw(model):
        # XLA ignores the seeds of these operations, by which the ranks differ.
        if compat.hides_its_state(generator) and compat.draws_numbers(layer):
            return (
                f"{layer.name!r} would draw the same numbers on all ranks, unless "
                "tf.keras.backend.experimental.enable_tf_random_generator() is called before the model is made"
            )
    return ""
