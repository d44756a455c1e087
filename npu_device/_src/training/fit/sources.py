"""Checks that all ranks read the same data, and handles the case when they don't."""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_device._src.cluster.frames import counted
from npu_device._src.training.world import World

_log = logging.getLogger("npu_device")
_TABLE = re.compile(r"\d{9,}$")  # after the name of a table: a random number
_USES = {"train": "training", "test": "validation", "predict": "prediction"}


def same_everywhere(world: World, source: Any, digest: int, rows: int) -> bool:
    """Compare the first batches of the ranks; return True when the ranks read the same data.

    False: only the random order differs, so that rank 0's batches are to be sent to all, which a warning says.

    Args:
        source: the data that the user passed to fit, evaluate or predict.
        digest: a checksum of the first batch.
        rows: its number of samples.

    Raises:
        ValueError: the ranks read different data.
    """
    found = world.objects((digest, rows), "first batch")
    if len({value for value, _ in found}) == 1:
        return True
    lines = "\n".join(
        f"  {world.job.cluster.name_of(rank)}: first batch of {counted(size, 'sample')}, checksum {value:08x}"
        for rank, (value, size) in enumerate(found)
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


def kinds_that_differ(world: World, checksums: dict[str, int], in_fit: bool, own_data: Sequence[str]) -> list[str]:
    """Compare all batches since the last comparison, after the first batches were the same.

    Return the kinds whose batches rank 0 is to send to all ranks from now on, which a warning says.

    Args:
        checksums: those of the batches of this rank, for ``"train"``, ``"test"`` and ``"predict"``.
        in_fit: an epoch of ``fit`` has ended. Else it was a call of ``evaluate`` or ``predict``.
        own_data: the kinds of which each rank reads its own rows.

    Raises:
        ValueError: the ranks were given different data, and what came of them is wrong.
    """
    found = world.objects(checksums, "checksums of all batches")
    kinds = [kind for kind in checksums if len({each[kind] for each in found}) > 1]
    can_go_on = in_fit and not any(kind in own_data for kind in kinds)
    if kinds and (world.is_main or not can_go_on):
        data = " and ".join(map(_USES.__getitem__, kinds))
        text = f"the {data} data were not the same on all ranks; only the first batches were:\n" + "\n".join(
            f"  {world.job.cluster.name_of(rank)}: checksum "
            + " and ".join(f"{each[kind] & 0xFFFFFFFF:08x}" for kind in kinds)
            for rank, each in enumerate(found)
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
    return kinds


def require_same_mark(world: World, mark: int) -> None:
    """Raise ValueError if the ranks take their rows from different first batches; see ``divided.with_rows``."""
    marks = world.objects(mark, "mark of the first batch")
    if len(set(marks)) > 1:
        rows = "\n".join(f"  {world.job.cluster.name_of(rank)}: checksum {each}" for rank, each in enumerate(marks))
        raise ValueError(
            f"the ranks take their rows from different batches; the first samples of the first batch differ:\n{rows}\n"
            "Likely cause: the source of the pipeline is read or shuffled in another order on each rank, or a Sequence "
            "with rows() shuffles by a seed of its own.\nWhat to do: use the same seed on every rank "
            "(npu.open(seed=1)), and interleave(…, deterministic=True)."
        )


def warn_if_all_the_same(world: World, digest: int) -> None:
    """Warn when ranks that should each read their own part read the same first batch."""
    digests = world.objects(digest, "first batch of divided data")
    ranks = [rank for rank, value in enumerate(digests) if digests.count(value) > 1]
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
        graph = tf.raw_ops.DatasetToGraphV2(input_dataset=tf.data.experimental.to_variant(source)).numpy()
    except tf.errors.OpError:
        return None
    if b"ShardDataset" in graph or b"PyFunc" in graph:
        return None
    return _checksum_of(_without_seeds(tf.compat.v1.GraphDef.FromString(graph)))


def _without_seeds(graph: Any) -> Any:
    """Return a dataset's graph without parts that only set its elements' order or say when and where it was built."""
    for nodes in [graph.node, *(function.node_def for function in graph.library.function)]:
        seeded = [node for node in nodes if "Shuffle" in node.op or "Random" in node.op]
        inputs = {name.split(":")[0] for node in seeded for name in node.input}
        # Random generators and counters that a map uses, such as those of Keras 3's layers, with their values now.
        set_here = [node for node in nodes if node.op == "AssignVariableOp"]
        states = {name for node in set_here if tf.as_dtype(node.attr["dtype"].type).is_integer for name in node.input}
        for node in nodes:
            is_scalar = not node.attr["value"].tensor.tensor_shape.dim
            if node.op == "Const" and (node.name in states or (node.name in inputs and is_scalar)):
                node.attr["value"].Clear()
            node.device = ""
            for name in ("metadata", "config", "config_proto"):
                node.attr.pop(name, None)
            node.name, node.input[:] = _TABLE.sub("", node.name), [_TABLE.sub("", name) for name in node.input]
            for value in node.attr.values():
                for function in [value.func] if value.HasField("func") else value.list.func:
                    function.name = _unnumbered(function.name)
        for node in seeded:
            for name in ("seed", "seed2"):
                if name in node.attr:
                    node.attr[name].i = 0
    for function in graph.library.function:
        function.signature.name = _unnumbered(function.signature.name)
    return graph


def _unnumbered(name: str) -> str:
    """Return a function's name without the number that it got because of the functions that were traced before it."""
    return name.rstrip("0123456789")


def _checksum_of(graph: Any) -> int:
    """Return the checksum of a graph, whatever the order of its functions."""
    functions = sorted(function.SerializeToString(deterministic=True) for function in graph.library.function)
    graph.library.Clear()
    return zlib.crc32(b"".join([graph.SerializeToString(deterministic=True), *functions]))
