"""The command line: measures, prints the tables, and writes ``results.json``."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import docs_page, gpu, results, start
from benchmarks.cases import CASES, FULL, SHORT, START
from benchmarks.measuring import Patience, progress, run_case
from benchmarks.table import tables
from npu_device._src.testing import hosts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="npu_device against what else there is (TensorFlow, torch, MPI), in turn, on this machine.",
    )
    names = list(dict.fromkeys(name for name, _ in FULL))
    parser.add_argument("--ranks", type=int, nargs="+", help="only cases of these numbers of ranks")
    parser.add_argument(
        "--cases", nargs="+", choices=names, default=names, help="what to measure (default: all)"
    )
    parser.add_argument(
        "--short", action="store_true", help="two ranks and two hosts, and 3 repetitions"
    )
    parser.add_argument(
        "--minutes", type=float, default=90, help="after which no further case starts (default: 90)"
    )
    parser.add_argument(
        "--wait-minutes",
        type=float,
        default=60,
        help="after which cases are no longer repeated until cores have been seen with and without a shared cache "
        "(default: 60)",
    )
    parser.add_argument(
        "--repeats", type=int, help="how often each rival is timed (default: 5, with --short 3)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one step a repetition: to see that it works"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("build/benchmarks"), help="default: build/benchmarks"
    )
    parser.add_argument(
        "--write-docs", action="store_true", help="put the figures into README and docs/"
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="measure training steps on GPUs instead; --ranks: one number",
    )
    parser.add_argument(
        "--on-cpu", action="store_true", help="with --gpu: run its sides on CPUs, to check them"
    )
    options = parser.parse_args(arguments)
    repeats = (
        options.repeats
        if options.repeats is not None
        else 1
        if options.quick
        else 3
        if options.short
        else 5
    )
    if min(options.ranks or [1]) < 1 or repeats < 1:
        parser.error("--ranks and --repeats have to be 1 or more")
    if importlib.util.find_spec("tf_keras") is None:
        sys.exit(
            'tf-keras is not installed. What to do: pip install -e ".[benchmarks]" in the clone.'
        )
    if options.gpu:
        gpu.measure(
            options.ranks and options.ranks[0],
            repeats,
            options.quick,
            options.on_cpu,
            options.output,
        )
        return

    plan = [
        (name, ranks)
        for name, ranks in (SHORT if options.short else FULL)
        if name in options.cases and ranks in (options.ranks or [ranks])
    ]
    if not plan:
        sys.exit("nothing was measured: the cases don't go with so many ranks")
    run, began = results.begin(), time.monotonic()
    waits_until = began + 60 * (0 if options.quick else options.wait_minutes)
    for name, ranks in plan:
        if time.monotonic() - began > 60 * options.minutes:
            progress(f"{name}, {ranks} ranks: left out after {options.minutes:g} minutes")
            continue
        if name == START:
            progress(f"{START}, {ranks} ranks")
            run.cases.append(start.measure(ranks, repeats, options.output))
        else:
            case = CASES[name](options.quick, ranks)
            on_hosts = any(each.gbit is not None for each in case.rounds) and hosts.can_be_made()
            with hosts.hosts(ranks, 0) if on_hosts else contextlib.nullcontext():
                patience = Patience(repeats, waits_until)
                run.cases += run_case(case, ranks, patience, options.output / "logs")
        run.write(options.output / results.FILE)
        if options.write_docs:
            docs_page.write(run)
    print(tables(run), end="")


if __name__ == "__main__":
    main()
