"""What every rank knows of the hosts of the job: which ranks share memory, their devices, the engine between hosts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import tensorflow as tf

from npu_device._src.collectives.gpu_choice import Device

# TensorFlow 2.20 refuses bfloat16 ("Collective all-reduce does not support datatype DT_BFLOAT16 on DEVICE_GPU").
NCCL_DTYPES = (tf.float16, tf.float32, tf.float64)


@dataclass(frozen=True)
class JobHosts:
    """What the ranks know of each other, the same on every rank."""

    # For each rank, the lowest rank with which it shares memory, or itself.
    leaders: tuple[int, ...]
    devices: tuple[Device, ...]  # one for each rank
    late: tuple[int, ...]  # ranks on which TensorFlow has already made its devices
    # Why each rank can't share memory with the lowest rank of its host; "" if it can.
    problems: tuple[str, ...]
    engine: str = ""  # the one between hosts (``engine_choice``)
    no_nccl: str = ""  # why floating-point tensors don't go from GPU to GPU; "" if they do

    @property
    def needs_server(self) -> bool:
        return self.engine == "nccl" or (self.engine == "tensorflow" and not self.share_memory)

    @property
    def share_memory(self) -> bool:
        return self.number_of(range(len(self.leaders))) == 1

    def number_of(self, ranks: Iterable[int]) -> int:
        """Return how many hosts ranks are on, as far as ranks of a host share memory."""
        return len(set(map(self.leaders.__getitem__, ranks)))

    def uses_nccl(self, dtype: tf.DType) -> bool:
        """Return whether tensors of a dtype go from GPU to GPU; the same on every rank. All others go through the
        hosts' memories, wherever they are.
        """
        return self.engine == "nccl" and dtype in NCCL_DTYPES
