"""``DistributedOptimizer`` and ``DistributedGradientTape``: gradients averaged over the ranks, as Horovod does it."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.gradients.reduction import ReductionOptions, weighted
from npu_device._src.horovod.local_gradients import LocalGradients
from npu_device._src.horovod.shared_arguments import described, with_effect
from npu_device._src.horovod.tensor_ops import Average, Compression, reduction_of_op
from npu_device._src.tf1.distributed_optimizer import DelegatingOptimizer
from npu_device._src.training.distribute import ranks
from npu_device._src.training.distribute.reduce_values import reduce_by_hand
from npu_device._src.training.opening.current_world import world_unless_child
from npu_device._src.training.optimizers.optimizer_wrapper import (
    npu_distributed_keras_optimizer_wrapper,
)
from npu_device._src.training.sharding.divisible import tell_if_asked
from npu_device._src.training.watching.wrapped_optimizers import reducer_of, reducing_optimizer

# The level of the message about variables that differ at the start: scripts of Horovod broadcast after the first step.
_START_LEVEL = logging.INFO


def _settings(
    compression: Any = Compression.none, op: int = Average, **local: Any
) -> tuple[ReductionOptions, LocalGradients]:
    """Return how gradients are reduced, and what happens to those of this rank before."""
    reduction = reduction_of_op(op)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"op is {reduction}; gradients are reduced with hvd.Average or hvd.Sum")
    if compression not in (None, Compression.none, Compression.fp16):
        raise TypeError(
            f"compression is {compression!r}; gradients travel with Compression.none or Compression.fp16.\n"
            "What to do: call hvd.allreduce(gradient, compression=...), which takes any compressor."
        )
    wire = None
    if compression is Compression.fp16:
        wire = "fp16"
    return ReductionOptions(reduction, compression=wire), LocalGradients(**local)


def _reduced(gradients: Sequence, options: ReductionOptions, local: LocalGradients) -> list:
    world = world_unless_child()
    gradients = local.made_dense(gradients)
    if world is None:
        return gradients
    return reduce_by_hand(world, gradients, gradients, options, _START_LEVEL)


def DistributedOptimizer(optimizer: Any, name: str | None = None, **arguments: Any) -> Any:
    """Make an optimizer reduce its gradients over all ranks.

    Args:
        optimizer: of Keras 3, tf-keras or ``tf.compat.v1.train``.
        name: of the TensorFlow 1 optimizer; a Keras optimizer keeps its own.
        **arguments: ``compression`` (``Compression.none`` or ``fp16``), ``op`` (``Average`` or ``Sum``),
            ``sparse_as_dense`` (make sparse gradients dense first), ``backward_passes_per_step`` (add up the gradients
            of so many batches on each rank, then reduce and apply the sum) and ``average_aggregated_gradients`` (divide
            that sum by the number of batches). Others of Horovod have no effect.

    Returns:
        A Keras optimizer itself, which in Keras 3 has ``lr`` and a callable ``variables`` from now on, as older scripts
        expect; or an optimizer around that of TensorFlow 1.

    Raises:
        NotImplementedError: ``backward_passes_per_step`` with an optimizer of TensorFlow 1, or Adasum.
        ValueError: ``backward_passes_per_step`` with an optimizer that has ``gradient_accumulation_steps``.
        TypeError: a compressor that the script defines, or an unknown argument.
    """
    options, local = _settings(**with_effect(arguments))
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if local.passes > 1:
            raise NotImplementedError(
                "backward_passes_per_step above 1 isn't supported with an optimizer of TensorFlow 1.\n"
                "What to do: multiply the batch size by it, or use a Keras optimizer."
            )
        wrapper = _LegacyOptimizer(optimizer, name or f"Distributed{type(optimizer).__name__}")
        wrapper.settings = options, local
        return wrapper
    if local.passes > 1 and getattr(optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            "the optimizer has gradient_accumulation_steps, and backward_passes_per_step is above 1: gradients would "
            "be added up twice.\nWhat to do: pass one of the two."
        )
    npu_distributed_keras_optimizer_wrapper(
        optimizer, options.reduction, compression=options.compression, shard_optimizer=False
    )
    # Only an optimizer on several ranks has a reducer.
    if reducer := reducer_of(reducing_optimizer(optimizer)):
        # ``replicate`` refuses such an optimizer: each rank has batches of its own.
        reducer.has_own_batches = True
        reducer.adds_up_first = local.passes > 1
        tell_if_asked(world_unless_child(), "it is a DistributedOptimizer of Horovod")
    keras = compat.keras_of(optimizer)
    if compat.is_keras_3(keras):
        # Keras 3 has dropped names that scripts for older releases use.
        optimizer.__class__ = _with_old_names(optimizer.__class__)
        if environment.NPU_DEVICE_HOROVOD.is_set():
            owners = (owner for owner in keras.Model.__mro__ if "compile" in vars(owner))
            _accept_old_argument(next(owners))
    local.install(optimizer)
    return optimizer


class _LegacyOptimizer(DelegatingOptimizer):
    """An optimizer of TensorFlow 1 whose ``compute_gradients`` reduces."""

    settings: tuple[ReductionOptions, LocalGradients]

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        gradients, variables = zip(*super().compute_gradients(*args, **kwargs))
        return list(zip(_reduced(gradients, *self.settings), variables))


class _CallableList(list):
    """Serves ``optimizer.variables`` and ``optimizer.variables()``."""

    def __call__(self) -> list:
        return self


@functools.cache
def _with_old_names(original: Any) -> Any:
    """Return a class of Keras 3 optimizers with names that older scripts use. It saves and loads as the original."""

    rate = property(
        lambda self: self.learning_rate, lambda self, rate: setattr(self, "learning_rate", rate)
    )
    # The list comes from Keras's own property, which the new property hides.
    variables = property(lambda self: _CallableList(original.variables.fget(self)))
    names = {"lr": rate, "variables": variables, "__module__": original.__module__}
    return type(original.__name__, (original,), names)


@functools.cache
def _accept_old_argument(owner: Any) -> None:
    """Let ``compile`` take ``experimental_run_tf_function``, which has meant nothing since TensorFlow 2.2."""
    original = owner.compile

    @functools.wraps(original)
    def compile(
        self: Any, *args: Any, experimental_run_tf_function: Any = None, **kwargs: Any
    ) -> Any:
        return original(self, *args, **kwargs)

    owner.compile = compile


@described
def DistributedGradientTape(
    gradtape: Any, *, scale_local_gradients: bool = True, **arguments: Any
) -> Any:
    """Return a tape like another one, whose ``gradient`` reduces over all ranks.

    Args:
        gradtape: the tape, which stays as it is.
        scale_local_gradients: gradients of ``register_local_source(variable)``, which each rank trains by itself, are
            divided by the number of ranks.
    """
    tape = copy.copy(gradtape)
    # A shallow copy shares the tape's recording with the original. Its class is made for this tape, which may be of a
    # subclass in the script.
    tape.__class__ = _distributed(gradtape.__class__)
    # The original ends its recording, once.
    tape._recording = False
    tape.npu_settings = _settings(**with_effect(arguments))
    tape.npu_local_factor = 1.0
    if scale_local_gradients:
        # The losses of all ranks may depend on such a variable, and its gradient is their sum.
        tape.npu_local_factor /= ranks.size()
    tape.npu_local_sources = {}  # variables by their ids
    return tape


@described
def PartialDistributedGradientTape(
    gradtape: Any, *, local_layers: Any = None, **arguments: Any
) -> Any:
    """Return a ``DistributedGradientTape`` that leaves the gradients of some layers to each rank.

    Args:
        gradtape: the tape, which stays as it is.
        local_layers: a Keras layer, or several, which each rank trains by itself.
    """
    if compat.is_layer(local_layers):
        local_layers = [local_layers]
    layers = list(local_layers or ())
    wrong = [layer for layer in layers if not compat.is_layer(layer)]
    if wrong:
        raise ValueError(f"local_layers has a {type(wrong[0]).__name__}; expected layers of Keras")
    tape = DistributedGradientTape(gradtape, **arguments)
    for layer in layers:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


@functools.cache
def _distributed(original: Any) -> Any:
    class Tape(original):
        """A tape whose gradients are reduced."""

        @compat.do_not_convert
        def gradient(
            self: Any,
            target: Any,
            sources: Any,
            output_gradients: Any = None,
            use_generic_names: bool = False,
            **options: Any,
        ) -> Any:
            """Return the gradients, reduced over all ranks but for those of local sources."""
            nested = original.gradient(self, target, sources, output_gradients, **options)
            gradients = tf.nest.flatten(nested)
            common = []
            for position, source in enumerate(tf.nest.flatten(sources)):
                if not self.npu_is_local(source):
                    common.append(position)
                elif gradients[position] is not None:
                    gradients[position] = weighted(gradients[position], self.npu_local_factor)
            if common:
                # They are reduced as one list, so that the split strategy sees all of them together.
                sent = [gradients[position] for position in common]
                for position, reduced in zip(common, _reduced(sent, *self.npu_settings)):
                    gradients[position] = reduced
            return tf.nest.pack_sequence_as(nested, gradients)

        def register_local_source(self: Any, source: Any) -> None:
            """Leave the gradient of a variable to each rank."""
            # The inner variable is kept, since Keras wraps it anew where a script asks for it.
            inner = compat.inner_variable(source)
            self.npu_local_sources[id(inner)] = inner

        def npu_is_local(self: Any, source: Any) -> bool:
            """Return whether the gradient of a variable is left to each rank."""
            return id(compat.inner_variable(source)) in self.npu_local_sources

        @compat.do_not_convert
        def get_local_and_global_gradients(
            self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any
        ) -> Any:
            """Return pairs of variable and gradient: those of local sources, and the others."""
            pairs = list(zip(sources, self.gradient(target, sources, *args, **kwargs)))
            local = [pair for pair in pairs if self.npu_is_local(pair[0])]
            common = [pair for pair in pairs if not self.npu_is_local(pair[0])]
            return local, common

    Tape.__name__ = original.__name__
    return Tape
