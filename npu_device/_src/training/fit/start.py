"""Before the first step of a call on a replicated model: make its variables, give them rank 0's values, and
let rank 0 say what is trained: the job, the batch, and the settings left as they are.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Callable

import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives.engine_text import explained
from npu_device._src.training.distribute.variables import require_same_state
from npu_device._src.training.fit import xla
from npu_device._src.training.sharding.remote_slots import assign_training_state
from npu_device._src.training.watching import training_state
from npu_device._src.training.watching.digests import checksum
from npu_device._src.training.watching.wrapped_optimizers import reducer_of, reducing_optimizer
from npu_device._src.wording import counted, shortened
from npu_device._src.world.share import without_optional
from npu_device._src.world.world import World

_log = logging.getLogger("npu_device")


def set_random_state_from_root(world: World) -> None:
    """Set the random states of all ranks to those of rank 0: Python's, numpy's and TensorFlow's."""
    # If TensorFlow has no seed, one is set, so that Keras shuffles in the same order on all ranks.
    if world.is_main and compat.random_state()[0] is None:
        tf.random.set_seed(random.SystemRandom().randrange(1 << 31))
    states = world.object_from_root(training_state.random_states())
    if not world.is_main:
        training_state.set_random_states(states)


def keep_steps_per_execution(world: World, model: Any) -> None:
    """Switch off what chooses ``steps_per_execution="auto"`` in tf-keras."""
    # It would go by the time that this rank takes, and callbacks would run at other steps than on other ranks.
    if getattr(model, "autotune_steps_per_execution", False):
        model.autotune_steps_per_execution = False
        if world.is_main:
            _log.warning(
                "steps_per_execution='auto' is 1 on several ranks, which would choose other numbers."
            )


def spec_of(model: Any, batches: Any, batch: Any) -> Any:
    """Return what the step of a model is going to be traced with: nested ``tf.TypeSpec``."""
    if isinstance(batches, tf.data.Iterator) and not model.run_eagerly:
        return batches.element_spec
    return tf.nest.map_structure(_spec_of_leaf, batch)


def _spec_of_leaf(leaf: Any) -> Any:
    if leaf is None:
        return None
    return tf.type_spec_from_value(leaf)


def build(
    model: Any,
    mode: str,
    own_step: Callable[[Any], Any],
    spec: Any,
    own_part: Callable[[Any], Any] = lambda batch: batch,
) -> None:
    """Trace a step, of Keras or the user, on what ``own_part`` returns of a batch, to make all variables it needs."""
    is_training = mode == "train"
    # A user's step may create anything, so that only tracing it tells; metrics of an eager one come later, too.
    makes_anything = is_training or (mode == "test" and not model.run_eagerly)
    if makes_anything and not compat.belongs_to_keras(own_step):
        _trace(model, own_step, spec, own_part)
        return
    is_built = compat.is_built(model)
    if mode == "predict":
        is_built = model.built
    if not is_built:
        forward = own_step
        # Only the forward pass is traced: the backward pass makes no variables, and costs most.
        if is_training:
            forward = partial(compat.run_training_forward_pass, model)
        _trace(model, forward, spec, own_part)
    if is_training:
        training_state.build_optimizer(model)


def _trace(
    model: Any, step: Callable[[Any], Any], spec: Any, own_part: Callable[[Any], Any]
) -> None:
    cut = compat.do_not_convert(lambda batch: own_part(without_optional(batch)))
    training_state.trace_step(model, lambda batch: step(cut(batch)), spec)


def build_optimizer_as_elsewhere(world: World, model: Any) -> None:
    """Build the model's optimizer where only other ranks have its state: rank 0's ``BackupAndRestore`` reads it."""
    count = len(training_state.optimizer_state(model))
    if len(set(world.objects(count, "state of optimizers"))) > 1:
        training_state.build_optimizer(model)


def set_variables_from_root(world: World, model: Any, training: bool, root_rank: int = 0) -> None:
    """Set the variables of the model on all ranks to those of the root, and of its optimizers if it trains."""
    # An eager model's layers may keep tensors of their last call, which are of the rank's share.
    constants = not getattr(model, "run_eagerly", False)
    require_same_state(world, compat.all_layers(model), constants)
    variables = training_state.common(model, compat.variables_of(model))
    variables += training_state.loose_variables(model)
    if training:
        variables += training_state.optimizer_state(model)
    numeric = []
    for variable in compat.unique(variables):
        # Strings are words of a vocabulary, which no step changes.
        if not compat.is_vocabulary(variable) and tf.as_dtype(variable.dtype) != tf.string:
            numeric.append(variable)
    assign_training_state(world, numeric, root_rank)


def full_checksum(batch: Any) -> int:
    """Return a checksum of all that the tensors of a batch hold; ``batch_checksum`` reads a sample of it."""
    total = 0
    for leaf in tf.nest.flatten(batch, expand_composites=True):
        if leaf is not None and getattr(leaf, "dtype", None) not in (tf.variant, tf.resource):
            total = checksum(leaf, total)
    return total


def statement(
    world: World,
    model: Any,
    optimizers: Sequence,
    rows: int | None,
    steps: int | None,
    checked: str,
) -> list[str]:
    """Return the message; ``rows`` are those of the first batch, None of own data; ``steps`` those of an epoch, in
    which these optimizers update the model.
    """
    hosts = Counter(world.job.cluster.hosts)
    places = ", ".join(f"{count} on {host}" for host, count in hosts.items())
    steps_in_words = "unknown"
    if steps is not None:
        steps_in_words = str(steps)
    rates = ", ".join(map(_rate, optimizers)) or "none"
    threads = "TensorFlow's default number of threads"
    thread_count = tf.config.threading.get_intra_op_parallelism_threads()
    if thread_count:
        threads = counted(thread_count, "thread")
    lines = [
        f"npu_device: {type(model).__name__} {model.name!r} trains on {world.size} ranks ({places})",
        f"  global batch   {_samples_per_rank(rows, world.size)}; {steps_in_words} steps per epoch",
        f"  learning rate  {rates}, as given, not scaled by the number of ranks",
        *_divided_updates(world, optimizers),
        f"  engine         {explained(world.job, world.group)}; {threads} per rank",
    ]
    if xla.compiles_call(model):
        lines.append("  XLA            compiles the model's forward and backward pass")
    lines += _normalisation(model)
    return [
        *lines,
        f"  first step     {checked}",
        "  files          callbacks write on rank 0; the others wait after each epoch",
        "  (NPU_DEVICE_STATEMENT=off leaves this out)",
    ]


def _samples_per_rank(rows: int | None, ranks: int) -> str:
    if rows is None:
        return "each rank reads its own samples"
    smallest = rows // ranks
    if rows % ranks == 0:
        return f"{rows} samples, {smallest} per rank"
    return f"{rows} samples, {smallest} or {smallest + 1} per rank"


def _rate(optimizer: Any) -> str:
    """Return the learning rate of an optimizer, or the class of its schedule."""
    rate = compat.learning_rate_of(getattr(optimizer, "inner_optimizer", optimizer))
    # Unlike a variable, a schedule can be saved as a config, and not be assigned.
    is_schedule = hasattr(rate, "get_config") and not hasattr(rate, "assign")
    if is_schedule:
        return f"{type(rate).__name__} ({type(optimizer).__name__})"
    return f"{float(tf.convert_to_tensor(rate)):g} ({type(optimizer).__name__})"


def _divided_updates(world: World, optimizers: Sequence) -> list[str]:
    """Return a line for each optimizer whose updates are divided among the ranks."""
    lines = []
    for optimizer in optimizers:
        update = getattr(reducer_of(reducing_optimizer(optimizer)), "divided_update", None)
        if update is not None:
            held, total = update.bytes_of_state
            name = type(optimizer).__name__
            lines.append(
                f"  optimizer      divided over {world.size} ranks ({name}: "
                f"{held / 1e6:.3g} of {total / 1e6:.3g} MB on this one)"
            )
    return lines


def _normalisation(model: Any) -> list[str]:
    """Return a line about layers that normalise the share of each rank by itself; none without such layers."""
    batch_normalization = compat.keras_of(model).layers.BatchNormalization
    names = []
    for layer in compat.all_layers(model):
        is_trained = isinstance(layer, batch_normalization) and layer.trainable
        if is_trained and not getattr(layer, "synchronized", False):
            names.append(layer.name)
    if not names:
        return []
    return [
        f"  batch norm     {counted(len(names), 'layer')} ({shortened(names, 3)}): by each rank's share, "
        "unlike one process; with synchronized=True by all samples"
    ]
