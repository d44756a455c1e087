"""Checks that all ranks read the same data, takes batches out of the iterator of a ``fit`` and puts them back, and
times how long rank 0 waits for them.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
import statistics
import time
import zlib
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from npu_device._src.cluster.time_limits import LEAST_INPUT_WAIT_SECONDS
from npu_device._src.training.watching.schedule import FIRST_LOOKS
from npu_device._src.wording import counted
from npu_device._src.world.world import World

_log = logging.getLogger("npu_device")
_TABLE_NUMBER = re.compile(r"\d{9,}$")  # number that TensorFlow draws for the name of a table
# Digits after the name of a function count the functions that were traced before it.
_DIGITS = "0123456789"
_USES = {"train": "training", "test": "validation", "predict": "prediction"}


def first_batches_are_same(world: World, source: Any, checksum: int, rows: int) -> bool:
    """Compare first batches; return False, with a warning, if only the random order differs, or raise ValueError."""
    first_batches = world.objects((checksum, rows), "first batch")
    if len({checksum for checksum, _ in first_batches}) == 1:
        return True
    lines = world.lines(
        f"first batch of {counted(size, 'sample')}, checksum {checksum:08x}"
        for checksum, size in first_batches
    )
    pipelines = world.objects(_pipeline(source), "data pipeline")
    if pipelines[0] is not None and len(set(pipelines)) == 1:
        if world.is_main:
            _log.warning(
                "the ranks shuffle the same dataset in different orders:\n%s\nRank 0's batches are sent to all, which "
                "is right but costs time.\nWhat to do: give shuffle a seed, or call npu.open(seed=1) right after the "
                "imports.",
                lines,
            )
        return False
    raise ValueError(
        f"the ranks were given different data:\n{lines}\nA replicated model takes the whole data on every rank and "
        "divides each batch itself.\nLikely cause: the script divides the data already, gives the ranks different "
        "batch sizes, or creates random data or shuffles without a seed, or with another seed on each rank; or an "
        "earlier fit has read from the same generator.\nWhat to do: for random data, npu.open(seed=1) right after the "
        "imports gives all ranks the same random state; seed generators with a state of their own, too "
        "(np.random.default_rng(1)). Otherwise give every rank the same batch size and the same "
        "data in the same order; or pass the part of this rank as npu.distribute.divided(dataset)."
    )


def modes_that_differ(
    world: World, checksums: dict[str, int], in_fit: bool, own_data: Sequence[str]
) -> list[str]:
    """Compare all batches by mode; return, with a warning, the modes whose batches rank 0 is to send from now on.

    Raises ValueError after ``evaluate`` and ``predict``, and for modes with pipelines or ``rows``; the batches of
    ``divided`` are never compared.
    """
    checksums_of_ranks = world.objects(checksums, "checksums of all batches")
    modes = []
    for mode in checksums:
        if len({sums[mode] for sums in checksums_of_ranks}) > 1:
            modes.append(mode)
    can_go_on = in_fit and not any(mode in own_data for mode in modes)
    # All ranks raise the error, but one warning is enough.
    if modes and (world.is_main or not can_go_on):
        uses = " and ".join(map(_USES.__getitem__, modes))
        lines = world.lines(
            "checksum " + " and ".join(f"{sums[mode] & 0xFFFFFFFF:08x}" for mode in modes)
            for sums in checksums_of_ranks
        )
        text = (
            f"the {uses} data were not the same on all ranks; only the first batches were:\n{lines}"
        )
        advice = (
            "Likely cause: each rank shuffles or changes the data at random by itself, for instance a Sequence in "
            "on_epoch_end.\nWhat to do: use the same seed on every rank (npu.open(seed=1)); or pass this rank's part "
            "as npu.distribute.divided(dataset)."
        )
        if not can_go_on:
            raise ValueError(f"{text}\nThe result is that of a mixture of them.\n{advice}")
        _log.warning(
            "%s\nThis epoch has used a mixture of them: some samples perhaps twice, and others not at all. From now on "
            "rank 0's batches are sent to all, which is right but costs time.\n%s",
            text,
            advice,
        )
    return modes


def require_same_mark(world: World, mark: int) -> None:
    """Raise ValueError if the ranks take their rows from different first batches; see ``divided.with_tag``."""
    marks = world.objects(mark, "mark of the first batch")
    if len(set(marks)) > 1:
        rows = world.lines(f"checksum {checksum}" for checksum in marks)
        raise ValueError(
            f"the ranks take their rows from different batches; the first samples of the first batch differ:\n{rows}\n"
            "Likely cause: the source of the pipeline is read or shuffled in another order on each rank, or a Sequence "
            "with rows() shuffles by a seed of its own.\nWhat to do: use the same seed on every rank "
            "(npu.open(seed=1)), and interleave(…, deterministic=True)."
        )


def warn_of_same_batches(world: World, checksum: int) -> None:
    """Warn when ranks that should each read their own part read the same first batch."""
    checksums = world.objects(checksum, "first batch of divided data")
    ranks = [rank for rank, checksum in enumerate(checksums) if checksums.count(checksum) > 1]
    if ranks and world.is_main:
        _log.warning(
            "ranks %s began with the very same batch, although the dataset was passed as divided.\nLikely cause: "
            "it isn't divided, or shuffled with the same seed before it is.\nWhat to do: call dataset.shard(size, "
            "rank) before shuffle, or leave npu.distribute.divided out.",
            ", ".join(map(str, ranks)),
        )


def _pipeline(source: Any) -> int | None:
    """Return a checksum of how a dataset is made; None if it may depend on the rank."""
    if not isinstance(source, tf.data.Dataset):
        return None
    try:
        variant = tf.data.experimental.to_variant(source)
        graph = tf.raw_ops.DatasetToGraphV2(input_dataset=variant).numpy()
    except tf.errors.OpError:
        return None
    # The graph doesn't show which part a shard is, or what Python returns.
    if b"ShardDataset" in graph or b"PyFunc" in graph:
        return None
    definition = _without_seeds(tf.compat.v1.GraphDef.FromString(graph))
    # Sorted, since the functions of a graph come in any order.
    functions = sorted(
        function.SerializeToString(deterministic=True) for function in definition.library.function
    )
    definition.library.Clear()
    nodes = definition.SerializeToString(deterministic=True)
    return zlib.crc32(b"".join([nodes, *functions]))


def _without_seeds(graph: Any) -> Any:
    """Return a dataset's graph without parts that only set its elements' order or say when and where it was built."""
    nodes_of_functions = [function.node_def for function in graph.library.function]
    for nodes in [graph.node, *nodes_of_functions]:
        seeded = [node for node in nodes if "Shuffle" in node.op or "Random" in node.op]
        inputs = {name.split(":")[0] for node in seeded for name in node.input}
        # Random generators and counters that a map uses, such as in Keras 3's layers, are compared with their values.
        states = set()
        for node in nodes:
            if node.op == "AssignVariableOp" and tf.as_dtype(node.attr["dtype"].type).is_integer:
                states.update(node.input)
        for node in nodes:
            is_scalar = not node.attr["value"].tensor.tensor_shape.dim
            sets_order = node.name in inputs and is_scalar
            if node.op == "Const" and (node.name in states or sets_order):
                node.attr["value"].Clear()
            node.device = ""
            for name in ("metadata", "config", "config_proto"):
                node.attr.pop(name, None)
            node.name = _TABLE_NUMBER.sub("", node.name)
            node.input[:] = [_TABLE_NUMBER.sub("", name) for name in node.input]
            for attribute in node.attr.values():
                functions = list(attribute.list.func)
                if attribute.HasField("func"):
                    functions = [attribute.func]
                for function in functions:
                    function.name = function.name.rstrip(_DIGITS)
        for node in seeded:
            for name in ("seed", "seed2"):
                if name in node.attr:
                    node.attr[name].i = 0
    for function in graph.library.function:
        function.signature.name = function.signature.name.rstrip(_DIGITS)
    return graph


# Calls of the train function before the waits are timed.
_LOOKS = (FIRST_LOOKS[-1], 200, 2000)
TIMED_CALLS = 5  # calls that are timed in a row: one that fills a buffer doesn't count
_SHARE = 0.25  # the fraction of a step that is worth a warning

_WHOLE = (
    "Each rank prepares the whole batch and keeps its share.\nWhat to do: let each rank prepare its own samples only, "
    "by npu.distribute.pipeline(source, map, batch), by rows(index, start, stop) of a Sequence, or "
    "from files of its own by npu.distribute.divided."
)
_OWN = (
    "Each rank prepares its own samples only.\nWhat to do: cache what is prepared, raise num_parallel_calls, start "
    "fewer ranks on each host, or use more hosts."
)


def pull(batches: Any, count: int) -> list:
    """Return the next batches of an iterator, fewer at its end."""
    return list(itertools.islice(batches, count))


def with_put_back(batches: Any, pulled: list) -> Any:
    """Return an iterator over what was pulled, for one call: the next call gets the iterator of Keras again.

    It is of the same kind, so that the function isn't traced again.
    """
    if not pulled:
        # Left to Keras, which handles the end of an iterator.
        return batches
    if not isinstance(batches, tf.data.Iterator):
        return iter(pulled)
    # A dataset of tensors, not of a generator, whose Python calls can wait for ever on a rank with one thread, and stay
    # in memory.
    parts = map(tf.data.Dataset.from_tensors, pulled)
    dataset = functools.reduce(tf.data.Dataset.concatenate, parts)
    variant = tf.data.experimental.to_variant(dataset)
    # Made with the type of the iterator, which may have unknown dimensions.
    return iter(tf.data.experimental.from_variant(variant, batches.element_spec))


class PutBack(itertools.chain):
    """Batches of an eager model that were taken from Keras's iterator, ``source``, and what is left in that."""

    def __init__(self, pulled: list, source: Any) -> None:
        super().__init__()
        self.source = source


class InputWait:
    """Times some calls of a train function, in which the batches are taken here instead of in the function."""

    def __init__(self) -> None:
        self.is_over = False  # True when no look is left, or the warning was given
        self._call_count = 0
        self._looks = list(_LOOKS)
        self._times: list[tuple[float, float]] = []  # seconds of the wait, and of the call with it

    def call(self, function: Callable[[Any], Any], batches: Any, steps: int, own_data: bool) -> Any:
        """Call Keras's train function; ``own_data`` if each rank prepares its own samples only."""
        self._call_count += 1
        if self._call_count <= self._looks[0]:
            return function(batches)
        begin = time.perf_counter()
        pulled = pull(batches, steps)
        wait = time.perf_counter() - begin
        # Left to the function, which ends the epoch in Keras's way.
        if not pulled:
            return function(batches)
        logs = function(with_put_back(batches, pulled))
        for leaf in filter(tf.is_tensor, tf.nest.flatten(logs)):
            # Read, since a GPU may still work on it.
            leaf.numpy()
        self._times.append((wait, time.perf_counter() - begin))
        if len(self._times) == TIMED_CALLS:
            self._judge(steps, own_data)
        return logs

    def _judge(self, steps: int, own_data: bool) -> None:
        """Warn if the calls that were timed have waited for too long."""
        wait = statistics.median(wait for wait, _ in self._times) / steps
        total = statistics.median(total for _, total in self._times) / steps
        fraction = statistics.median(wait / total for wait, total in self._times)
        self._looks.pop(0)
        self._times.clear()
        self.is_over = not self._looks
        advice = _WHOLE
        if own_data:
            advice = _OWN
        if wait >= LEAST_INPUT_WAIT_SECONDS and fraction > _SHARE:
            self.is_over = True
            _log.warning(
                "input takes %.0f ms of a step of %.0f ms (%.0f %%): rank 0 waits that long for each batch. %s",
                1e3 * wait,
                1e3 * total,
                100 * fraction,
                advice,
            )
