"""Notes the calls of a script that may explain a difference, and takes noise out, in a process of ``npurun verify``.

Dropout, noise and augmentation layers pass their inputs on, shuffling keeps the order, and batch normalization that
isn't synchronized uses its moving statistics.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat
from npu_device._src.collectives import job
from npu_device._src.collectives.call import user_line
from npu_device._src.comparison import noise, topics
from npu_device._src.comparison.compare import Record, RecordedCall, load
from npu_device._src.training.distribute.synchronized_layers import normalizes_alone
from npu_device._src.verify.plan import SEED, PlannedProcess
from npu_device._src.verify.wrapping import after, wrap

_DRAWING_CALLS = ("normal", "uniform", "truncated_normal", "categorical", "shuffle")
_ADAPTED = ("mean", "variance", "bin_boundaries")


class ScriptCalls:
    """The calls of the script in this process, and the hooks that note them. TensorFlow's are installed at once, and it
    is seeded.
    """

    def __init__(self, process: PlannedProcess, record: Record, lock: threading.RLock) -> None:
        self._process = process
        self._record = record
        self._lock = lock
        self._before_step: list[RecordedCall] = []  # calls since the last step, made or traced
        # The lines that shuffle without a seed, by the dataset.
        self._unseeded = weakref.WeakKeyDictionary[Any, str]()
        tf.random.set_seed(SEED)
        tf.compat.v1.get_default_graph().seed = SEED
        wrap(tf.Graph, "__init__", after(_seed_graph))
        wrap(tf.data.Dataset, "shuffle", self._shuffle)
        for name in _DRAWING_CALLS:
            wrap(tf.random, name, functools.partial(self._drawn, name))
        for owner, name, topic in (
            (tf.random, "set_seed", topics.SEED),
            (tf.compat.v1, "set_random_seed", topics.SEED),
            (tf.nn, "compute_average_loss", topics.AVERAGE_LOSS),
            (tf, "clip_by_global_norm", topics.CLIP),
            (tf, "clip_by_norm", topics.CLIP),
        ):
            wrap(owner, name, functools.partial(self._noted, topic))

    def wrap_distribute(self, module: Any) -> None:
        """Wrap the calls of this package."""
        wrap(module, "all_reduce", self._all_reduce)
        wrap(module, "shard_and_rebatch_dataset", self._divide)

    def wrap_keras(self, keras: Any) -> None:
        """Wrap the layers of a Keras package."""
        wrap(keras.layers.Layer, "add_loss", self._add_loss)
        wrap(keras.utils, "set_random_seed", functools.partial(self._noted, topics.SEED))
        for _, layer in inspect.getmembers(keras.layers, inspect.isclass):
            if "adapt" in vars(layer):
                wrap(layer, "adapt", after(self._note_adapted))
        for layer in noise.noisy_layers(keras):
            layer.call = noise.quiet(layer.call, self._note_quiet)
        batch_norm = keras.layers.BatchNormalization
        batch_norm.call = noise.quiet(
            batch_norm.call, lambda layer: self.note(topics.BATCH_NORM, detail=layer.name)
        )
        wrap(batch_norm, "call", self._normalize)

    def note(self, topic: str, line: str = "", detail: str = "", outcome: Any = None) -> None:
        """Keep a call of the script with its line, once."""
        call = RecordedCall(topic, line or user_line(), detail, outcome)
        with self._lock:
            for calls in (self._record.calls, self._before_step):
                if call not in calls:
                    calls.append(call)

    def pop(self) -> list[RecordedCall]:
        """Return the calls since the last step that was made or traced, and begin with those of the next one."""
        with self._lock:
            calls = self._before_step
            self._before_step = []
            return calls

    def _noted(self, topic: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.note(topic)
        return original(*args, **kwargs)

    # Layers

    def _note_quiet(self, layer: Any) -> None:
        """Note a layer that would draw random numbers."""
        if compat.draws_numbers(layer):
            self.note(topics.QUIET, detail=layer.name)

    def _normalize(self, original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Note a layer that trains by the samples of one rank, despite ``synchronized=True``."""
        arguments = inspect.signature(original).bind(layer, *args, **kwargs).arguments
        outputs = original(layer, *args, **kwargs)
        # The layer is asked after its call, since it may get its method during the first one.
        if job.current() is not None and arguments.get("training") and normalizes_alone(layer):
            self.note(topics.NORMALIZES_ALONE, detail=layer.name)
        return outputs

    def _add_loss(self, original: Any, layer: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        # A loss may be a function, or a number of Python.
        shape = getattr(loss, "shape", None)
        if not callable(loss) and getattr(shape, "rank", None):
            self.note(topics.ADD_LOSS)
        return original(layer, loss, *args, **kwargs)

    def _note_adapted(self, layer: Any) -> None:
        attributes = [getattr(layer, name, None) for name in _ADAPTED]
        state = [np.array(attribute).tolist() for attribute in attributes]
        if hasattr(layer, "get_vocabulary"):
            state = layer.get_vocabulary()
        checksum = zlib.crc32(repr(state).encode())
        self.note(topics.ADAPTED, detail=repr(layer.name), outcome=checksum)

    # Data and randomness

    def _shuffle(self, original: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep the order of a dataset, unless each rank has a seed of its own."""
        arguments = inspect.signature(original).bind(dataset, *args, **kwargs).arguments
        seed = arguments.get("seed")
        if seed is not None:
            seed = int(seed)
        index = len(self._record.of(topics.SHUFFLE))
        call = RecordedCall(topics.SHUFFLE, user_line(), outcome=seed)
        self._record.calls.append(call)
        if seed is not None and self._process.ranks > 1:
            single = load(self._process.single.folder)
            shuffles = single.of(topics.SHUFFLE)
            # A seed that one process doesn't have is left as it is, for ``causes.different_seeds`` to find.
            if shuffles[index : index + 1] != [call]:
                return original(dataset, *args, **kwargs)
        if seed is None and not self._record.of(topics.SEED):
            # Another object, since several datasets may be made from one that was shuffled.
            dataset = dataset.take(-1)
            self._unseeded[dataset] = call.line
        return dataset

    def _divide(self, original: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        for source in compat.datasets_of(dataset):
            if source in self._unseeded:
                self.note(topics.UNSEEDED, self._unseeded[source], "without a seed")
        return original(dataset, *args, **kwargs)

    def _drawn(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly() and compat.a_tape_records():
            self.note(topics.RANDOM, detail=f"tf.random.{name}")
        return original(*args, **kwargs)

    def _all_reduce(self, original: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        count = sum(tensor is not None for tensor in tf.nest.flatten(values))
        self.note(topics.ALL_REDUCE, outcome=count)
        return original(values, *args, **kwargs)


def _seed_graph(graph: Any) -> None:
    if type(graph) is tf.Graph:
        graph.seed = SEED
