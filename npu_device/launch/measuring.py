"""What ``npurun --tune`` runs on every rank between two runs of the script: measures the collectives.

``python -m npu_device.launch.measuring FILE BYTES``; rank 0 writes the cost model to FILE.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Measure with all gradients together at BYTES."""
    from npu_device import device
    from npu_device.collectives.group import WORLD_GROUP, group_of
    from npu_device.tuning.measure import measure

    file, largest = Path(sys.argv[1]), int(sys.argv[2])
    device.open()
    runtime = device.cluster_runtime()
    if runtime is None:
        sys.exit("there is nothing to measure with a single rank")
    cost = measure(runtime, group_of(runtime, WORLD_GROUP), largest)
    if runtime.cluster.rank == 0:
        file.write_text(json.dumps(cost.as_dict(), indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
