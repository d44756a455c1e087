"""Comparisons for tests: of the ranks with each other, and of a training on ranks with one process.

What counts as rounding is decided as by ``npurun verify``: one process trains a second time, with inputs and weights
that differ in the last bit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from npu_device._src.comparison.compare import Deviation, Triple, deviation, equal
from npu_device._src.testing.run import run

_SEED = 20201
_SHOWN = 5


def same_on_all_ranks(values: Any) -> None:
    """Check that all ranks have the same values, to the bit. Call it on every rank of a job.

    Args:
        values: a tensor, an array, a number, a string, or nested lists, tuples and dictionaries of them.

    Raises:
        AssertionError: they differ, on every rank. The text names the first value that does and lists the ranks.
        RuntimeError: this process isn't a rank of a job, such as the one that has called ``testing.run``.
    """
    from npu_device._src.pools import worker
    from npu_device._src.training.distribute.ranks import gather_object, size
    from npu_device._src.training.watching.digests import digest_of
    from npu_device._src.world.share import named_leaves

    if size() == 1 and not worker.is_rank():
        raise RuntimeError(
            "same_on_all_ranks compares the values of ranks, and this process isn't one.\n"
            "What to do: call it in the function that testing.run calls, or in a test with the mark ranks."
        )
    digests = {}
    for name, leaf in named_leaves("values", values):
        digests[name] = (digest_of(np.asarray(leaf)), _short(leaf))
    digests_by_rank = gather_object(digests)
    # Ranks may have different structures, so the names of all are looked at.
    names = list(dict.fromkeys(name for digests in digests_by_rank for name in digests))
    nothing = (None, "nothing")
    different = [
        name
        for name in names
        if len({digests.get(name, nothing)[0] for digests in digests_by_rank}) > 1
    ]
    if different:
        name = different[0]
        lines = [f"{len(different)} of {len(names)} values differ between the ranks: {name}"]
        for rank, digests in enumerate(digests_by_rank):
            lines.append(f"  rank {rank}: {digests.get(name, nothing)[1]}")
        raise AssertionError("\n".join(lines))


def _short(leaf: Any) -> str:
    array = np.asarray(leaf)
    if array.size <= 4:
        return str(array)
    return f"{array.dtype}{list(array.shape)} {str(array.ravel()[:4])[:-1]} …]"


@dataclass
class _Training:
    weights: list[dict[str, Any]] = field(default_factory=list)
    logs: list[dict[str, Any]] = field(default_factory=list)
    decisions: dict[str, Any] = field(default_factory=dict)
    # Projections of the first weights, and of what a function returns as data.
    given: Any = None


def equal_to_one_process(
    make_model: Callable[[], Any],
    data: Any,
    ranks: Sequence[int] = (2, 3),
    *,
    make_callbacks: Callable[[], Sequence] | None = None,
    batch_size: int = 12,
    epochs: int = 2,
    **options: Any,
) -> None:
    """Train a small model with ``fit`` in one process and on ranks, with ``npu.distribute.replicate``; compare.

    Loss, metrics and weights are compared after each epoch, and in the end the decisions of callbacks: the number of
    epochs, the learning rates, and numbers that the callbacks keep. Dropout, noise and augmentation are silenced, batch
    normalization that isn't synchronized uses its moving statistics, and the data keep their order.

    Args:
        make_model: returns a compiled model; a function of a module.
        data: arguments of ``fit``, such as ``(x, y)`` of arrays; or a function of a module that returns a dataset in
            batches for all ranks together.
        ranks: the numbers of ranks.
        make_callbacks: returns the callbacks; a function of a module.
        batch_size: of all ranks together, for arrays.
        epochs: how many.
        **options: of ``testing.run``: ``keras``, ``environment``, ``limit``.

    Raises:
        AssertionError: the ranks don't train as one process does, and the text tells where they diverge first; or one
            process that makes model and data twice gets different numbers.
        RankError: a training fails.
    """
    settings = {"batch_size": batch_size, "epochs": epochs}
    train = functools.partial(run, _train, make_model, data, make_callbacks, settings, **options)
    # The reference and its twin tell what rounding does to this model.
    [reference] = train(False, ranks=1)
    [noisy] = train(True, ranks=1)
    if not equal(reference.given, noisy.given):
        raise AssertionError(
            "one process that makes the model and the data twice gets different numbers, so nothing can be compared.\n"
            "What to do: give each random generator a seed, such as np.random.default_rng(1)."
        )
    for size in ranks:
        # All ranks have the same weights, which ``_train`` checks.
        training = train(False, ranks=size)[0]
        differences = [
            *_deviations(reference, noisy, training),
            *_different_decisions(reference, training),
        ]
        if differences:
            lines = [f"{size} ranks don't train as one process does.", *differences[:_SHOWN]]
            if len(differences) > _SHOWN:
                lines.append(f"  and {len(differences) - _SHOWN} more")
            lines.append(
                "Likely: the loss, a metric or a layer mixes the samples of a batch, of which a rank has only its "
                "share, or sums where it should average. npurun verify names causes in a script."
            )
            raise AssertionError("\n".join(lines))


def _deviations(reference: _Training, noisy: _Training, training: _Training) -> list[str]:
    """Return the first epoch's deviations beyond rounding, of logs and of weights."""
    lines: list[str] = []
    trainings = (reference, noisy, training)
    for attribute in ("logs", "weights"):
        epochs = zip(*(getattr(training, attribute) for training in trainings))
        for epoch_number, epoch in enumerate(epochs, start=1):
            deviations = []
            for name in epoch[0]:
                tensor = Triple(*(np.atleast_1d(variables[name]) for variables in epoch))
                deviations += deviation(name, tensor)
            lines += [_line(epoch_number, deviation) for deviation in deviations]
            # Later epochs follow from the first that deviates.
            if deviations:
                break
    return lines


def _line(epoch_number: int, deviation: Deviation) -> str:
    line = (
        f"  {deviation.variable} after epoch {epoch_number}: off by {deviation.relative_error:.1e}"
    )
    if deviation.ratio is not None:
        line += f", {deviation.ratio:.2f} times that of one process"
    return f"{line} (rounding: {deviation.allowed:.0e})"


def _different_decisions(reference: _Training, training: _Training) -> list[str]:
    lines = []
    for name, expected in reference.decisions.items():
        decision = training.decisions.get(name)
        if not _is_equal(expected, decision):
            lines.append(f"  {name}: {decision}, in one process {expected}")
    return lines


def _is_equal(expected: Any, decision: Any) -> bool:
    if isinstance(expected, float) and isinstance(decision, float):
        # Learning rates are decided by losses, which are rounded.
        return bool(np.isclose(expected, decision, rtol=1e-3))
    return bool(expected == decision)


def _train(
    make_model: Any, data: Any, make_callbacks: Any, settings: dict[str, int], is_noisy: bool
) -> _Training:
    """Train on this rank, with weights and inputs changed in their last bit or not."""
    import tensorflow as tf

    from npu_device._src.comparison.noise import changed
    from npu_device._src.training.fit.replica import replicate
    from npu_device._src.verify.projections import projected

    keras = tf.keras
    # Seeded, so that weights begin alike in each process.
    keras.utils.set_random_seed(_SEED)
    training = _Training()
    options: dict[str, Any] = {"epochs": settings["epochs"], "shuffle": False, "verbose": 0}
    if callable(data):
        arguments = [data()]
    else:
        arguments = list(data)
        options["batch_size"] = settings["batch_size"]
    with _without_noise(keras):
        model = replicate(make_model())
        callbacks = []
        if make_callbacks:
            callbacks = list(make_callbacks())

        weights = model.get_weights()

        def change(array: Any) -> Any:
            return changed(tf.constant(array)).numpy()

        # What this moves is rounding.
        if is_noisy:
            model.set_weights([change(weight) for weight in weights])
            if not callable(data):
                arguments[0] = tf.nest.map_structure(change, arguments[0])

        def record(epoch: int, logs: Any) -> None:
            names = [getattr(weight, "path", weight.name) for weight in model.weights]
            arrays = [weight.ravel() for weight in model.get_weights()]
            training.weights.append(dict(zip(names, arrays)))
            rates = ("learning_rate", "lr")
            logged = [name for name in logs if name not in rates]
            # A metric may be one number per class.
            training.logs.append({name: np.ravel(logs[name]) for name in logged})
            rate = keras.backend.get_value(model.optimizer.learning_rate)
            training.decisions[f"learning rate after epoch {epoch + 1}"] = float(rate)

        recorder = keras.callbacks.LambdaCallback(on_epoch_end=record)
        model.fit(*arguments, callbacks=[*callbacks, recorder], **options)
    arrays = map(np.asarray, [*weights, *_made_by(data)])
    training.given = projected([array for array in arrays if array.dtype.kind in "fiu"])
    training.decisions["number of epochs"] = len(training.logs)
    for callback in callbacks:
        for name, setting in vars(callback).items():
            # Settings of a callback that are numbers are what it has decided. A text may be the folder of a rank.
            if not name.startswith("_") and isinstance(setting, (bool, int, float)):
                training.decisions[f"{type(callback).__name__}.{name}"] = setting
    same_on_all_ranks(training.weights)
    return training


def _made_by(data: Any) -> list:
    """Return the numbers of the dataset that a function makes; nothing for arrays, which every process has."""
    import tensorflow as tf

    if not callable(data):
        return []
    # Made anew, since the data of the training may be read once only.
    dataset = data()
    if not isinstance(dataset, tf.data.Dataset):
        return []
    return tf.nest.flatten(list(dataset), expand_composites=True)


@contextlib.contextmanager
def _without_noise(keras: Any) -> Iterator[None]:
    from npu_device._src.comparison.noise import noisy_layers, quiet

    with contextlib.ExitStack() as stack:
        for layer in (*noisy_layers(keras), keras.layers.BatchNormalization):
            stack.enter_context(mock.patch.object(layer, "call", quiet(layer.call)))
        yield
