"""One rank of a check. ``npurun check`` runs this on every rank; another launcher can, too.

``srun python -m npu_device.launch.checking``; with the path of a FILE, the lowest rank of each host leaves its outcome
there for npurun instead of printing it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path


def main() -> None:
    """Check; without FILE, exit with 1 if training would not work."""
    from npu_device._src.check.rank import check

    outcome = check()
    if len(sys.argv) > 1:
        if outcome.leads:
            Path(sys.argv[1]).write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        return
    if outcome.report:
        print(outcome.report, flush=True)
    sys.exit(0 if outcome.works else 1)


if __name__ == "__main__":
    main()
