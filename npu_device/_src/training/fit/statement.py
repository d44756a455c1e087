"""Rank 0's message when a replicated model begins to train: the job, the batch, and the settings left as they are."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.cluster.frames import counted
from npu_device._src.collectives.operation import explained, open_ports
from npu_device._src.training import training_state, xla
from npu_device._src.training.world import World

_SHOWN = 3


def report(world: World, model: Any, rows: int | None, steps: int | None, checked: str) -> None:
    """Write one block to stderr, on rank 0, unless ``NPU_DEVICE_STATEMENT`` is ``off``.

    ``rows`` are the samples in the first batch over all ranks, None if each rank reads its own; ``steps`` are those of
    an epoch, None if not known yet; ``checked`` is what the first-step check has found.
    """
    if world.is_main and environment.NPU_DEVICE_STATEMENT.get() == "on":
        print("\n".join(lines(world, model, rows, steps, checked)), file=sys.stderr, flush=True)


def lines(world: World, model: Any, rows: int | None, steps: int | None, checked: str) -> list[str]:
    hosts = Counter(world.job.cluster.hosts)
    where = ", ".join(f"{count} on {host}" for host, count in hosts.items())
    if rows is None:
        batch = "each rank reads its own samples"
    else:
        least, most = rows // world.size, -(-rows // world.size)
        batch = f"{rows} samples, {most if least == most else f'{least} or {most}'} per rank"
    rates = ", ".join(_rate(optimizer) for optimizer in training_state.optimizers(model)) or "none"
    number = tf.config.threading.get_intra_op_parallelism_threads()
    threads = counted(number, "thread") if number else "TensorFlow's default number of threads"
    backend, ports = explained(world.job, world.group), open_ports(world.job)
    return [
        f"npu_device: {type(model).__name__} {model.name!r} trains on {world.size} ranks ({where})",
        f"  global batch   {batch}; {'unknown' if steps is None else steps} steps per epoch",
        f"  learning rate  {rates}, as given, not scaled by the number of ranks",
        f"  backend        {backend}; {threads} per rank",
        *(["  XLA            compiles the model's forward and backward pass"] if xla.compiles_call(model) else []),
        *_normalisation(model),
        *([f"  open ports     {ports}"] if ports else []),
        f"  first step     {checked}",
        "  files          callbacks write on rank 0; the others wait after each epoch",
        "  (NPU_DEVICE_STATEMENT=off leaves this out)",
    ]


def _rate(optimizer: Any) -> str:
    rate = compat.learning_rate_of(getattr(optimizer, "inner_optimizer", optimizer))
    text = type(rate).__name__ if _is_schedule(rate) else f"{float(tf.convert_to_tensor(rate)):g}"
    return f"{text} ({type(optimizer).__name__})"


def _is_schedule(rate: Any) -> bool:
    return hasattr(rate, "get_config") and not hasattr(rate, "assign")


def _normalisation(model: Any) -> list[str]:
    """Return a line about layers that normalise the share of each rank by itself; none without such layers."""
    kind = compat.keras_of(model).layers.BatchNormalization
    layers = [layer for layer in compat.all_layers(model) if isinstance(layer, kind) and layer.trainable]
    names = [layer.name for layer in layers if not getattr(layer, "synchronized", False)]
    if not names:
        return []
    shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    return [
        f"  batch norm     {counted(len(names), 'layer')} ({shown}): by each rank's share, unlike one process; with "
        "synchronized=True by all samples"
    ]
