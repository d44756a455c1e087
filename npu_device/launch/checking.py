"""One rank of a check, for ``npurun check`` and other launchers. With the path of a FILE, the lowest rank of each host
leaves its outcome there instead of printing it.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    """Check; without FILE, exit with 1 if training would not work."""
    from npu_device._src.check.rank import check

    outcome = check()
    if len(sys.argv) > 1:
        if outcome["leads"]:
            Path(sys.argv[1]).write_text(json.dumps(outcome), encoding="utf-8")
        return
    print(outcome["report"], end="\n" if outcome["report"] else "", flush=True)
    sys.exit(0 if outcome["works"] else 1)


if __name__ == "__main__":
    main()
