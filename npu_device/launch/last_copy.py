"""The last act of npurun: copies in memory that are newer than the checkpoints on the disk are written there, by one
process on each node, which are the ranks of a last attempt.
"""

from __future__ import annotations

import dataclasses
import sys

from npu_device._src.machine.core_sets import NONE
from npu_device._src.wording import amount
from npu_device.launch.attempt import Attempt
from npu_device.launch.preparation import START_ERRORS, Launch, prepare_rendezvous
from npu_device.launch.reports import WRITING

_COMMAND = (
    "env",
    # Files are written: ranks that have ended may still hold GPUs, and their engine may be one of mpiexec's.
    *("CUDA_VISIBLE_DEVICES=", "TF_CPP_MIN_LOG_LEVEL=3", "NPU_DEVICE_BACKEND=tcp"),
    *(sys.executable, "-m", "npu_device._src.training.checkpoint.copies_to_disk"),
)


def is_needed(launch: Launch) -> bool:
    """Return whether there are copies to write, of which one line tells."""
    newest = {}
    if launch.copy_memory is not None:
        newest = launch.copy_memory.newer_than_disk()
    for path, (step, size) in newest.items():
        launch.console.say(
            f"writing the copy of step {step} in memory, {amount(size)} on this host, to {path}; "
            "Ctrl-C now ends npurun without it"
        )
    return bool(newest)


def launch_of_writers(launch: Launch) -> Launch:
    """Return the launch of the processes that write."""
    # The npurun that was started by hand waits for it.
    launch.reporter.tell(WRITING)
    options = dataclasses.replace(
        launch.options,
        command=_COMMAND,
        nproc_per_node=1,
        # Whoever interrupts the writing has seen that npurun then ends without the copy.
        grace=0.0,
        bind_to=NONE,
        log_dir=None,
        trace=None,
    )
    return dataclasses.replace(launch, options=options)


def write_alone(launch: Launch, count: int) -> None:
    """Let this node write what it has, without a leader; ``count`` is the number of its next attempt."""
    try:
        if not is_needed(launch):
            return
        options = dataclasses.replace(
            launch.options, nnodes=1, node_rank=0, master_addr="127.0.0.1", master_port=None
        )
        writers = launch_of_writers(dataclasses.replace(launch, options=options))
        with prepare_rendezvous(writers.options, count) as rendezvous:
            Attempt(writers, rendezvous).run()
    except START_ERRORS as error:
        launch.console.say(f"the copy in memory could not be written: {error}")
