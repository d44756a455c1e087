"""The way into the launcher: the console script ``npurun`` and ``python -m npu_device.launch``."""

from __future__ import annotations

import sys

from npu_device.launch import arguments, job


def main() -> None:
    """Run the launcher with the command line of this process, and exit with the job's exit code."""
    sys.exit(job.run(arguments.parse(sys.argv[1:])))


if __name__ == "__main__":
    main()
