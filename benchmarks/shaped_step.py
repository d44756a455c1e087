"""One rank of ``shaped_link``: trains a model for some steps, and rank 0 prints the median as a line of JSON.

``python -m benchmarks.shaped_step MODEL SIDE STEPS RANK RANKS``; the split comes from ``NPU_DEVICE_SPLIT``.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

_WARM_UP = 3


def main() -> None:
    model, side_name = sys.argv[1:3]
    steps, rank, ranks = map(int, sys.argv[3:])
    side: Any
    if side_name == "npu":
        from benchmarks.npu_side import NpuSide

        side = NpuSide(rank, ranks)
        step = side.training(model, True, None)
    else:
        from benchmarks.mirrored_side import MirroredSide

        side = MirroredSide(rank, ranks)
        step = side.training(model)
    seconds = []
    for _ in range(_WARM_UP + steps):
        started = time.perf_counter()
        step().numpy()
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        print(json.dumps({"seconds": statistics.median(seconds[_WARM_UP:])}), flush=True)


if __name__ == "__main__":
    main()
