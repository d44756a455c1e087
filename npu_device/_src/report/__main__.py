"""``npurun trace``: the report about a trace, while the job runs or after it; or a comparison of several."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from npu_device._src.report.report_files import PAGE, PERFETTO, report_folder, write_all
from npu_device._src.report.summary import compared, summary


def main(arguments: Sequence[str] | None = None) -> None:
    """Run with these arguments; by default, as ``npu-trace``, with those of the process."""
    name = "npurun trace"
    if arguments is None:
        name = "npu-trace"
        print("npu-trace is now npurun trace, and will go in 0.3.0", file=sys.stderr)
    parser = argparse.ArgumentParser(
        prog=name,
        description="Report what an iteration trace shows: where the step time goes, and what to do about it. Several "
        "traces are compared: steps with different gradient splits, say.",
        epilog=f"DIR is that of npurun --trace; {PERFETTO} (for ui.perfetto.dev) and {PAGE} are written into it.",
        allow_abbrev=False,
    )
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    analyses = {}
    for directory in parser.parse_args(arguments).directories:
        try:
            analyses[str(directory)] = write_all(directory)
        except (OSError, ValueError) as error:
            sys.exit(f"{name}: {directory}: {error}")
    if len(analyses) > 1:
        print(compared(analyses))
    else:
        [analysis] = analyses.values()
        folder = report_folder(directory)
        print(f"{summary(analysis)}\n\npage: {folder / PAGE}\nPerfetto: {folder / PERFETTO}")


if __name__ == "__main__":
    main()
