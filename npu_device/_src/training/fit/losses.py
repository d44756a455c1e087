"""Losses in a step of a replicated model: each rank's loss, times its fraction of the samples, adds up to the loss of
the whole batch.

A mean over samples needs no change. Sums, values per sample, means over the valid steps of masked sequences, and means
by sample weights have other denominators.
"""

from __future__ import annotations

import functools
import inspect
from functools import partial
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.training.fit.model_objects import ModelObjects
from npu_device._src.training.fit.replaced import Replaced
from npu_device._src.world.current_step import CurrentStep

LOSS = "loss"
ADDED_LOSS = "added loss"
"""How the names of their numbers begin; see ``CurrentStep.register_number``."""


class Losses:
    """Stands in for the losses' ``call``, the layers' ``add_loss``, and in Keras 3 the model's ``compute_loss``."""

    def __init__(
        self, model: Any, objects: ModelObjects, step: CurrentStep, replaced: Replaced
    ) -> None:
        self._step = step
        for index, loss in enumerate(objects.losses):
            # Keras's reduction is bound here, since ``_call`` sets it to "sum" while the step runs.
            call = partial(self._call, f"{LOSS} {index}", loss, loss.reduction)
            replaced.replace(loss, "call", call)
            replaced.keep(loss, "reduction")
        for index, layer in enumerate(objects.layers):
            # Keras's own layers add no sums over samples, except those in ``objects.regularized``.
            if not compat.belongs_to_keras(type(layer)) or compat.adds_loss_of_script(layer):
                add_loss = partial(self._add_loss, f"{ADDED_LOSS} {index}")
                replaced.replace(layer, "add_loss", add_loss)
        for layer in objects.regularized:
            replaced.replace(layer, "activity_regularizer", self._regularize)
        if compat.of_keras_3(model):
            replaced.replace(model, "compute_loss", _compute_with_masks)

    def _call(
        self, name: str, loss: Any, reduction: Any, call: Callable, y_true: Any, y_pred: Any
    ) -> Any:
        """Return what Keras is to reduce: values of the samples, times what makes their sum that of the whole batch."""
        losses = call(y_true, y_pred)
        loss.reduction = reduction
        if self._step.in_metric.is_on:
            return losses
        # Keras's losses with ignore_class attach this mask to their values.
        loss_mask = getattr(losses, "_keras_mask", None)
        present = [mask for mask in (_mask_of(y_pred), loss_mask) if mask is not None]
        flags: list = [tf.cast(mask, tf.bool) for mask in present]
        mask = functools.reduce(tf.logical_and, flags or [None])
        if reduction in ("sum", "none", None):
            scaled = self._of_the_whole(losses)
        else:
            denominator = self._denominator(reduction, mask, losses)
            if denominator is None:
                # A function of the script may have added up the samples itself, and returned one number.
                if losses.shape.rank == 0 and self._step.register_number(name, losses):
                    return self._of_the_whole(losses)
                return losses
            # Keras would divide by the number of valid values on this rank, which may be 0.
            loss.reduction = "sum"
            scaled = self._of_the_whole(losses, denominator)
        if loss_mask is not None:
            # Put back for Keras to read, since arithmetic drops such attributes.
            scaled._keras_mask = loss_mask
        return scaled

    def _add_loss(
        self, name: str, add_loss: Callable, losses: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # Keras sums the values that a layer adds, so one value per sample makes a sum over samples.
        scaled = tf.nest.map_structure(partial(self._scaled_if_sum, name), losses)
        return add_loss(scaled, *args, **kwargs)

    def _regularize(self, regularizer: Callable[[Any], Any], outputs: Any) -> Any:
        return self._of_the_whole(regularizer(outputs))

    def _scaled_if_sum(self, name: str, loss: Any) -> Any:
        if tf.is_tensor(loss) and self._register_loss(name, loss):
            return self._of_the_whole(loss)
        return loss

    def _register_loss(self, name: str, loss: tf.Tensor) -> bool:
        """Note a loss; return whether Keras makes a sum over the samples of it, perhaps by adding up its values."""
        if not loss.shape.rank:
            return bool(self._step.register_number(name, loss))
        length = loss.shape[0]
        if length is None:
            # Counted among the numbers, as in a step whose batch has a known size.
            self._step.register_number(name, None)
            return True
        is_sum = self._step.register_number(name, tf.reduce_sum(loss))
        if is_sum is not None:
            return is_sum
        # Unless it has been found out, a loss of any other length hasn't one value per sample.
        rows = self._step.share.rows
        return isinstance(rows, int) and length == rows

    def _of_the_whole(self, terms: tf.Tensor, denominator: Any = 1.0) -> tf.Tensor:
        """Return the terms of a sum that is divided by a denominator.

        Divided by the fraction of this rank, too, by which the loss or its gradients are multiplied later
        (``weighting``).
        """
        divisor = tf.cast(denominator, tf.float64) * self._step.fraction
        # A rank without samples has fraction 0 and contributes nothing.
        factor = tf.math.divide_no_nan(tf.constant(1.0, tf.float64), divisor)
        return terms * tf.cast(factor, terms.dtype)

    def _denominator(
        self, reduction: str, mask: tf.Tensor | None, losses: tf.Tensor
    ) -> tf.Tensor | None:
        """Return by what Keras would divide the sum over the whole batch; None for the number of losses."""
        weights = None
        if reduction == "mean_with_sample_weight":
            weights = self._sample_weights()
        if weights is None and mask is None:
            return None
        if weights is None:
            # The loss may have more axes than the mask: several numbers for each of its elements.
            per_step = tf.maximum(tf.size(losses) / tf.size(mask), 1.0)
            return tf.cast(per_step, tf.float64) * self._sum_of_all_ranks(mask)
        weights = tf.cast(weights, tf.float64)
        if mask is not None:
            # Sample weights have no axis for the steps, which the mask has.
            while weights.shape.rank < mask.shape.rank:
                weights = weights[..., tf.newaxis]
            weights *= tf.cast(mask, tf.float64)
        return self._sum_of_all_ranks(weights)

    def _sample_weights(self) -> Any:
        batch = self._step.share.data
        weights = None
        if isinstance(batch, (tuple, list)) and len(batch) > 2:
            weights = batch[2]
        if tf.nest.is_nested(weights):
            raise ValueError(
                "a loss with reduction 'mean_with_sample_weight' was given sample weights for each output, which a "
                "replicated model can't divide.\nWhat to do: use the reduction 'sum_over_batch_size'."
            )
        return weights

    def _sum_of_all_ranks(self, counts: Any) -> tf.Tensor:
        total = tf.reduce_sum(tf.cast(counts, tf.float64))
        return self._step.world.sum_over_ranks(total * self._step.sum_factor)


def _compute_with_masks(compute_loss: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call Keras 3's ``compute_loss``, whose losses cast outputs of half precision.

    In an eager step, nothing leads from such an output to its mask, see ``_mask_of``.
    """
    bound = inspect.signature(compute_loss).bind(*args, **kwargs)
    if "y_pred" in bound.arguments:
        y_pred = bound.arguments["y_pred"]
        bound.arguments["y_pred"] = tf.nest.map_structure(_as_losses_cast, y_pred)
    return compute_loss(*bound.args, **bound.kwargs)


def _as_losses_cast(output: Any) -> Any:
    mask = getattr(output, "_keras_mask", None)
    if mask is not None and output.dtype.size < 4:
        output = tf.cast(output, tf.float32)
        output._keras_mask = mask
    return output


def _mask_of(output: Any) -> Any:
    """Return the mask of an output, also of one of half precision, which losses of Keras 3 cast without its mask."""
    mask = getattr(output, "_keras_mask", None)
    if mask is None and tf.is_symbolic_tensor(output) and output.op.type == "Cast":
        return getattr(output.op.inputs[0], "_keras_mask", None)
    return mask
