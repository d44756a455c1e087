"""This rank's resources of its host, before TensorFlow makes its devices: its share of the cores, and its GPU.

The decisions on GPUs are in ``gpu_choice``, which the launcher needs without TensorFlow.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import Counter
from fractions import Fraction

import tensorflow as tf

from npu_device._src import compat, environment
from npu_device._src.cluster.description import Cluster
from npu_device._src.cluster.rank_errors import ClusterError
from npu_device._src.cluster.time_limits import LATEST_ANSWER_SECONDS
from npu_device._src.collectives import gpu_choice
from npu_device._src.collectives.engine_text import say
from npu_device._src.collectives.gpu_choice import Device
from npu_device._src.collectives.hosts_of_job import JobHosts
from npu_device._src.collectives.job import Job
from npu_device._src.machine.topology import read_quota

_log = logging.getLogger("npu_device")

# A single thread runs first what became ready last: in a backward pass it computes all gradients only at the end, and
# nothing can be sent meanwhile. A second one takes what became ready first. It is also needed if one is busy in the
# input pipeline while the other runs the step.
LEAST_INTER_OP_THREADS = 2


def count_cores(running: Job) -> None:
    """Set ``running.cores`` and ``running.has_own_core``. The launcher may have bound each rank to cores of its own, as
    npurun, Open MPI and Slurm do, so the ranks of the host compare theirs; and the quotas of their control groups.
    """
    cluster = running.cluster
    own_cores = sorted(os.sched_getaffinity(0))
    quota = read_quota()
    own_answer = [own_cores, quota and quota.group]
    key = f"cores/{cluster.neighbours[0]}"
    answers = running.control.gather_from(
        key, own_answer, cluster.neighbours, LATEST_ANSWER_SECONDS
    )
    users = Counter(core for cores, _ in answers.values() for core in cores)
    # Fractions add up to whole cores exactly.
    share = sum((Fraction(1, users[core]) for core in own_cores), Fraction())
    if quota is not None:
        sharing = [group for _, group in answers.values()].count(quota.group)
        share = min(share, Fraction(quota.cpus) / sharing)
    running.has_own_core = share >= 1
    # npurun counts a core with two threads once.
    running.cores = environment.NPU_DEVICE_CORES.get() or max(1, int(share))


def divide_cores(running: Job) -> None:
    """Give each rank of a host its share of the cores, unless the user has set the number of threads: TensorFlow starts
    a thread pool as wide as the machine in every process.
    """
    if environment.TF_NUM_INTRAOP_THREADS.is_set() or environment.TF_NUM_INTEROP_THREADS.is_set():
        return
    if compat.context_is_initialized():
        _log.info(
            "rank %d: TensorFlow was used before npu.open(), and its threads are not divided among the ranks of the "
            "host; training is faster with npu.open() right after the imports",
            running.cluster.rank,
        )
        return
    # A script that has set its threads keeps them.
    threading = tf.config.threading
    share = running.cores
    if share < len(os.sched_getaffinity(0)) and threading.get_intra_op_parallelism_threads() == 0:
        threading.set_intra_op_parallelism_threads(share)
    if threading.get_inter_op_parallelism_threads() == 0:
        threads = max(LEAST_INTER_OP_THREADS, share)
        threading.set_inter_op_parallelism_threads(threads)
        # Spinning threads would take the core from each other (docs/notes.md).
        if threads > share:
            compat.let_idle_threads_sleep()


# GPUs


def choose_device(cluster: Cluster) -> Device:
    """Let this rank see only its own GPU, and return its device. No memory is taken on any GPU."""
    cuda = environment.CUDA_VISIBLE_DEVICES.text()
    nvidia = environment.NVIDIA_VISIBLE_DEVICES.text()
    instance = gpu_choice.own_instance(cuda, nvidia, cluster.device_id)
    late = compat.context_is_initialized()
    if instance is not None and not late:
        cuda = instance
        environment.CUDA_VISIBLE_DEVICES.set(instance)
    # TensorFlow asks CUDA for its devices only now, with the variable that was set above.
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return Device("CPU", gpu_choice.why_none(cuda, nvidia))
    # Ranks take turns if there are fewer GPUs than devices.
    gpu = gpus[cluster.device_id % len(gpus)]
    if late and (len(gpus) > 1 or instance is not None):
        names = ", ".join(gpu.name for gpu in gpus)
        raise ClusterError(
            f"{cluster.name} can't take its own GPU: TensorFlow has been used before "
            f"npu.open(), and has taken memory on {names}.\n"
            "What to do: call `npu.open()` right after the imports, before the first tensor, variable, "
            "model, dataset or tf.config.list_logical_devices() of the script; or let CUDA_VISIBLE_DEVICES of each "
            "rank name its own GPU."
        )
    if len(gpus) > 1:
        tf.config.set_visible_devices([gpu], "GPU")
    index = int(gpu.name.rsplit(":", 1)[1])
    name = gpu_choice.name_of(cuda, index)
    # AMD's GPUs have a different driver, and are known by their number.
    model, unit, chip = identity(index) or ("", name, name)
    return Device(name, model, unit, chip, compat.has_nccl())


def prepare_gpu(job: Job, hosts: JobHosts) -> None:
    """Let ranks that share a GPU share its memory, and let rank 0 say which rank has which device."""
    cluster = job.cluster
    shared = gpu_choice.sharing(hosts.devices, cluster.hosts)
    if any(cluster.rank in ranks for ranks in shared):
        _let_memory_grow(cluster.rank)
    if cluster.rank:
        return
    say(gpu_choice.statement(hosts.devices, cluster.hosts, hosts.no_nccl))
    if shared:
        _log.warning(
            "%s share one GPU, which is for tests: they wait for each other and can't use NCCL.\n"
            "What to do: start one rank per GPU. With MIG, let CUDA_VISIBLE_DEVICES list the instances by their names "
            "(MIG-…, from nvidia-smi -L).",
            "; ".join(f"ranks {', '.join(map(str, ranks))}" for ranks in shared),
        )


def _let_memory_grow(rank: int) -> None:
    # Each rank sees one GPU by now.
    [gpu] = tf.config.get_visible_devices("GPU")
    is_limited = tf.config.get_logical_device_configuration(gpu)
    if environment.TF_FORCE_GPU_ALLOW_GROWTH.is_set() or is_limited:
        # The user's own setting stays.
        return
    try:
        tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError:
        _log.warning(
            "rank %d shares its GPU, but TensorFlow was used before npu.open() and has taken nearly all of the GPU's "
            "memory; the other ranks may find none.\n"
            "What to do: call npu.open() right after the imports.",
            rank,
        )


# NVIDIA's driver: which GPU is behind one of CUDA's numbers. This makes no CUDA context and takes no GPU memory.

_NAME_BYTES = 256
_BUS_BYTES = 32
_UUID_BYTES = 16


def identity(index: int) -> tuple[str, str, str] | None:
    """Return model, UUID (of the GPU or MIG instance, in hexadecimal) and PCI bus id of a GPU, by the number that CUDA
    gives it; None without a driver.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        # Without NVIDIA's driver, nothing identifies the GPU.
        return None
    # Unlike cuDeviceGetUuid, its second version (CUDA 11.4) tells the MIG instances of a GPU apart.
    # A driver before CUDA 11.4 has only the first version.
    get_uuid = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)
    device = ctypes.c_int()
    model = ctypes.create_string_buffer(_NAME_BYTES)
    bus = ctypes.create_string_buffer(_BUS_BYTES)
    uuid = (ctypes.c_ubyte * _UUID_BYTES)()
    # The functions of the driver return an error code, 0 for success.
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), index)
        or driver.cuDeviceGetName(model, _NAME_BYTES, device)
        or get_uuid(uuid, device)
        or driver.cuDeviceGetPCIBusId(bus, _BUS_BYTES, device)
    )
    if failed:
        return None
    return model.value.decode(), bytes(uuid).hex(), bus.value.decode()
