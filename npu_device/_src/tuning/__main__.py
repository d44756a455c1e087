"""``npurun tune``: the best split for a trace, and a forecast for other clusters.

``npurun --tune`` runs the script and checks the splits it finds; this reads the files of such a run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from npu_device._src.trace.records import read
from npu_device._src.tuning import messages, networks
from npu_device._src.tuning.cost_model import MEASURED_FILE, CostModel, measured_in
from npu_device._src.tuning.networks import PRESETS, Network
from npu_device._src.tuning.planner import best_plan
from npu_device._src.tuning.simulate import ASSUMPTIONS, RANKS, simulate, table
from npu_device._src.tuning.traced_run import TracedRun, summarise
from npu_device._src.tuning.trials import FIRST, WARM_UP

_EXAMPLES = """\
examples:
  npurun -n 2 --tune train.py                       trace, measure, try, and keep the best split
  npurun tune npu_tune                              that run's prediction once more
  npurun tune trace --alpha 9e-4 --beta 7.4e-10     for a trace without a measurement
  npurun tune npu_tune --simulate --network 25gbe   up to 1,024 ranks over 25 GbE"""


def main(arguments: Sequence[str] | None = None, name: str | None = None) -> None:
    """Run with these arguments and this name; by default, as ``npu-tune``, with those of the process."""
    if name is None:
        name = "npu-tune"
        print("npu-tune is now npurun tune, and will go in 0.3.0", file=sys.stderr)
    parser = argparse.ArgumentParser(
        prog=name,
        description="Find the best gradient split for a trace, or simulate the traced model on many ranks.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the directory of npurun --tune or --trace")
    parser.add_argument("--simulate", action="store_true", help="step time and efficiency for many ranks")
    parser.add_argument("--network", choices=PRESETS, help="with --simulate: this network (default: as measured)")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), metavar="N", help="default 1 2 4 … 1024")
    parser.add_argument("--alpha", type=float, metavar="S", help="seconds per collective (--simulate: per message)")
    parser.add_argument("--beta", type=float, metavar="S", help="seconds per byte")
    options = parser.parse_args(arguments)
    if (options.alpha is None) != (options.beta is None):
        parser.error("--alpha and --beta go together")
    if options.network is not None and (options.alpha is not None or not options.simulate):
        parser.error("--network goes with --simulate, and without --alpha and --beta")
    if min(options.ranks) < 1:
        parser.error("--ranks takes numbers of at least 1")
    try:
        found = _traced(options.directory)
        print(_simulated(found, options) if options.simulate else _planned(found, options))
    except (OSError, ValueError) as error:
        sys.exit(f"{name}: {options.directory}: {error}")


def _traced(directory: Path) -> TracedRun:
    first = directory / FIRST
    return summarise(read(first if first.is_dir() else directory), WARM_UP)


def _planned(found: TracedRun, options: argparse.Namespace) -> str:
    cost = _cost(options)
    best = best_plan(found.without_collectives(cost).backward, cost)
    return (
        f"{messages.prediction(found, cost)}\n\nThe best split according to this prediction. No run has checked it "
        f"(npurun --tune does):\n  {messages.line_to_paste(best.ends, found.group)}"
    )


def _simulated(found: TracedRun, options: argparse.Namespace) -> str:
    step = found.step
    if options.alpha is not None:
        network = Network("given", options.alpha, options.beta)
    elif options.network is not None:
        network = PRESETS[options.network]
    else:
        cost = _cost(options)
        network, step = networks.link_of(cost, len(found.hosts)), found.without_collectives(cost)
    rows = simulate(step, network, options.ranks)
    sizes = step.backward.sizes
    title = f"{len(sizes)} gradients, {sum(sizes) / 1e6:.0f} MB, {step.alone * 1e3:.0f} ms per step on one rank; "
    title += f"network {network.name}"
    link = f"alpha {network.alpha * 1e6:.1f} us per message, beta {network.beta * 1e9:.3f} ns per byte"
    return f"{title} ({link})\n\n{table(rows)}\n\n{ASSUMPTIONS}"


def _cost(options: argparse.Namespace) -> CostModel:
    if options.alpha is not None:
        return CostModel(options.alpha, options.beta, busy=options.alpha)
    cost = measured_in(options.directory)
    if cost is None:
        raise ValueError(
            f"there is a trace, but no {MEASURED_FILE}: the collectives were not measured.\n"
            "What to do: use the directory of npurun --tune, or give --alpha and --beta."
        )
    return cost


if __name__ == "__main__":
    main()
