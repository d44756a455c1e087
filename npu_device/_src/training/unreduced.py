"""The check after the first steps and at the end of a job: were they made while nothing was reduced among the ranks?"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import sys
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from npu_device._src.collectives.job import Job
from npu_device._src.gradients.reduction import wait_for_reduction
from npu_device._src.training import keras_hooks

_FIRST_LOOK_SECONDS = 5.0
_STEPS = 10

_log = logging.getLogger("npu_device")


def watch_for_training_alone(runtime: Job) -> None:
    """Warn after the first steps, or at the end of the job, if this process trains by itself.

    Nothing calls the package in such a training, so a thread looks, less and less often, until something is reduced.
    """
    told = threading.Event()
    runtime.before_leaving.append(lambda runtime: _warn_if_trained_alone(runtime, told, 1))
    arguments = (weakref.ref(runtime), told)
    threading.Thread(target=_watch, args=arguments, name="npu_device-unreduced", daemon=True).start()


def _watch(reference: weakref.ref[Job], told: threading.Event) -> None:
    seconds = _FIRST_LOOK_SECONDS
    seen: dict[int, int] = {}
    while not wait_for_reduction(seconds):
        runtime = reference()
        if runtime is None or runtime.health.is_over or told.is_set():
            return
        _warn_if_trained_alone(runtime, told, _STEPS, seen)
        del runtime
        seconds *= 2


def _warn_if_trained_alone(runtime: Job, told: threading.Event, steps: int, seen: dict[int, int] | None = None) -> None:
    """Warn once if this process has reduced no list of tensors, while a Keras optimizer in it has made some steps.

    ``seen`` has the steps that each optimizer had made when it was first seen, by the object's id. They don't count:
    they may come from a checkpoint.
    """
    if told.is_set() or wait_for_reduction(0):
        return
    trained = [
        (optimizer, made)
        for optimizer, made in trained_optimizers()
        if made - (0 if seen is None else seen.setdefault(id(optimizer), made)) >= steps
    ]
    if trained:
        told.set()
        rank = runtime.cluster.rank
        _log.warning(
            "rank %d: %s made %d step(s), but no gradient was reduced among the %d ranks: each has trained a model of "
            "its own.\nLikely cause: the optimizer isn't wrapped, or a model other than the replicated one "
            "was trained, such as one loaded or cloned later.\nWhat to do: call model = "
            "npu.distribute.replicate(model) before fit, or npu.distribute.all_reduce(gradients) in the training loop.",
            rank,
            type(trained[0][0]).__name__,
            trained[0][1],
            runtime.cluster.world_size,
        )


def trained_optimizers() -> list[tuple[Any, int]]:
    """Return the Keras optimizers in this process that have made steps, with how many.

    Those that reduce their gradients are left out: if nothing was reduced, a checkpoint has set their steps.
    """
    kinds: list[type] = []
    for name in ("keras", "tf_keras"):
        optimizers: Any = getattr(sys.modules.get(name), "optimizers", None)
        kinds += [optimizers.Optimizer] if optimizers is not None else []
        kinds += [optimizers.legacy.Optimizer] if hasattr(optimizers, "legacy") else []
    for kind in kinds:  # which grows
        kinds += kind.__subclasses__()
    found, reducing = [], []
    for optimizer in _instances(kinds) if kinds else []:
        with contextlib.suppress(Exception):  # it may be half-destroyed
            if keras_hooks.is_wrapped(optimizer):
                reducing += [optimizer, getattr(optimizer, "inner_optimizer", None)]
            elif int(optimizer.iterations) > 0:
                found.append((optimizer, int(optimizer.iterations)))
    return [pair for pair in found if all(pair[0] is not optimizer for optimizer in reducing)]


def _instances(kinds: Sequence[type]) -> list[Any]:
    """Return the living objects of these very classes.

    While a list of all objects exists, no other thread may run: it may be filling a tuple, and Python refuses to finish
    one that something else refers to ("SystemError: bad argument to internal function"). Therefore all of it happens in
    one call of ``list``, in C, which keeps the interpreter's lock.
    """
    wanted = {id(kind) for kind in kinds}.__contains__
    twice = itertools.chain.from_iterable(map(itertools.repeat, map(gc.get_objects, [None]), [2]))
    ids_of_types = map(partial(map, id), map(partial(map, type), twice))
    chosen = map(itertools.compress, twice, map(partial(map, wanted), ids_of_types))
    return list(itertools.chain.from_iterable(chosen))
