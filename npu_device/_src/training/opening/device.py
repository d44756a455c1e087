"""Opening and closing: ``npu.open()`` joins the job that the environment describes, and returns this rank's handle.

Without distributed environment variables nothing is started. The calls of ``npu.distribute`` get the job from here; if
the script forgot ``npu.open()``, they open it themselves as long as that is still possible, and raise otherwise: a rank
that trains alone while it believes it is one of four is worse than any error.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import operator
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.cluster import rendezvous
from npu_device._src.cluster.description import Cluster, Membership, ParentRank
from npu_device._src.cluster.rank_errors import ChildOfRankError, ClusterError
from npu_device._src.collectives import engine_text, job as jobs, resources, tensorflow_server
from npu_device._src.collectives.engine_choice import choose_engine
from npu_device._src.collectives.engines.host.host_detection import detect_hosts
from npu_device._src.collectives.job import Job
from npu_device._src.collectives.stall import StallWatch
from npu_device._src.membership import parent_rank, schemes
from npu_device._src.options import global_options
from npu_device._src.report.report_files import write_report
from npu_device._src.trace import trace
from npu_device._src.trace.records import Settings, settings
from npu_device._src.training.watching.last_word import LastWord
from npu_device._src.training.watching.optimizer_hook import OptimizerHook
from npu_device._src.training.watching.session_ends import SessionEnds

_TO_BE_A_RANK = (
    "To make it a rank of another job, start it with npurun, or with that job's variables and NPU_DEVICE_RANK_PROCESS "
    "unset."
)
_LARGEST_SEED = (1 << 32) - 1  # the largest seed that numpy takes
_log = logging.getLogger("npu_device")


class NpuDeviceHandle:
    """The handle that ``npu.open`` returns: the device of this process, and its place among the workers.

    Attributes:
        workers_num: number of ranks in the job; 1 on a single device.
        worker_id: the rank of this process, from 0.
        device_id: of the constructor, the number of the device.
    """

    def __init__(self, device_id: int, workers_num: int, worker_id: int) -> None:
        self._device_id = device_id
        self.workers_num = workers_num
        self.worker_id = worker_id

    def name(self) -> str:
        """Return the name of the device in Ascend's spelling: ``/job:localhost/replica:0/task:0/device:NPU:<id>``."""
        return f"/job:localhost/replica:0/task:0/device:NPU:{self._device_id}"

    def scope(self) -> Any:
        """Return a context manager that places operations on the device of this rank: its GPU if any, else its CPU."""
        device_type = "CPU"
        if tf.config.get_visible_devices("GPU"):
            device_type = "GPU"
        job = jobs.current()
        if job is None:
            return tf.device(f"/device:{device_type}:0")
        return tf.device(job.device(device_type))

    def is_cluster_worker(self) -> bool:
        """Return True when this process is one of several workers."""
        return self.workers_num > 1 and 0 <= self.worker_id < self.workers_num

    def as_default(self) -> NpuDeviceHandle:
        """Make this the default device of the process: a process has one device, so opening it has already done so.

        Returns:
            This handle.
        """
        return self


_handle: NpuDeviceHandle | None = None
_tf_config: str | None = None  # ``TF_CONFIG`` when the device was opened
_seed: int | None = None  # the ``seed`` that was passed to ``open``


def open(device_id: int | None = None, seed: int | None = None) -> NpuDeviceHandle:
    """Open the device of this process, and join the other workers when the environment names some.

    Args:
        device_id: number of the device on this host; default ``ASCEND_DEVICE_ID``, else ``DEVICE_ID``, else the local
            rank, else 0.
        seed: sets the random states of Python, numpy, TensorFlow and Keras, as ``keras.utils.set_random_seed`` does, on
            a single device, too. The same on every rank; default: they stay as they are. Passing it again changes
            nothing.

    Returns:
        The handle; the same one when the same device is opened again.

    Raises:
        ValueError: a malformed environment variable, or both ``RANK_SIZE`` and ``CM_WORKER_SIZE``; a seed that isn't an
            integer from 0 to 4294967295, or isn't the same on all ranks.
        RuntimeError: another device or seed is open in this process, or ``TF_CONFIG`` has changed; the environment is
            contradictory or incomplete; the ranks did not find each other; TensorFlow was used before. The text begins
            with "Failed open npu device" when the ranks could not be joined.

    Every rank waits here until all have arrived, at most ``HCCL_CONNECT_TIMEOUT`` seconds. A process that a rank has
    started, such as a worker of ``multiprocessing``, is no rank: nothing is opened there, and the handle gives the
    rank of the parent.

    Source: Ascend TF Adapter 2.x, ``npu.open``.
    """
    global _handle, _tf_config
    parent = parent_of_this_process()
    if parent is not None:
        _warn_in_child(os.getpid(), str(parent))
        device = parent.device_id
        if device_id is not None:
            device = device_id
        # A fork goes on with the handle of its parent.
        _handle = _handle or NpuDeviceHandle(device, parent.world_size, parent.rank)
        return _handle
    if seed is not None:
        seed = _checked(seed)
    if _handle is not None:
        _require_same_device(_handle, device_id)
        _require_same_job(_handle, device_id)
        _set_seed(seed)
        # Opening twice is allowed, as long as it means the same.
        return _handle
    _set_log_level()
    membership = schemes.membership_from_environment(device_id)
    if membership is None:
        _check_variables_alone()
        candidates = [device_id, environment.ASCEND_DEVICE_ID.get(), environment.DEVICE_ID.get(), 0]
        chosen_id = next(int(candidate) for candidate in candidates if candidate is not None)
        _handle = NpuDeviceHandle(chosen_id, 1, 0)
    else:
        try:
            cluster = _join(membership, seed)
        except ChildOfRankError as child:
            # The child was started before its parent's open, or without its parent's mark.
            parent_rank.mark(child.parent)
            return open(device_id)
        _handle = NpuDeviceHandle(cluster.device_id, cluster.world_size, cluster.rank)
    _tf_config = environment.TF_CONFIG.raw()
    # The options have been read: the first one that is set from now on warns.
    global_options().freeze()
    _set_seed(seed)
    return _handle


@functools.cache
def _warn_in_child(pid: int, parent: str) -> None:
    """Warn once in each child process of a rank that nothing is opened there."""
    _log.warning(
        "npu.open() does nothing in this process (%d): it is a child of %s, and no rank.\n%s",
        *(pid, parent, _TO_BE_A_RANK),
    )


def _set_log_level() -> None:
    level = environment.NPU_DEVICE_LOG_LEVEL.get()
    if level is not None:
        _log.setLevel(level)
        # A script that has set up logging keeps its own handlers.
        # Without a handler, Python would show warnings and errors only.
        if not _log.hasHandlers():
            _log.addHandler(logging.StreamHandler())


@functools.cache
def _check_variables_alone() -> None:
    """Check the variables of this package once in a process that is no rank, which needn't call ``open``."""
    environment.check_own_variables(warns=True)


def _join(membership: Membership, seed: int | None) -> Cluster:
    """Meet the other ranks, and start the job."""
    environment.check_own_variables(warns=membership.is_chief)
    profiling = global_options().profiling_config
    trace_settings = settings(profiling.enable_profiling.typed, profiling.profiling_options.typed)
    try:
        jobs.require_unclosed()
        compat.renew_context_of_graphs()
        cluster, channel = rendezvous.meet(membership)
        # The mark changes the environment, which threads of TensorFlow may read once they have started.
        parent_rank.mark(cluster.as_parent(os.getpid()))
        job = jobs.start(cluster, channel, membership.starts_hub, membership.secret)
        _begin(job, trace_settings, seed)
    except ChildOfRankError:
        raise
    except (ClusterError, TimeoutError) as error:
        raise type(error)(f"Failed open npu device {membership.device_id}: {error}") from error
    path = environment.NPU_DEVICE_ERROR_FILE.get()
    # The launcher reads the file, to send this process what a wrapper may not pass on.
    if path is not None:
        with contextlib.suppress(OSError):
            Path(environment.opened_mark(path)).write_text(str(os.getpid()))
    return cluster


def _set_seed(seed: int | None) -> None:
    global _seed
    if seed is None or seed == _seed:
        return
    if _seed is not None:
        raise RuntimeError(
            f"npu.open(seed={seed}): this process has already called npu.open(seed={_seed}), and what it has drawn "
            "since then depends on that.\nWhat to do: pass the seed in one place only."
        )
    _seed = seed
    # Seeds can be set without making TensorFlow's context. A Keras that is imported later takes its seeds from Python's
    # random state. The import fails where TF_USE_LEGACY_KERAS is set without tf_keras.
    with contextlib.suppress(ImportError):
        tf.keras.utils.set_random_seed(seed)
    for name in ("keras", "tf_keras"):
        if name in sys.modules:
            sys.modules[name].utils.set_random_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    tf.random.set_seed(seed)


def forget_seed() -> None:
    """Let the next ``npu.open(seed=…)`` set the random states again."""
    global _seed
    _seed = None


def _checked(seed: Any) -> int:
    """Return a seed as Python's integer."""
    try:
        integer = operator.index(seed)
        # ``True`` is 1 for Python, but no seed.
        if isinstance(seed, bool):
            integer = -1
    except TypeError:
        integer = -1
    if not 0 <= integer <= _LARGEST_SEED:
        raise ValueError(
            f"npu.open(seed={seed!r}): expected an integer from 0 to {_LARGEST_SEED}.\n"
            "What to do: pass one such number, the same on every rank."
        )
    return integer


def _require_same_seed(running: Job, seed: int | None) -> None:
    """Compare the seeds that the ranks have passed; every rank of the job makes this call."""
    # A rank without a seed makes the call, too: a seed on some ranks only would be found much later.
    seeds = running.control.gather("seed", seed, environment.HCCL_CONNECT_TIMEOUT.get())
    if seeds.count(seeds[0]) < len(seeds):
        calls = {rank: f"npu.open(seed={rank_seed})" for rank, rank_seed in enumerate(seeds)}
        text = "\n".join(running.cluster.lines(calls)).replace("seed=None", "")
        raise ValueError(
            f"the ranks opened with different seeds:\n{text}\nLikely cause: the seed is computed from the rank or "
            "drawn at random.\nWhat to do: pass the same seed on every rank. Numbers that each rank should draw by "
            "itself come from a generator made of the seed and the rank: np.random.default_rng([seed, rank])."
        )


def _require_same_device(opened: NpuDeviceHandle, device_id: int | None) -> None:
    if device_id is not None and device_id != opened._device_id:
        raise RuntimeError(
            f"device {device_id} can't be opened: this process has opened {opened.name()} already, and one "
            "process has one device.\n"
            "What to do: start one process per device, for instance with npurun."
        )


def _require_same_job(opened: NpuDeviceHandle, device_id: int | None) -> None:
    """Refuse a second job in this process, which Spark may give to a process that it uses again."""
    if environment.TF_CONFIG.raw() in (None, _tf_config):
        return
    wanted = schemes.membership_from_environment(device_id)
    if wanted is not None and wanted.scheme == "TF_CONFIG":
        raise RuntimeError(
            f"TF_CONFIG has changed: it makes this process rank {wanted.rank} of {wanted.world_size}, but npu.open() "
            f"has made it rank {opened.worker_id} of {opened.workers_num} of another job, and a process can join only "
            f"one.\n{jobs.NEW_PROCESS}"
        )


def _begin(job: Job, trace_settings: Settings | None, seed: int | None) -> None:
    """Prepare the first collective together with the other ranks; a rank that fails here tells the others."""
    try:
        job.stall_watch = StallWatch(job, job.groups, job.sessions.held)
        _require_same_seed(job, seed)
        hosts = detect_hosts(job, resources.choose_device(job.cluster))
        hosts = choose_engine(job, hosts)
        job.hosts = hosts
        resources.count_cores(job)
        resources.divide_cores(job)
        resources.prepare_gpu(job, hosts)
        # The ports are opened now, so that a lack of free ones is an error of the start.
        if not hosts.share_memory:
            job.peers.open()
        if hosts.needs_server:
            tensorflow_server.start(job)
            engine_text.say_open_ports(job)
        aoe_mode = global_options().aoe_config.aoe_mode.typed or environment.AOE_MODE.get()
        if job.cluster.rank == 0 and aoe_mode == "4":
            _log.warning(
                "aoe_mode 4 has no effect: a run can't compare gradient splits. What to do: trace a run as it is, and "
                "one with NPU_DEVICE_SPLIT=25%,25%,25%,25%, and compare them with npurun trace A B"
            )
        if trace_settings is not None:
            trace.start(job, trace_settings)
            # Rank 0 writes the report on all ranks.
            job.serves_others = job.serves_others or job.cluster.rank == 0
            # Functions run at exit in reverse order: after this one, the job's own has nothing left to close.
            atexit.register(close)
        job.add(LastWord(job))
        job.add(SessionEnds(job))
        job.add(OptimizerHook(job))
    except BaseException as error:
        # Children of a process that is no rank must not take it for one.
        environment.NPU_DEVICE_RANK_PROCESS.set("")
        cause = jobs.abandon(error)
        if cause is not None:
            raise cause from error
        raise


def close() -> None:
    """Leave the job. Also runs at exit; on a single device, and in a forked child, only the handle is forgotten. See
    ``collectives.job.close``.

    A trace ends here; rank 0 writes its report when the others have left.

    Raises:
        OSError: the report of a trace can't be written.
    """
    global _handle
    _handle = None
    forget_seed()
    job = jobs.current()
    if job is not None and job.in_fork:
        return
    # The job ends the trace when it closes.
    tracer = trace.running()
    jobs.close()
    if tracer is not None and tracer.rank == 0:
        write_report(tracer.settings.output)


def handle() -> NpuDeviceHandle | None:
    """Return the open device of this process, or None (Ascend's ``global_npu_ctx``)."""
    return _handle


def running_job() -> Job | None:
    """Return the job, opened now if the script hasn't done so; None on a single device."""
    parent = parent_of_this_process()
    if parent is not None:
        raise ClusterError(
            f"this process ({os.getpid()}) is a child of {parent}, and no rank: it takes part in no collective "
            f"operation.\nWhat to do: make the call in the process of the rank, outside of workers. {_TO_BE_A_RANK}"
        )
    if (job := jobs.current()) is not None:
        # A script may import a Keras after ``npu.open()``.
        hook = job.component(OptimizerHook)
        if hook is not None:
            hook.find_keras()
        return job
    if schemes.world_size_from_environment() == 1:
        _check_variables_alone()
        return None
    _log.warning(
        "npu.distribute or hccl is used before npu.open(): opening now, since the environment names several ranks"
    )
    open()
    return jobs.current()


def unless_child() -> Job | None:
    """Return the job as ``running_job``; None also in a child of a rank, where what prepares training does nothing."""
    if parent_of_this_process():
        return None
    return running_job()


def cluster_or_parent() -> Cluster | ParentRank | None:
    """Return what knows rank and size: of a child its parent rank, else the running cluster; None on one device."""
    job = unless_child()
    if job is None:
        return parent_of_this_process()
    return job.cluster


def parent_of_this_process() -> ParentRank | None:
    """Return the rank that has started this process, or has been forked; None if this isn't a child of a rank."""
    job = jobs.current()
    if job is None:
        return parent_rank.inherited()
    if not job.in_fork:
        return None
    return job.cluster.as_parent(job.pid)
