"""The console script ``npu-trace``: the report about a trace, while the job runs or after it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from npu_device._src.report.output import PAGE, PERFETTO, TABLE, write_all


def main(arguments: Sequence[str] | None = None) -> None:
    """Run with these arguments; by default those of the process."""
    parser = argparse.ArgumentParser(
        prog="npu-trace",
        description="Report what an iteration trace shows: where the step time goes, and what to do about it.",
        epilog=f"DIR is the directory of npurun --trace; {TABLE}, {PERFETTO} (for ui.perfetto.dev) and {PAGE} are "
        "written into it.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    directory = parser.parse_args(arguments).directory
    try:
        print(write_all(directory))
    except (OSError, ValueError) as error:
        sys.exit(f"npu-trace: {directory}: {error}")
    print(f"\npage: {directory / PAGE}\nPerfetto: {directory / PERFETTO}\ntable: {directory / TABLE}")


if __name__ == "__main__":
    main()
