"""Comparisons for tests: of the ranks with each other, and of a training on ranks with one process.

What counts as rounding is decided as by ``npurun verify``: one process trains a second time, with inputs and weights
that differ in the last bit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
    from npu_device._src.testing import worker
    from npu_device._src.training.distribute.ranks import gather_object, size
    from npu_device._src.training.watching.digests import digest_of

    if size() == 1 and not worker.is_rank():
        raise RuntimeError(
            "same_on_all_ranks compares the values of ranks, and this process isn't one.\n"
            "What to do: call it in the function that testing.run calls, or in a test with the mark ranks."
        )
    leaves = dict(_leaves(values, "values"))
    mine = {name: (digest_of(np.asarray(value)), _short(value)) for name, value in leaves.items()}
    everybody = gather_object(mine)
    names = list(dict.fromkeys(name for found in everybody for name in found))
    wrong = [
        name for name in names if len({found.get(name, (None,))[0] for found in everybody}) > 1
    ]
    if wrong:
        shown = [
            f"  rank {rank}: {found[wrong[0]][1] if wrong[0] in found else 'nothing'}"
            for rank, found in enumerate(everybody)
        ]
        raise AssertionError(
            "\n".join(
                [
                    f"{len(wrong)} of {len(names)} values differ between the ranks: {wrong[0]}",
                    *shown,
                ]
            )
        )


def _leaves(values: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _leaves(value, f"{name}[{key!r}]")
    elif isinstance(values, (list, tuple)):
        for place, value in enumerate(values):
            yield from _leaves(value, f"{name}[{place}]")
    else:
        yield name, values


def _short(value: Any) -> str:
    array = np.asarray(value)
    return (
        str(array)
        if array.size <= 4
        else f"{array.dtype}{list(array.shape)} {str(array.ravel()[:4])[:-1]} …]"
    )


@dataclass
class _Training:
    weights: list[dict[str, Any]] = field(default_factory=list)
    logs: list[dict[str, Any]] = field(default_factory=list)
    decisions: dict[str, Any] = field(default_factory=dict)


def equal_to_one_process(
    make_model: Callable[[], Any],
    data: Any,
    ranks: Sequence[int] = (2, 3),
    *,
    make_callbacks: Callable[[], Sequence[Any]] | None = None,
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
        AssertionError: the ranks don't train as one process does. The text tells where they diverge first.
        RankError: a training fails.
    """
    settings = {"batch_size": batch_size, "epochs": epochs}
    train = functools.partial(run, _train, make_model, data, make_callbacks, settings, **options)
    [one], [again] = train(False, ranks=1), train(True, ranks=1)
    for size in ranks:
        other = train(False, ranks=size)[0]
        found = [*_deviations(one, again, other), *_other_decisions(one, other)]
        if found:
            raise AssertionError(
                f"{size} ranks don't train as one process does.\n"
                + "\n".join(found[:_SHOWN])
                + (f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
                + "\nLikely: the loss, a metric or a layer mixes the samples of a batch, of which a rank has only its "
                "share, or sums where it should average. npurun verify names causes in a script."
            )


def _deviations(one: _Training, again: _Training, other: _Training) -> list[str]:
    from npu_device._src.comparison.compare import deviation

    found = []
    for kind in ("logs", "weights"):
        for number, epoch in enumerate(
            zip(*(getattr(training, kind) for training in (one, again, other))), start=1
        ):
            for name in epoch[0]:
                found += deviation(
                    number, kind, name, [np.atleast_1d(values[name]) for values in epoch]
                )
    return [
        f"  {each.variable} after epoch {each.step}: off by {each.off:.1e}"
        + (f", {each.ratio:.2f} times that of one process" if each.ratio is not None else "")
        + f" (rounding: {each.allowed:.0e})"
        for each in found
        if each.step == min(first.step for first in found if first.kind == each.kind)
    ]


def _other_decisions(one: _Training, other: _Training) -> list[str]:
    return [
        f"  {name}: {other.decisions.get(name)}, in one process {value}"
        for name, value in one.decisions.items()
        if not _alike(value, other.decisions.get(name))
    ]


def _alike(first: Any, second: Any) -> bool:
    if isinstance(first, float) and isinstance(second, float):
        return bool(np.isclose(first, second, rtol=1e-3))
    return bool(first == second)


def _train(
    make_model: Any, data: Any, make_callbacks: Any, settings: dict[str, int], changed: bool
) -> _Training:
    """Train on this rank, with weights and inputs changed in their last bit or not."""
    import tensorflow as tf

    from npu_device._src.comparison.noise import changed as in_the_last_bit
    from npu_device._src.training.fit.replica import replicate

    keras: Any = tf.keras
    keras.utils.set_random_seed(_SEED)
    with _without_noise(keras):
        model = replicate(make_model())
        callbacks = list(make_callbacks()) if make_callbacks else []
        found = _Training()
        arguments = [data()] if callable(data) else list(data)
        if changed:
            model.set_weights(
                [in_the_last_bit(tf.constant(weight)).numpy() for weight in model.get_weights()]
            )
            if not callable(data):
                arguments[0] = tf.nest.map_structure(
                    lambda x: in_the_last_bit(tf.constant(x)).numpy(), arguments[0]
                )

        def note(epoch: int, logs: Any) -> None:
            names = [getattr(weight, "path", weight.name) for weight in model.weights]
            found.weights.append(
                {name: value.ravel() for name, value in zip(names, model.get_weights())}
            )
            found.logs.append(
                {
                    name: float(value)
                    for name, value in logs.items()
                    if name not in ("learning_rate", "lr")
                }
            )
            rate = keras.backend.get_value(model.optimizer.learning_rate)
            found.decisions[f"learning rate after epoch {epoch + 1}"] = float(rate)

        callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=note))
        given = {} if callable(data) else {"batch_size": settings["batch_size"]}
        model.fit(
            *arguments,
            epochs=settings["epochs"],
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
            **given,
        )
    found.decisions["number of epochs"] = len(found.logs)
    for callback in callbacks[:-1]:
        for name, value in vars(callback).items():
            if not name.startswith("_") and isinstance(value, (bool, int, float, str)):
                found.decisions[f"{type(callback).__name__}.{name}"] = value
    same_on_all_ranks(found.weights)
    return found


@contextlib.contextmanager
def _without_noise(keras: Any) -> Iterator[None]:
    from npu_device._src.comparison.noise import noisy_layers, quiet

    before = [
        (layer, layer.call) for layer in (*noisy_layers(keras), keras.layers.BatchNormalization)
    ]
    for layer, call in before:
        layer.call = quiet(call)
    try:
        yield
    finally:
        for layer, call in before:
            layer.call = call
