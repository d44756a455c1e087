"""The tuner's messages: the figures, predicted against measured, and the line to paste."""

from __future__ import annotations

from collections.abc import Sequence

from npu_device._src.collectives.group import WORLD_GROUP
from npu_device._src.tuning.cost_model import CostModel
from npu_device._src.tuning.planner import Plan, best_plan, default_plan, per_gradient_plan, predict
from npu_device._src.tuning.simulate import TracedStep
from npu_device._src.tuning.traced_run import TracedRun
from npu_device._src.tuning.trials import TuningResult


def line_to_paste(ends: Sequence[int], group: str) -> str:
    """Return the call that sets a split, Ascend's way.

    >>> line_to_paste([20, 100, 159], "hccl_world_group")
    'set_split_strategy_by_idx([20, 100, 159])'
    """
    where = "" if group == WORLD_GROUP else f', group="{group}"'
    return f"set_split_strategy_by_idx({list(ends)}{where})"


def amount(size: float) -> str:
    """Return a number of bytes with its unit.

    >>> amount(102_228_128), amount(196)
    ('102.2 MB', '0.2 kB')
    """
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"


def prediction(found: TracedRun, cost: CostModel) -> str:
    """Return the gradients, the collectives, and the exposed time expected of each split."""
    step = found.without_collectives(cost)
    backward = step.backward
    one = predict(backward, cost, [len(backward.sizes) - 1])
    rows = [
        ("as it is now", predict(backward, cost, found.ends)),
        ("default, 96.54 % and 3.46 %", default_plan(backward, cost)),
        ("one segment", one),
        ("one per gradient", per_gradient_plan(backward, cost)),
        ("best", best_plan(backward, cost)),
    ]
    lines = [
        _gradients(found),
        _collectives(cost),
        "",
        f"{'predicted':30}{'segments':>9}{'exposed, ms':>18}{'ms per step':>13}",
    ]
    lines += [_row(name, plan, step, cost) for name, plan in rows]
    lines.append(
        f"{'(traced, as it is now)':30}{len(found.ends):>9}{found.exposed * 1e3:>18.1f}{found.median * 1e3:>13.1f}"
    )
    return "\n".join(lines)


def outcome(result: TuningResult) -> str:
    """Return predicted against measured times for the splits that were tried."""
    step = result.traced.without_collectives(result.cost)
    lines = [
        f"{'':14}{'exposed, ms':>22}{'ms per step':>22}",
        f"{'':14}{'predicted':>12}{'measured':>10}{'predicted':>12}{'measured':>10}  segments end at",
    ]
    for one in result.tried:
        lines.append(
            f"{one.label:14}{one.plan.exposed * 1e3:>12.1f}{one.exposed * 1e3:>10.1f}"
            f"{(step.alone + one.plan.added) * 1e3:>12.1f}{one.seconds * 1e3:>10.1f}  {list(one.plan.ends)}"
            f"{'  <- chosen' if one is result.chosen else ''}"
        )
    present = result.tried[0]
    if result.gained:
        gain = present.seconds / result.chosen.seconds - 1
        lines += ["", f"with {result.chosen.label}, steps are {gain:.1%} faster than now. To keep it:"]
    else:
        lines += ["", "no split was faster in every round than the present one, which is:"]
    lines.append(f"  {line_to_paste(result.chosen.plan.ends, result.traced.group)}")
    return "\n".join(lines)


def _gradients(found: TracedRun) -> str:
    sizes = found.step.backward.sizes
    hosts = len(set(found.hosts))
    return (
        f"{len(sizes)} {found.dtype} gradients, {amount(sum(sizes))}; {len(found.hosts)} ranks on {hosts} "
        f"host{'s' if hosts > 1 else ''}, group {found.group!r}, backend {found.backend}"
    )


def _collectives(cost: CostModel) -> str:
    bandwidth = f" ({1e-9 / cost.beta:.2f} GB/s)" if cost.beta else ""
    packing = f"; {cost.pack * 1e9:.3f} ms per MB to pack a segment, and the same to unpack it" if cost.pack else ""
    load = f"; it takes {cost.load:.0%} of a rank's cores" if cost.load else ""
    load += f"; during backward, it runs at {cost.pace:.0%} of its speed" if cost.pace < 1 else ""
    return (
        f"all_reduce: {cost.alpha * 1e3:.3f} ± {cost.alpha_error * 1e3:.3f} ms, and {cost.beta * 1e9:.3f} ± "
        f"{cost.beta_error * 1e9:.3f} ms per MB{bandwidth}; of several at the same time, each takes "
        f"{cost.busy * 1e3:.3f} ms for itself{packing}{load}"
    )


def _row(name: str, plan: Plan, step: TracedStep, cost: CostModel) -> str:
    spread = predict(step.backward, cost.slower(), plan.ends).exposed - plan.exposed
    exposed = f"{plan.exposed * 1e3:.1f} ± {spread * 1e3:.1f}"
    return f"{name:30}{len(plan.ends):>9}{exposed:>18}{(step.alone + plan.added) * 1e3:>13.1f}"
