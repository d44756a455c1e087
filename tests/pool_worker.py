"""One rank of a pool (``pool.py``): opens the device, then calls what it is told to until the connection ends."""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Client
from typing import Any

import allowed_warnings
import leaks
import tensorflow as tf
from answers import Answer

import npu_device as npu
from npu_device._src.collectives.engines.host import small_programs as programs
from npu_device.distribute import hccl_ops


def _call(module: str, name: str, arguments: tuple[Any, ...]) -> Answer:
    body = getattr(importlib.import_module(module), name)
    before = leaks.held()
    with allowed_warnings.collected() as warnings:
        try:
            succeeded, value = True, body(*arguments)
        except Exception:
            succeeded, value = False, traceback.format_exc()
    return Answer(succeeded, value, warnings, leaks.held().beyond(before))


def _warm_up(rank: int, size: int) -> None:
    """Make what a rank makes once, when it first needs it: connections, shared memory, the background thread. A body
    that made it would seem to leave it, and run again.
    """
    values = [tf.ones([4]), tf.ones([300_000])]
    in_graph = tf.function(npu.distribute.all_reduce)
    in_graph(values)
    for is_late in (rank == 0, rank != 0):
        npu.distribute.all_reduce(values)
        time.sleep(0.1 if is_late else 0)  # the others wait in the background
        in_graph(values)
    for sender, receiver in itertools.permutations(range(size), 2):
        if rank == sender:
            hccl_ops.send(values[0], 0, receiver)
        elif rank == receiver:
            hccl_ops.receive([4], tf.float32, 0, sender)


def main() -> None:
    faulthandler.register(signal.SIGUSR1)  # a pool asks where a rank is that doesn't answer
    with Client(sys.argv[1], family="AF_UNIX") as connection:
        device = npu.open().as_default()
        backend = os.environ.get("NPU_DEVICE_BACKEND")
        if os.environ.get("NPU_DEVICE_SHARED_MEMORY") == "off" and (backend != "tensorflow" or device.workers_num == 2):
            programs.MOST_ROOM_BYTES = 0  # the backend moves all data, however small; elsewhere messages carry some
        _warm_up(device.worker_id, device.workers_num)
        connection.send(device.worker_id)
        while True:
            try:
                module, name, arguments = connection.recv()
            except (EOFError, OSError):
                npu.close()
                os._exit(0)  # for Python to take all graphs apart would be seconds; jobs test how a rank ends
            connection.send(_call(module, name, arguments))


if __name__ == "__main__":
    main()
