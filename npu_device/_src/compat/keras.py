"""Differences between Keras releases, Keras 3 and tf-keras, and the private parts of both that the package uses."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import tensorflow as tf


def keras_of(component: object) -> Any:
    """Return the Keras package that an optimizer, a model or a layer belongs to; tf.keras if it can't be determined."""
    for cls in type(component).__mro__:
        root = cls.__module__.split(".", 1)[0]
        if root in ("keras", "tf_keras") and root in sys.modules:
            return sys.modules[root]
    return tf.keras


def release_of(keras: Any) -> tuple[int, int]:
    """Return the release of a Keras package."""
    version = getattr(keras, "__version__", None)
    if not version:
        version = getattr(keras, "version", lambda: "2.0")()
    major, minor, *_ = str(version).split(".")
    return int(major), int(minor)


def is_keras_3(keras: Any) -> bool:
    """Return True for Keras 3 and later; False for tf_keras and for the Keras 2 of TensorFlow 2.15."""
    return release_of(keras) >= (3, 0)


def of_keras_3(component: object) -> bool:
    """Return whether the Keras of an optimizer, a model or a layer is Keras 3 or later."""
    return is_keras_3(keras_of(component))


def optimizer_methods() -> list[tuple[type, str]]:
    """Return the methods of the imported Keras packages through which all their optimizers apply gradients, each with
    its class; also that of Keras 3's loss-scale optimizer, which decides whether the one inside is called.
    """
    methods: list[tuple[type, str]] = []
    for name in ("keras", "tf_keras"):
        optimizers: Any = getattr(sys.modules.get(name), "optimizers", None)
        # A Keras that isn't imported, or is just being imported, has no optimizers yet.
        if not hasattr(optimizers, "Optimizer"):
            continue
        if is_keras_3(sys.modules[name]):
            # In Keras 3, ``apply_gradients`` calls ``apply``.
            method = "apply"
            classes = (optimizers.Optimizer, optimizers.LossScaleOptimizer)
        else:
            method = "apply_gradients"
            classes = (optimizers.Optimizer, optimizers.legacy.Optimizer)
        methods += [(class_with(cls, method), method) for cls in classes]
    return methods


def class_with(cls: type, method: str) -> type:
    """Return the base of an exported class that defines a method."""
    return next(base for base in cls.__mro__ if method in vars(base))


def session_backend() -> Any:
    """Return the Keras backend that supports sessions (``get_session``, ``set_session``).

    It is tf-keras's if tf.keras is Keras 2; under Keras 3 it is the one inside TensorFlow, which models don't use.
    """
    backend = tf.compat.v1.keras.backend
    # Only tf-keras has sessions.
    if hasattr(backend, "set_session"):
        return backend
    from tensorflow.python.keras import backend as inside_tensorflow

    return inside_tensorflow


def belongs_to_keras(component: Any) -> bool:
    root = str(component.__module__).partition(".")[0]
    return root in ("keras", "tf_keras")


def is_generator(candidate: Any) -> bool:
    """Return True for a ``tf.random.Generator``, and for a ``SeedGenerator`` of Keras 3."""
    if isinstance(candidate, tf.random.Generator):
        return True
    has_state = hasattr(candidate, "next") and hasattr(candidate, "state")
    return type(candidate).__name__ == "SeedGenerator" and has_state


def seed_generator_of_keras_3() -> Any:
    """Return what ``keras.random`` draws from without a seed; None if nothing has been drawn so far."""
    state = sys.modules.get("keras.src.backend.common.global_state")
    if state is None:
        return None
    return state.get_global_attribute("global_seed_generator")


def seed_state_of_keras_3() -> list[int] | None:
    """Return the state of that generator; None without one."""
    generator = seed_generator_of_keras_3()
    if generator is None:
        return None
    with tf.init_scope():
        return generator.state.numpy().tolist()


def set_seed_state_of_keras_3(state: list[int]) -> None:
    with tf.init_scope():
        if seed_generator_of_keras_3() is None:
            # The first draw makes the generator.
            importlib.import_module("keras").random.uniform([])
        seed_generator_of_keras_3().state.assign(state)


def build_optimizer(optimizer: Any, variables: Any) -> None:
    """Create the variables of an optimizer, if they don't exist. A legacy optimizer of tf-keras has no public way."""
    if of_keras_3(optimizer):
        # Keras 3 raises an error if an optimizer is built twice.
        if not optimizer.built:
            optimizer.build(variables)
    elif hasattr(optimizer, "build"):
        optimizer.build(variables)
    elif hasattr(optimizer, "_create_all_weights"):
        # Only legacy optimizers have this method.
        optimizer._create_all_weights(variables)


def adds_up_rows_first(optimizer: Any) -> bool:
    """Return True if an optimizer adds up the rows of one index of a sparse gradient before it computes with them.

    The optimizers of tf-keras do so after clipping. A class of a script may do anything with them before.
    """
    root = type(optimizer).__module__.split(".", 1)[0]
    if root not in ("keras", "tf_keras", "npu_device") or of_keras_3(optimizer):
        return False
    if hasattr(optimizer, "inner_optimizer"):
        return adds_up_rows_first(optimizer.inner_optimizer)
    changing = ("clipnorm", "clipvalue", "global_clipnorm", "gradient_transformers")
    aggregator = getattr(optimizer, "gradient_aggregator", None)
    # The script may pass a function of its own.
    if aggregator is not None and not belongs_to_keras(aggregator):
        return False
    return not any(getattr(optimizer, name, None) for name in changing)


def begin_fit_at(model: Any, epoch: int | None) -> None:
    """Let the ``fit`` that has called ``on_train_begin`` begin with an epoch, as Keras's backups do; None undoes it."""
    if of_keras_3(model):
        model._initial_epoch = epoch
    else:
        # fit asks its backup for the epoch and the step.
        counters = SimpleNamespace(
            maybe_load_initial_counters_from_ckpt=lambda *_, **__: (epoch, 0)
        )
        model._training_state = counters
        if epoch is None:
            model._training_state = None


def count_train_steps(model: Any, steps: int) -> None:
    """Let tf-keras count the steps of ``fit`` from a number on, by which its summaries are written."""
    counter = getattr(model, "_train_counter", None)
    if counter is not None:
        counter.assign(steps)


def iterators_made(model: Any, used: int, knows_length: bool) -> list[int]:
    """Return how many iterators of its data the running ``fit`` has made, or may have, when it has ``used`` some.

    Each validation on a part of the same shuffled dataset makes one or two of them.
    """
    # From Keras 3.7 on, an epoch ends by making an iterator; the next one uses it only if steps_per_epoch is given.
    factors = [1, 2, 3]
    if knows_length and release_of(keras_of(model)) >= (3, 7):
        epochs = _epochs_of_fit()
        if epochs is None:
            factors = [1, 2, 3, 4]
        elif epochs.steps_per_epoch is None:
            factors = [2, 3, 4]
    return sorted({factor * used for factor in factors})


def count_passed_batches(batches: int) -> None:
    """Let Keras 3 know how many batches of its iterator earlier epochs had taken, as it makes another at their end."""
    epochs = _epochs_of_fit()
    if hasattr(epochs, "_steps_seen"):
        epochs._steps_seen += batches


def _epochs_of_fit() -> Any:
    """Return the object that makes the epochs of the running ``fit`` of Keras 3; None if it isn't found."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        # A later Keras may name its variable in another way.
        epochs = frame.f_locals.get("epoch_iterator")
        if hasattr(epochs, "steps_per_epoch"):
            return epochs
        frame = frame.f_back
    return None


def variables_to_update(optimizer: Any, trainable_variables: Any = None) -> list:
    """Return the variables that a Keras 3 optimizer's ``apply`` updates, given its argument."""
    if trainable_variables is None:
        trainable_variables = optimizer._trainable_variables
    return list(trainable_variables)


def accumulation_steps(optimizer: Any) -> int:
    """Return over how many steps methods of Keras 3 add up the gradients of an optimizer; 1 if they don't.

    A class of a script may change the gradients of each step before they are added up: that is 1, too.
    """
    steps = getattr(optimizer, "gradient_accumulation_steps", None)
    if not steps or not of_keras_3(optimizer):
        return 1
    names = ("apply", "apply_gradients", "_backend_apply_gradients")
    methods = [getattr(type(optimizer), name, None) for name in names]
    if all(map(belongs_to_keras, methods)):
        return int(steps)
    return 1


def accumulators_of(optimizer: Any, variables: Any) -> list:
    """Return TensorFlow's variables in which a built optimizer adds up the gradients of some variables."""
    accumulators = optimizer._accumulated_gradients
    indices = map(optimizer._get_variable_index, variables)
    return [inner_variable(accumulators[index]) for index in indices]


def all_accumulators_of(optimizer: Any) -> list:
    """Return the variables in which a Keras 3 optimizer adds up gradients; none if it isn't built."""
    return list(map(inner_variable, getattr(optimizer, "_accumulated_gradients", None) or ()))


def keep_in_checkpoints(optimizer: Any, name: str, variables: list) -> None:
    """Let ``tf.train.Checkpoint`` keep further variables of an optimizer, under a name."""
    holder = tf.Module()
    holder.variables_of_rank = variables
    optimizer._track_trackable(holder, name)


def is_overwritten(variable: Any) -> bool:
    """Return True for a variable that its gradient replaces, such as a scale of float8: it is left out of norms and
    averages.
    """
    return bool(getattr(variable, "overwrite_with_gradient", False))


SUM_OVER_REPLICAS = "_all_reduce_sum_gradients"
"""The method of Keras 3's optimizers that adds up gradients over the replicas of a strategy of tf.distribute."""


def sums_over_replicas(aggregate: Any) -> bool:
    """Return True for tf-keras's own function that adds up gradients over the replicas of a strategy, if there is one
    replica. Without it, TensorFlow keeps no graph: for each reduction it registers a gradient, which refers to the
    graph forever (``_graph_mode_decorator`` in tensorflow/python/ops/custom_gradient.py).
    """
    is_own = belongs_to_keras(aggregate) and aggregate.__name__ == "aggregate_gradients"
    return is_own and not tf.distribute.has_strategy()


def note_missing_gradients(aggregate: Any, pairs: list) -> None:
    """Warn of gradients that are None, as the function does; raise ValueError if all are."""
    aggregate.__globals__["optimizer_utils"].filter_empty_gradients(pairs)


def steps_made(optimizer: Any) -> Any:
    """Return the variable in which an optimizer counts steps, also those that only add up gradients."""
    if hasattr(optimizer, "gradient_accumulation_steps"):
        # The public property counts updates, not steps.
        return inner_variable(optimizer._iterations)
    return optimizer.iterations


def inner_variable(variable: Any) -> Any:
    """Return TensorFlow's variable in one of Keras 3 (3.0 to 3.15); any other variable itself."""
    inner = getattr(variable, "_value", None)
    if isinstance(inner, tf.Variable):
        return inner
    return variable


SHARE = "_npu_share"
"""The attribute of TensorFlow's variable in a variable of an optimizer that only one rank holds, or is going to."""


def share_of(variable: Any) -> Any:
    """Return what ``mark`` has given a variable of an optimizer; None for one that all ranks hold."""
    return getattr(inner_variable(variable), SHARE, None)


def is_share(variable: Any) -> bool:
    """Return whether only one rank holds a variable of an optimizer, or is going to."""
    return share_of(variable) is not None


def is_apart(variable: Any) -> bool:
    """Return whether only one rank holds a variable of an optimizer now."""
    return getattr(share_of(variable), "is_apart", False)


def optimizer_variables(optimizer: Any, weights: Any) -> list:
    """Return all variables of an optimizer, including its learning rate and loss scale, that every rank holds.

    In Keras 3 ``variables`` has them all. In tf-keras it lacks the learning rate and the loss scale; that of a legacy
    optimizer lacks all hyperparameters, and a restored checkpoint changes its order.
    """
    if of_keras_3(optimizer):
        return [variable for variable in optimizer.variables if not is_apart(variable)]
    candidates = []
    scale: Any = getattr(optimizer, "_loss_scale", None)
    if hasattr(scale, "current_loss_scale"):
        candidates += [scale.current_loss_scale, scale.counter]
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    # Only legacy optimizers have this attribute.
    if hasattr(optimizer, "_hyper"):
        if tf.executing_eagerly():
            optimizer._create_hypers()
        candidates.append(optimizer.iterations)
        # The order of hyperparameters depends on when they were made.
        candidates += [optimizer._hyper[name] for name in sorted(optimizer._hyper)]
        candidates += slots(optimizer, weights)
    else:
        candidates += [getattr(optimizer, "learning_rate", None)]
    variables = getattr(optimizer, "variables", ())
    # Legacy optimizers have a method of this name.
    if callable(variables):
        variables = variables()
    candidates += [variable for variable in variables if not is_apart(variable)]
    # A learning rate may also be a number or a schedule.
    return [candidate for candidate in candidates if hasattr(candidate, "assign")]


def gradient_methods(keras: Any) -> list[tuple[Any, str]]:
    """Return the methods, as class and name, through which gradients enter an optimizer after their reduction."""
    optimizers = keras.optimizers
    if is_keras_3(keras):
        return [(class_with(optimizers.Optimizer, "apply"), "apply")]
    base = class_with(optimizers.Optimizer.__base__, "apply_gradients")
    return [(base, "apply_gradients"), (optimizers.legacy.Optimizer, "apply_gradients")]


def loss_scale_methods(keras: Any) -> list[tuple[Any, str]]:
    """Return the methods, as class and name, that take the initial scale of a loss-scale optimizer."""
    loss_scale_class = keras.mixed_precision.LossScaleOptimizer
    if is_keras_3(keras):
        return [(loss_scale_class, "__init__")]
    # In tf-keras, the metaclass chooses the class for the optimizer inside.
    return [(type(loss_scale_class), "__call__")]


def with_inner(optimizer: Any) -> list:
    """Return an optimizer, and the one inside if it is a loss-scale optimizer."""
    optimizers = [optimizer]
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        optimizers.append(inner)
    return optimizers


def computes_gradients_as_keras(optimizer: Any) -> bool:
    """Return True if Keras itself computes the gradients that an optimizer is given, before they are reduced."""
    names = (
        "minimize",
        "scale_loss",
        "compute_gradients",
        "_compute_gradients",
        "_get_gradients",
        "_transform_loss",
    )
    optimizers = with_inner(optimizer)
    methods = [getattr(type(instance), name, None) for instance in optimizers for name in names]
    return all(belongs_to_keras(method) for method in methods if method is not None)


def gradients_and_variables(
    optimizer: Any, gradients: Any, variables: Any = None
) -> list[tuple[Any, Any]]:
    """Return pairs from the arguments of one of the ``gradient_methods``.

    The methods of tf-keras are given pairs as ``gradients``, and Keras 3's are given gradients and variables.
    """
    if not of_keras_3(optimizer):
        return list(gradients)
    return list(zip(gradients, variables_to_update(optimizer, variables)))


def loss_scale_class_of_tf_keras(keras: Any, optimizer: object) -> Any:
    """Return the class of tf-keras's ``LossScaleOptimizer(optimizer)``: one for legacy optimizers, one for others.

    The exported name chooses between the two, and a subclass of it can't add methods. Can go when tf-keras has no
    legacy optimizers.
    """
    module = sys.modules[keras.mixed_precision.LossScaleOptimizer.__module__]
    if isinstance(optimizer, keras.optimizers.legacy.Optimizer):
        return module.LossScaleOptimizer
    return module.LossScaleOptimizerV3


def is_vocabulary(weight: Any) -> bool:
    has_table = hasattr(weight, "get_tensors") and hasattr(weight, "set_weights")
    return has_table and not hasattr(weight, "assign")


def layer_of_vocabulary(weight: Any) -> Any:
    return getattr(weight, "_layer", None)


def generator_of_layer(layer: Any) -> Any:
    """Return the ``tf.random.Generator`` from which a layer of tf-keras draws; None if there is none, or not yet."""
    return getattr(getattr(layer, "_random_generator", None), "_generator", None)


def slots(optimizer: Any, weights: Any) -> list:
    """Return the variables that a legacy optimizer of tf-keras keeps for weights, such as momenta."""
    variables = []
    for weight in weights:
        for name in sorted(optimizer.get_slot_names()):
            try:
                variables.append(optimizer.get_slot(weight, name))
            except KeyError:
                # The optimizer doesn't train this weight.
                continue
    return variables


def layers_that_draw(model: Any) -> list[tuple[Any, Any]]:
    """Return the layers of a tf-keras model that draw random numbers, each with what it draws them from."""
    # Only a model has layers to search.
    if not hasattr(model, "_flatten_layers"):
        return []
    pairs = []
    for layer in model._flatten_layers():
        generator = getattr(layer, "_random_generator", None)
        if generator is not None:
            pairs.append((layer, generator))
    return pairs


def draws_numbers(layer: Any) -> bool:
    """Return False for a layer that could draw random numbers, such as a dropout, but whose rates are all 0."""
    names = ("rate", "stddev", "dropout", "recurrent_dropout")
    rates = [getattr(layer, name) for name in names if hasattr(layer, name)]
    return any(rates) or not rates


def hides_its_state(generator: Any) -> bool:
    """Return True if the random state of what a layer draws from is inside an operation, where nothing can read it."""
    return getattr(generator, "_rng_type", "") == "legacy_stateful"


COUNTERS_METHOD = "_maybe_load_initial_counters_from_ckpt"
"""The method by which a tf-keras model takes the epoch to begin with from a backup."""

FOR_VALIDATION = "_use_cached_eval_dataset"
"""The argument with which Keras's ``fit`` calls ``evaluate`` for its validation data."""


_LOSS_REDUCTIONS = {"reduce_weighted_values", "apply_valid_mask", "compute_weighted_loss"}


def is_of_loss_reduction(operation: tf.Operation) -> bool:
    """Return True for an operation by which a loss of Keras weights and reduces the values of its samples."""
    # Keras 3 weights and reduces in one function; tf-keras does each in its own.
    return any(
        frame.name in _LOSS_REDUCTIONS and "keras" in frame.filename
        for frame in operation.traceback
    )
