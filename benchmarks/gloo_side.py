"""The steps of torch's Gloo: ``torch.distributed`` on CPU tensors."""

from __future__ import annotations

import os
from typing import Callable

import torch
import torch.distributed

from benchmarks.payload import payload, require_sum


class GlooSide:
    """One rank of a process group; the environment (``MASTER_ADDR``, ``MASTER_PORT``) names the meeting point."""

    def __init__(self, rank: int, ranks: int) -> None:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
        torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
        self._rank = rank
        self._ranks = ranks

    def all_reduce(self, size: int) -> Callable[[], None]:
        """Return a step that sums ``size`` bytes over the ranks, in place as torch does."""
        tensor = torch.from_numpy(payload(size, self._rank))
        torch.distributed.all_reduce(tensor)
        require_sum(tensor.numpy(), self._ranks)
        tensor.zero_()  # in place, sums of sums would overflow

        def step() -> None:
            torch.distributed.all_reduce(tensor)

        return step
