"""The command line: measures, prints the tables, and writes ``results.json``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import docs_page, gpu, results
from benchmarks.cases import CASES
from benchmarks.measuring import progress, run_case
from benchmarks.table import tables


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="npu_device against what else there is (TensorFlow, torch, MPI), in turn, on this machine.",
    )
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks, from 2 (default: 2 4)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="what to measure (default: all)")
    parser.add_argument("--repeats", type=int, help="how often each rival is timed (default: 5; 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="two sizes, one step a repetition: to see that it works")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"), help="default: build/benchmarks")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/benchmarks.md")
    parser.add_argument(
        "--gpu", action="store_true", help="measure training steps on GPUs instead; --ranks: one number"
    )
    parser.add_argument("--on-cpu", action="store_true", help="with --gpu: run its sides on CPUs, to check them")
    options = parser.parse_args(arguments)
    repeats = options.repeats if options.repeats is not None else 1 if options.quick else 5
    numbers = options.ranks or [2, 4]
    if min(numbers) < 2 or repeats < 1:
        parser.error("--ranks have to be 2 or more, and --repeats 1 or more")
    if importlib.util.find_spec("tf_keras") is None:
        sys.exit('tf-keras is not installed. What to do: pip install -e ".[benchmarks]" in the clone.')
    if options.gpu:
        gpu.measure(options.ranks and options.ranks[0], repeats, options.quick, options.on_cpu, options.output)
        return

    run = results.begin(repeats)
    for name in options.cases:
        for ranks in numbers:
            case = CASES[name](options.quick, ranks)
            if ranks > case.most_ranks:
                progress(f"{name}, {ranks} ranks: left out; {case.most_ranks} at most")
                continue
            run.cases.append(run_case(case, ranks, repeats, options.output / "logs"))
            run.write(options.output / "results.json")
    if not run.cases:
        sys.exit("nothing was measured: the cases don't go with so many ranks")
    print(tables(run), end="")
    if options.write_docs:
        docs_page.PAGE.write_text(docs_page.replace_results(docs_page.PAGE.read_text(), tables(run)))


if __name__ == "__main__":
    main()
