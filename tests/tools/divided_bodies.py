"""Training with updates divided among the ranks, beside training in which each rank makes all updates: what the tests
of either Keras run on their ranks.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from typing import Any, Callable

import numpy as np
import tensorflow as tf

import npu_device as npu
from npu_device._src import compat

STEPS = 20
SHAPES = [(40, 3), (7,), (), (0,), (300, 5), (2, 2), (33,)]

wrap = npu.distribute.DistributedOptimizer


def optimizers() -> dict[str, Callable[[], Any]]:
    """Return functions that make optimizers, by a name that says what is special about them."""
    kinds = tf.keras.optimizers
    scaling = tf.keras.mixed_precision.LossScaleOptimizer

    return {
        "plain": lambda: kinds.SGD(0.05),
        "momentum": lambda: kinds.SGD(0.05, momentum=0.9),
        "nesterov": lambda: kinds.SGD(0.05, momentum=0.9, nesterov=True, global_clipnorm=0.3),
        "adam": lambda: kinds.Adam(0.02, global_clipnorm=0.4),
        "amsgrad": lambda: kinds.Adam(0.02, amsgrad=True, clipvalue=0.02),
        "adamw": lambda: kinds.AdamW(0.02, weight_decay=0.1, clipnorm=0.5),
        "rmsprop": lambda: kinds.RMSprop(0.02, momentum=0.5, centered=True),
        "lion": lambda: kinds.Lion(0.01, weight_decay=0.05),
        "nadam": lambda: kinds.Nadam(kinds.schedules.ExponentialDecay(0.02, 3, 0.9)),
        "adagrad": lambda: kinds.Adagrad(0.1),
        "adadelta": lambda: kinds.Adadelta(0.5),
        "adamax": lambda: kinds.Adamax(0.02),
        "ftrl": lambda: kinds.Ftrl(0.05),
        "lamb": lambda: kinds.Lamb(0.02),
        "averages": lambda: kinds.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.7),
        "overwritten": lambda: kinds.Adam(0.02, use_ema=True, ema_overwrite_frequency=3),
        "dynamic": lambda: scaling(
            kinds.Adam(0.02, global_clipnorm=0.4), initial_scale=4.0, dynamic_growth_steps=3
        ),
        "npu dynamic": lambda: npu.train.optimizer.NpuLossScaleOptimizer(
            kinds.SGD(0.05, momentum=0.9), initial_scale=4.0, dynamic_growth_steps=3
        ),
        "accumulated": lambda: kinds.Nadam(
            0.02, global_clipnorm=0.4, gradient_accumulation_steps=3, loss_scale_factor=8.0
        ),
        "dynamic, accumulated": lambda: scaling(
            kinds.Adam(0.02, gradient_accumulation_steps=2),
            initial_scale=4.0,
            dynamic_growth_steps=3,
        ),
        "averages, accumulated": lambda: kinds.SGD(
            0.05, momentum=0.9, use_ema=True, ema_momentum=0.7, gradient_accumulation_steps=3
        ),
        "overwritten, accumulated": lambda: kinds.Adam(
            0.02,
            global_clipnorm=0.4,
            use_ema=True,
            ema_overwrite_frequency=2,
            gradient_accumulation_steps=3,
        ),
        "scaled": lambda: kinds.SGD(0.05, momentum=0.5, loss_scale_factor=8.0, global_clipnorm=0.3),
    }


def make_variables(shapes: list[tuple[int, ...]], dtypes: list[str]) -> list[Any]:
    """Return variables of this Keras, the first with a constraint; the same on every rank."""
    chance = np.random.default_rng(7)
    constraint = tf.keras.constraints.MaxNorm(1.5)
    make = getattr(tf.keras, "Variable", tf.Variable)
    variables = []
    for place, shape in enumerate(shapes):
        dtype = dtypes[place % len(dtypes)]
        value = tf.cast(tf.constant(chance.standard_normal(shape)), dtype)
        options: dict[str, Any] = {}
        if place == 0 and make is tf.Variable:
            options["constraint"] = constraint
        variables.append(make(value, dtype=dtype, name=f"v{place}", **options))
    if make is not tf.Variable:
        variables[0].constraint = constraint
    return variables


def make_gradients(
    variables: list[Any],
    step: Any,
    without: int | None,
    sparse: bool,
    infinite_at: int | None,
) -> list[Any]:
    """Return gradients that differ on each rank; of one variable there is none."""
    rank = npu.distribute.rank()
    gradients: list[Any] = []
    for place, variable in enumerate(variables):
        value = tf.cast(tf.convert_to_tensor(variable), tf.float64)
        far = tf.cast(step * (rank + 2) + place, tf.float64)
        gradient = tf.cast(tf.sin(value * 3 + far) + value / 5, variable.dtype)
        if infinite_at is not None and place == 4:
            # On one rank, in one step.
            is_infinite = tf.equal(step, infinite_at) & (rank == 0)
            gradient = tf.where(is_infinite, np.inf, gradient)
        if sparse and place == 4:
            rows = tf.constant([1, 5 + rank, 1])
            gradient = tf.IndexedSlices(tf.gather(gradient, rows), rows, tf.constant([300, 5]))
        gradients.append(None if place == without else gradient)
    return gradients


def train(
    optimizer: Any, variables: list[Any], graph: bool, steps: int = STEPS, **how: Any
) -> None:
    """Make some steps, numbered from 0. A function is traced twice if it makes the slots, else once."""
    repeat(stepping(optimizer, variables, graph, **how), steps)


def repeat(step: Callable[[Any], None], steps: int) -> None:
    for number in range(steps):
        step(tf.constant(number))


def stepping(
    optimizer: Any, variables: list[Any], graph: bool, **how: Any
) -> Callable[[Any], None]:
    """Return what makes one step, of a given number."""
    how = {"without": None, "sparse": False, "infinite_at": None, **how}
    by_pairs = how.pop("by_pairs", True)

    def step(number: Any) -> None:
        gradients = make_gradients(variables, number, **how)
        if by_pairs:
            optimizer.apply_gradients(zip(gradients, variables))
        else:
            optimizer.apply(gradients, variables)

    return tf.function(step, autograph=False) if graph else step


def bits_of(variables: list[Any]) -> list[bytes]:
    return [tf.convert_to_tensor(variable).numpy().tobytes() for variable in variables]


def _optimizer_of(name: str, variables: list[Any]) -> Any:
    optimizer = optimizers()[name]()
    if name == "adamw":
        # One variable by its identity, another one by its name.
        optimizer.exclude_from_weight_decay(var_list=[variables[1]], var_names=["one", "v4"])
    return optimizer


def body_same_bits(
    name: str,
    graph: bool,
    shapes: list[tuple[int, ...]],
    dtypes: list[str],
    without: int | None,
    sparse: bool,
) -> tuple[int, list[bytes]]:
    """Train without and with divided updates; return the number of slots on this rank and the weights."""
    how = {"without": without, "sparse": sparse}
    if "dynamic" in name:
        how["infinite_at"] = 4
    whole, divided = make_variables(shapes, dtypes), make_variables(shapes, dtypes)
    plain = wrap(_optimizer_of(name, whole))
    train(plain, whole, graph, **how)
    optimizer = wrap(_optimizer_of(name, divided), shard_optimizer=True)
    train(optimizer, divided, graph, **how)
    assert bits_of(whole) == bits_of(divided), name
    slots = 0
    assert len(plain.variables) == len(optimizer.variables)
    for one, other in zip(plain.variables, optimizer.variables):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if not compat.is_share(other) or compat.has_memory(other):
            slots += compat.is_share(other)
            assert bits_of([one]) == bits_of([other]), (name, compat.path_of(other))
    if getattr(plain, "use_ema", False):
        plain.finalize_variable_values(whole)
        optimizer.finalize_variable_values(divided)
        assert bits_of(whole) == bits_of(divided), name
    return slots, bits_of(divided)


def _counters() -> int:
    """Return how many variables of an optimizer come before its slots: steps, and in Keras 3 the rate."""
    return 1 + hasattr(tf.keras, "Variable")


def assert_divided(found: list[Any], name: str) -> None:
    """The ranks have the same weights, and each one some slots of the optimizer."""
    assert all(weights == found[0][1] for _, weights in found)
    if len(found) > 1 and name != "plain":
        assert all(0 < slots < sum(slots for slots, _ in found) for slots, _ in found), found


class _Changing(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Assigns weights and the learning rate after each epoch, on every rank."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for weight in self.model.trainable_weights:
            weight.assign(weight * 0.5)
        self.model.optimizer.learning_rate = 0.01 + 0.01 * epoch


def body_fit(name: str, compiled: dict[str, Any], built: bool) -> tuple[int, list[bytes]]:
    """Fit without and with divided updates, with an uneven last batch, and go on; return as ``body_same_bits``."""
    compiled = dict(compiled)
    swaps = compiled.pop("swaps", False)
    chance = np.random.default_rng(0)
    x = chance.standard_normal([53, 9]).astype(np.float32)
    y = (x[:, :1] > 0).astype(np.float32)
    found = []
    for shard_optimizer in (False, True):
        keras = tf.keras
        keras.utils.set_random_seed(3 + npu.distribute.rank())
        layers = [keras.layers.Dense(17, activation="relu"), keras.layers.BatchNormalization()]
        model = keras.Sequential([keras.Input([9]), *layers, keras.layers.Dense(1)])
        optimizer = optimizers()[name]()
        if built:
            optimizer.build(model.trainable_variables)
            for slot in optimizer.variables[_counters() :]:
                slot.assign(tf.fill(slot.shape, 0.01 * (1 + npu.distribute.rank())))
        model.compile(optimizer=optimizer, loss="mse", **compiled)
        model = npu.distribute.replicate(model, shard_optimizer=shard_optimizer)
        options: dict[str, Any] = {"batch_size": 12, "epochs": 2, "verbose": 0}
        options["callbacks"] = [_Changing()]
        if swaps:
            options["callbacks"].insert(0, keras.callbacks.SwapEMAWeights(swap_on_epoch=True))
            options["validation_data"] = (x[:7], y[:7])
        history = model.fit(x, y, **options).history
        # The callback of Keras serves one fit.
        del options["callbacks"]
        layers[0].trainable = built
        if not built:  # another optimizer for other variables
            model.compile(optimizer=optimizers()[name](), loss="mse", **compiled)
        history |= {
            f"again {key}": value for key, value in model.fit(x, y, **options).history.items()
        }
        if not built and not swaps:
            # All layers train again.
            layers[0].trainable = True
            model.compile(optimizer=optimizers()[name](), loss="mse", **compiled)
            last = model.fit(x, y, **options).history
            history |= {f"at last {key}": value for key, value in last.items()}
        found.append((history, model))
    (history, whole), (divided_history, divided) = found
    assert history == divided_history
    assert bits_of(whole.weights) == bits_of(divided.weights)
    slots = 0
    for one, other in zip(whole.optimizer.variables, divided.optimizer.variables):
        if not compat.is_share(other) or compat.has_memory(other):
            slots += compat.is_share(other)
            assert bits_of([one]) == bits_of([other]), (name, compat.path_of(other))
    return slots, bits_of(divided.weights)


def body_saved(name: str, directory: str, savers: list[int], graph: bool) -> list[str]:
    """Train without and with divided updates, and save both in each way; return what is wrong with the files."""
    rank = npu.distribute.rank()
    saved: list[dict[str, Any]] = []
    for shard_optimizer in (False, True):
        folder = f"{directory}/{shard_optimizer}/{rank}"
        variables = make_variables(SHAPES, ["float32"])
        optimizer = wrap(optimizers()[name](), shard_optimizer=shard_optimizer)
        train(optimizer, variables, graph, without=1)
        values: dict[str, Any] = {}
        if rank in savers:
            values["direct"] = [tf.convert_to_tensor(one).numpy() for one in optimizer.variables]
            store: dict[str, Any] = {}
            optimizer.save_own_variables(store)
            values["store"] = [store[key] for key in sorted(store)]
            path = tf.train.Checkpoint(optimizer=optimizer).write(f"{folder}/checkpoint")
            reader = tf.train.load_checkpoint(path)
            names = sorted(reader.get_variable_to_shape_map())
            values["checkpoint"] = [reader.get_tensor(key) for key in names if "OBJECT" not in key]
        npu.distribute.all_reduce(1.0)
        saved.append(values)
    wrong = []
    for kind, whole in saved[0].items():
        divided = saved[1][kind]
        same = len(whole) == len(divided) and all(
            np.asarray(one).tobytes() == np.asarray(other).tobytes()
            for one, other in zip(whole, divided)
        )
        if not same or len(whole) < len(SHAPES):
            wrong.append(kind)
    return wrong


def body_model_saved(directory: str) -> list[str]:
    """Fit without and with divided updates; return what is wrong with the files that callbacks and ``save`` write."""
    keras = tf.keras
    x = np.random.default_rng(0).standard_normal([53, 9]).astype(np.float32)
    y = (x[:, :1] > 0).astype(np.float32)
    directory = npu.distribute.broadcast_object(tempfile.mkdtemp(dir=directory))
    wrong = []
    loaded: list[dict[str, Any]] = []
    for shard_optimizer in (False, True):
        folder = f"{directory}/{shard_optimizer}"
        os.makedirs(folder, exist_ok=True)
        keras.utils.set_random_seed(3)
        layers = [
            keras.layers.Dense(17, activation="relu", name="one"),
            keras.layers.Dense(1, name="two"),
        ]
        model = keras.Sequential([keras.Input([9]), *layers], name="model")
        model.compile(
            keras.optimizers.Adam(0.01, name="adam"), loss=keras.losses.MeanSquaredError()
        )
        model = npu.distribute.replicate(model, shard_optimizer=shard_optimizer)
        files = [f"{folder}/{name}" for name in ("epoch.keras", "end.keras", "end.h5")]
        backup = keras.callbacks.BackupAndRestore(f"{folder}/backup", delete_checkpoint=False)
        callbacks = [keras.callbacks.ModelCheckpoint(files[0]), backup]
        model.fit(x, y, batch_size=12, epochs=2, verbose=0, callbacks=callbacks)
        model.save(files[1])
        model.save(files[2])
        if not hasattr(keras, "Variable"):
            # A directory, which only one rank may write.
            files.append(f"{folder}/saved_model")
            if npu.distribute.rank() == 0:
                model.save(files[3], save_format="tf")
        npu.distribute.all_reduce(1.0)
        found = {}
        # Each file, which all ranks see, by one rank.
        for file in files[npu.distribute.rank() :: npu.distribute.size()]:
            again = keras.models.load_model(file)
            found[file.rpartition("/")[2]] = bits_of([*again.weights, *again.optimizer.variables])
        loaded.append(found)
        assert len(model.optimizer.variables) == _counters() + 8
    for name, bits in loaded[0].items():
        if loaded[1][name] != bits or not bits:
            wrong.append(name)
    return wrong


WAYS = {
    "every rank": None,
    "rank 0": 0,
    "rank 2": 2,
    "every rank, before the first step": None,
    "rank 0, before the first step": 0,
    "rank 0, built": 0,
}
"""Who restores a file; without more words after the first steps. Of one rank, the others get it by a broadcast."""
QUICK_WAYS = ["rank 0", "rank 0, before the first step"]


def body_restored(ways: list[str], directory: str) -> list[str]:
    """Restore the state of 7 divided updates in some ways, and go on; return the ways in which the result differs from
    that of undivided updates.
    """
    directory = npu.distribute.broadcast_object(tempfile.mkdtemp(dir=directory))
    variables = make_variables(SHAPES, ["float32"])
    optimizer = wrap(optimizers()["overwritten"](), shard_optimizer=True)
    train(optimizer, variables, False, 7)
    state = bits_of(optimizer.variables)
    if npu.distribute.rank() == 0:
        checkpoint = tf.train.Checkpoint(optimizer=optimizer, variables=variables)
        checkpoint.write(f"{directory}/checkpoint")
    npu.distribute.all_reduce(1.0)
    undivided = _restored("every rank, before the first step", directory, False, state)
    return [way for way in ways if _restored(way, directory, True, state) != undivided]


def _restored(way: str, directory: str, shard_optimizer: bool, state: list[bytes]) -> list[bytes]:
    """Restore a state in a way, and go on for 5 steps; return what comes out."""
    variables = make_variables(SHAPES, ["float32"])
    optimizer = wrap(optimizers()["overwritten"](), shard_optimizer=shard_optimizer)
    is_later = "," not in way
    step = stepping(optimizer, variables, is_later)
    if is_later:
        repeat(step, 2)
    elif "built" in way:
        optimizer.build(variables)
    loader = WAYS[way]
    if loader in (None, npu.distribute.rank()):
        checkpoint = tf.train.Checkpoint(optimizer=optimizer, variables=variables)
        checkpoint.read(f"{directory}/checkpoint")
    if loader is not None:
        # Before the first step, the optimizer is left to that step, which gives all ranks the values of rank 0.
        sent = [*variables, *optimizer.variables] if is_later else variables
        npu.distribute.broadcast(sent, loader)
    if is_later:
        assert bits_of(optimizer.variables) == state, way
        npu.distribute.all_reduce(1.0)
    repeat(step, 5)
    end = bits_of([*variables, *optimizer.variables])
    npu.distribute.all_reduce(1.0)
    return end


def body_scaled_later(graph: bool) -> list[bool]:
    """Put a loss-scale optimizer around a wrapped one, without and with divided updates; return whether weights and
    state are equal.
    """
    ends = []
    for shard_optimizer in (False, True):
        variables = make_variables(SHAPES, ["float32"])
        inner = wrap(
            tf.keras.optimizers.Adam(0.02, global_clipnorm=0.4), shard_optimizer=shard_optimizer
        )
        outer = tf.keras.mixed_precision.LossScaleOptimizer(
            inner, initial_scale=4.0, dynamic_growth_steps=3
        )
        train(outer, variables, graph, without=1, infinite_at=4)
        ends.append((bits_of(variables), bits_of(inner.variables)))
        npu.distribute.barrier()
    return [whole == divided for whole, divided in zip(*ends)]


def body_loaded_model(directory: str) -> list[bool]:
    """Go on with a model that was saved with the state of its optimizer, without and with divided updates; return
    whether what comes out is equal.
    """
    keras = tf.keras
    directory = npu.distribute.broadcast_object(tempfile.mkdtemp(dir=directory))
    x = np.random.default_rng(0).standard_normal([53, 9]).astype(np.float32)
    y = (x[:, :1] > 0).astype(np.float32)
    options: dict[str, Any] = {"batch_size": 12, "epochs": 2, "verbose": 0}
    file = f"{directory}/model.keras"
    if npu.distribute.rank() == 0:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input([9]), keras.layers.Dense(5), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), loss=keras.losses.MeanSquaredError())
        compat.build_optimizer(model.optimizer, model.trainable_variables)
        for place, slot in enumerate(model.optimizer.variables[_counters() :]):
            slot.assign(tf.fill(slot.shape, 0.01 * (1 + place)))
        model.optimizer.iterations.assign(10)
        model.save(file)
    npu.distribute.barrier()
    ends = []
    for shard_optimizer in (False, True):
        model = npu.distribute.replicate(
            keras.models.load_model(file), shard_optimizer=shard_optimizer
        )
        history = model.fit(x, y, **options).history
        state = bits_of([*model.weights, *model.optimizer.variables])
        npu.distribute.barrier()
        ends.append((history, state))
        shares = list(map(compat.is_apart, model.optimizer.variables))
        assert any(shares) == shard_optimizer
    return [whole == divided for whole, divided in zip(*ends)]


def body_resumed(directory: str) -> list[bool]:
    """Resume a fit from the files of Keras's ``BackupAndRestore``, without and with divided updates; return whether
    what comes out is equal.
    """
    keras = tf.keras
    directory = npu.distribute.broadcast_object(tempfile.mkdtemp(dir=directory))
    x = np.random.default_rng(0).standard_normal([53, 9]).astype(np.float32)
    y = (x[:, :1] > 0).astype(np.float32)
    ends = []
    for shard_optimizer in (False, True):
        for epochs in (2, 3):
            keras.utils.set_random_seed(epochs)
            layers = [keras.Input([9]), keras.layers.Dense(5), keras.layers.Dense(1)]
            model = keras.Sequential(layers, name="model")
            model.compile(keras.optimizers.Adam(0.01, name="adam"), loss="mse")
            model = npu.distribute.replicate(model, shard_optimizer=shard_optimizer)
            backup = keras.callbacks.BackupAndRestore(
                f"{directory}/{shard_optimizer}", delete_checkpoint=False
            )
            history = model.fit(
                x, y, batch_size=12, epochs=epochs, verbose=0, callbacks=[backup]
            ).history
        assert len(history["loss"]) == 1, "it has not resumed"
        ends.append((history, bits_of([*model.weights, *model.optimizer.variables])))
        npu.distribute.barrier()
    return [whole == divided for whole, divided in zip(*ends)]


def body_direct_reads(directory: str) -> list[str]:
    """Read slots that other ranks hold in ways past the optimizer; return the ways that give no complete value, and
    raise nothing.
    """
    variables = make_variables(SHAPES, ["float32"])
    whole = wrap(tf.keras.optimizers.Adam(0.02))
    train(whole, variables, False, 3)
    divided_variables = make_variables(SHAPES, ["float32"])
    divided = wrap(tf.keras.optimizers.Adam(0.02), shard_optimizer=True)
    train(divided, divided_variables, False, 3)

    def saved(slot: Any) -> np.ndarray:
        file = f"{directory}/{npu.distribute.rank()}.npy"
        np.save(file, slot)
        return np.load(file)

    ways: dict[str, Callable[[Any], Any]] = {
        "numpy": lambda slot: slot.numpy(),
        "asarray": np.asarray,
        "save": saved,
        "tensor": tf.convert_to_tensor,
        "sum": lambda slot: slot + 0.0,
        "add": lambda slot: tf.add(slot, 0.0),
        "multiply": lambda slot: tf.multiply(compat.inner_variable(slot), 1.0),
        "stack": lambda slot: tf.stack([slot])[0],
        "function": tf.function(tf.identity, autograph=False),
        "captured": lambda slot: tf.function(lambda: tf.convert_to_tensor(slot) + 0.0)(),
        "rows": lambda slot: slot[...],
    }
    wrong = []
    for one, other in zip(whole.variables, divided.variables):
        if not compat.is_apart(other) or compat.has_memory(other):
            continue
        for way, read in ways.items():
            try:
                value = np.asarray(read(other))
            except Exception:
                continue
            if value.tobytes() != np.asarray(one).tobytes():
                wrong.append(f"{way}: {compat.path_of(other)}")
    if hasattr(divided, "get_weights"):
        wrong += _differing("get_weights", whole.get_weights(), divided.get_weights())
    npu.distribute.barrier()
    return wrong


def body_read_in_functions() -> list[str]:
    """Read slots before and after the first steps in functions that are traced before; return the reads that give no
    complete value, and raise nothing.
    """
    wrong = []
    raised = 0
    whole_variables = make_variables(SHAPES, ["float32"])
    whole = wrap(tf.keras.optimizers.Adagrad(0.02))
    train(whole, whole_variables, False, 3)
    for way in ("traced before the wrapper", "built before the wrapper", "built after the wrapper"):
        variables = make_variables(SHAPES, ["float32"])
        optimizer = tf.keras.optimizers.Adagrad(0.02)
        if way != "built after the wrapper":
            optimizer.build(variables)
        reads = _reads_of(optimizer) if way == "traced before the wrapper" else []
        divided = wrap(optimizer, shard_optimizer=True)
        divided.build(variables)
        if way == "built after the wrapper" and npu.distribute.size() > 1:
            shares = list(filter(compat.is_share, divided.variables))
            assert not all(map(compat.has_memory, shares)), "other ranks' slots have memory"
        reads = reads or _reads_of(divided)
        for one, read in zip(divided.variables, reads):
            if compat.is_share(one) and not np.all(read().numpy() == np.float32(0.1)):
                wrong.append(f"{way}, at first: {compat.path_of(one)}")
        train(divided, variables, False, 3)
        for one, other, read in zip(whole.variables, divided.variables, reads):
            try:
                value = read().numpy()
            except tf.errors.OpError as error:
                raised += "was traced before the first step" in str(error)
                continue
            # TensorFlow keeps what such a function reads; it can only be emptied.
            is_emptied = way == "traced before the wrapper" and value.ndim == 9
            if not is_emptied and value.tobytes() != bits_of([one])[0]:
                wrong.append(f"{way}, at last: {compat.path_of(other)}")
        npu.distribute.barrier()
    assert raised
    return wrong


def _reads_of(optimizer: Any) -> list[Callable[[], tf.Tensor]]:
    """Return a traced function for each variable of an optimizer, which reads it."""

    def reader(variable: Any) -> Callable[[], tf.Tensor]:
        read: Callable[[], tf.Tensor] = tf.function(
            lambda: tf.identity(tf.convert_to_tensor(variable)), autograph=False
        ).get_concrete_function()
        return read

    return list(map(reader, optimizer.variables))


class _SlowRate(tf.keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A rate that all ranks but the first take long to compute, amid an eager update."""

    def __call__(self, step: Any) -> Any:
        if tf.executing_eagerly() and not npu.distribute.is_main():
            time.sleep(0.1)
        return tf.constant(0.02)


def body_without_shares(names: list[str], graph: bool, directory: str) -> list[str]:
    """Train one variable in each step, so that most ranks have nothing to update, or all and accumulate. Rank 0 saves
    after each step, while the others train on: they are ahead of it if it waits, else behind. Return the optimizers
    whose files don't hold what they hold without divided updates.
    """
    wrong = []
    for name in names:
        files = [_saved_meanwhile(name, graph, directory, shard) for shard in (False, True)]
        if files[0] != files[1]:
            wrong.append(name)
    return wrong


def _saved_meanwhile(name: str, graph: bool, directory: str, shard_optimizer: bool) -> list[bytes]:
    """Return the content of the files of rank 0."""
    variables = make_variables([(100,), (90,), (5,)], ["float32"])
    if name == "slow":
        optimizer: Any = tf.keras.optimizers.Adam(_SlowRate())
    else:
        optimizer = optimizers()[name]()
    optimizer = wrap(optimizer, shard_optimizer=shard_optimizer)
    optimizer.build(variables)

    def step(number: Any, trained: list[int]) -> None:
        gradients = make_gradients(variables, number, None, False, None)
        optimizer.apply_gradients([(gradients[index], variables[index]) for index in trained])

    parts = [[0, 1, 2]] if "accumulated" in name else [[0], [1], [2]]
    steps: list[Any] = [functools.partial(step, trained=trained) for trained in parts]
    if graph:
        steps = [tf.function(call, autograph=False) for call in steps]
    files = []
    for number in range(8):
        steps[number % len(parts)](tf.constant(number))
        if npu.distribute.is_main():
            time.sleep(0.1 * (number % 3 > 0))
            file = f"{directory}/{name}-{shard_optimizer}-{number}"
            path = tf.train.Checkpoint(optimizer=optimizer).write(file)
            reader = tf.train.load_checkpoint(path)
            keys = [key for key in reader.get_variable_to_shape_map() if "OBJECT" not in key]
            files += [reader.get_tensor(key).tobytes() for key in sorted(keys)]
    npu.distribute.barrier()
    return files


def body_two_optimizers() -> tuple[bool, list[bytes]]:
    """Train shared variables by two optimizers in turn, one of which a gradient overwrites in Keras 3; return whether
    the bits are those of undivided updates, and the weights.
    """
    ends = []
    for shard_optimizer in (False, True):
        variables = make_variables(SHAPES, ["float32"])
        if hasattr(tf.keras, "Variable"):
            variables[6].overwrite_with_gradient = True
        first = wrap(optimizers()["adam"](), shard_optimizer=shard_optimizer)
        second = wrap(optimizers()["momentum"](), shard_optimizer=shard_optimizer)
        for _ in range(3):
            train(first, variables[:5], True, 2)
            train(second, variables[3:], True, 2)
        ends.append(bits_of([*variables, *first.variables, *second.variables]))
        npu.distribute.barrier()
    return ends[0] == ends[1], ends[1]


def _differing(name: str, whole: list[Any], divided: list[Any]) -> list[str]:
    if len(whole) == len(divided) and all(map(np.array_equal, whole, divided)):
        return []
    return [name]


def body_fit_checkpoint(directory: str, is_saving: bool, shard_optimizer: bool) -> Any:
    """Fit two epochs with a ``FitCheckpoint``, in a folder below; or let it restore on this number of ranks. Return the
    folder and the state.
    """
    keras = tf.keras
    if is_saving:
        directory = npu.distribute.broadcast_object(tempfile.mkdtemp(dir=directory))
    x = np.random.default_rng(0).standard_normal([24, 9]).astype(np.float32)
    y = (x[:, :1] > 0).astype(np.float32)
    keras.utils.set_random_seed(3 + is_saving)
    model = keras.Sequential([keras.Input([9]), keras.layers.Dense(5), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), loss="mse")
    model = npu.distribute.replicate(model, shard_optimizer=shard_optimizer)
    callback = npu.train.FitCheckpoint(directory)
    model.fit(x, y, batch_size=12, epochs=2, verbose=0, callbacks=[callback])
    state = bits_of([*model.weights, *model.optimizer.variables])
    npu.distribute.barrier()
    return directory, state


def body_job_checkpoint_of_ranks(directory: str, is_saving: bool, shard_optimizer: bool) -> Any:
    """Train 6 steps and save all ranks together, in a folder below; or restore on this number of ranks, in tf-keras
    before the optimizer is built. Return the folder and the state.
    """
    if is_saving:
        directory = npu.distribute.broadcast_object(tempfile.mkdtemp(dir=directory))
    variables = make_variables(SHAPES, ["float32"])
    optimizer = wrap(optimizers()["adam"](), shard_optimizer=shard_optimizer)
    if hasattr(tf.keras, "Variable"):
        # Else the checkpoint has variables that don't exist, which is an error.
        optimizer.build(variables)
    checkpoint = npu.train.JobCheckpoint(
        directory, preemption=False, optimizer=optimizer, variables=variables
    )
    if is_saving:
        train(optimizer, variables, True, 6)
        checkpoint.save(1)
    else:
        assert checkpoint.restore() == 1
        compat.build_optimizer(optimizer, variables)
    state = bits_of([*variables, *optimizer.variables])
    npu.distribute.barrier()
    checkpoint.close()
    return directory, state
