"""What this rank may use of its host: its share of the cores, and its own GPU. Applied before TensorFlow makes its
devices.
"""

from __future__ import annotations

import os

import tensorflow as tf

from npu_device import environment
from npu_device.cluster.description import Cluster
from npu_device.cluster.errors import ClusterError

LEAST_INTER_OP_THREADS = 2
"""A single thread runs first what became ready last: of a backward pass it leaves every other gradient to the end, and
nothing can travel meanwhile. A second one takes what became ready first. It is needed as well where one sits in the
input pipeline while the other runs the step.
"""


def share_of_cores(cluster: Cluster) -> int:
    """This rank's part of the cores that its host's ranks may use; one at least."""
    return max(1, len(os.sched_getaffinity(0)) // cluster.local_size)


def divide_cores(cluster: Cluster) -> None:
    """Give each rank of a host its share of the cores, unless the user has set the number of threads.

    TensorFlow starts a thread pool as wide as the machine in every process; several of them on a host fight for the
    cores.
    """
    if environment.user_sets_threads():
        return
    threading = tf.config.threading
    share = share_of_cores(cluster)
    if cluster.local_size > 1 and threading.get_intra_op_parallelism_threads() == 0:
        threading.set_intra_op_parallelism_threads(share)
    if threading.get_inter_op_parallelism_threads() == 0:
        threading.set_inter_op_parallelism_threads(max(LEAST_INTER_OP_THREADS, share))


def choose_gpu(cluster: Cluster) -> None:
    """Let this rank see one GPU only: the one of its device id. No GPU on the host: nothing to do.

    Raises:
        ClusterError: the host has fewer GPUs than the ranks on it need.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if len(gpus) <= 1:  # none, or CUDA_VISIBLE_DEVICES has chosen already
        return
    if cluster.device_id >= len(gpus):
        raise ClusterError(
            f"rank {cluster.rank} on host {cluster.host} is to use GPU {cluster.device_id}, but {len(gpus)} GPUs are "
            "visible "
            f"({', '.join(gpu.name for gpu in gpus)}).\n"
            "What to do: start at most one rank a GPU, or set ASCEND_DEVICE_ID of each rank to a visible GPU."
        )
    tf.config.set_visible_devices([gpus[cluster.device_id]], "GPU")
