"""Measure the collectives. ``npurun --tune`` runs this on every rank between two runs of the script.

``python -m npu_device.launch.measuring FILE BYTES``; rank 0 writes the cost model to FILE.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Measure with all gradients together at BYTES."""
    from npu_device._src.collectives.engines.tensorflow import freed_memory
    from npu_device._src.collectives.group import WORLD_GROUP, group_of
    from npu_device._src.training import device
    from npu_device._src.tuning.measure import measure

    file, largest = Path(sys.argv[1]), int(sys.argv[2])
    freed_memory.keep()  # as a training process does, which allocates much else
    device.open()
    job = device.running_job()
    if job is None:
        sys.exit("there is nothing to measure with a single rank")
    cost = measure(job, group_of(job, WORLD_GROUP), largest)
    if job.cluster.rank == 0:
        cost.write(file)


if __name__ == "__main__":
    main()
