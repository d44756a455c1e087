"""The results as Markdown: figures by name, each a table or a sentence. What wasn't measured has no figure."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Callable

from benchmarks.cases import (
    ALONE,
    DIVIDED,
    FUNCTION,
    MIRRORED,
    ONE_PROCESS,
    RING_BETWEEN,
    SAMPLES,
    START,
    TCP_BETWEEN,
    TUNED,
    TWO_DEVICES,
    TWO_HOSTS,
    TWO_RANKS,
    WHOLE,
)
from benchmarks.cores import STATES
from benchmarks.results import NOT_INSTALLED, CaseResult, Gain, Results, RoundResult, Timing

_FAILED = "failed"
_NOT_MEASURED = "not measured"  # in this state of the cores, which didn't occur for long enough
_SMALLEST_BANDWIDTH = 1 << 16
_WIDTH, _ERROR_WIDTH = 120, 300
_NAMES = {"resnet50": "ResNet-50", "bert": "BERT", "mlp": "MLP", "chain": "161 small layers"}
_NAMES |= {"images": "JPEG input", "keras": "Keras 3", "tf_keras": "tf-keras"}

Rows = list[list[str]]


def setup(results: Results) -> str:
    """Return when and where the figures were measured."""
    head = (
        f"Measured on {results.date} with version {results.version} (commit {results.commit}): "
        f"{results.machine.line()}. Medians; fastest and slowest repetition in brackets.{_distances(results)}"
        f"{_earlier(results)}"
    )
    return textwrap.fill(head, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _earlier(results: Results) -> str:
    """Return which cases are of earlier runs, a sentence for each run with a space before it."""
    titles: dict[str, list[str]] = {}
    for case in results.cases:
        if case.earlier:
            hosts = "hosts" if case.case.startswith("hosts_") else "ranks"
            title = case.title if hosts in case.title else f"{case.title} ({case.ranks} {hosts})"
            titles.setdefault(case.earlier, []).append(title)
    return "".join(
        f" Measured before, on {run}: {'; '.join(dict.fromkeys(names))}."
        for run, names in titles.items()
    )


def _distances(results: Results) -> str:
    """Return how far the cores were apart in each state, in a sentence with a space before it."""
    texts = []
    for state in STATES:
        nanoseconds = [
            case.nanoseconds
            for case in results.cases
            if case.cores == state and case.nanoseconds is not None
        ]
        if nanoseconds:
            texts.append(f"{statistics.median(nanoseconds):.0f} ns ({state})")
    if not texts:
        return ""
    return f" A value takes {' or '.join(texts)} from one core to another and back."


def all_reduce(results: Results) -> str:
    """Return the times of all_reduce on one host, a row for each rival, and the processor's seconds for a GB."""
    parts = []
    for case in results.of("all_reduce"):
        rounds = case.rounds
        corner = f"{case.ranks} ranks, {case.cores}, ms"
        rows = [[corner, *(each.label for each in rounds), "CPU s/GB"]]
        for rival in case.rivals():
            rows.append(
                [
                    rival,
                    *(_milliseconds(each.timing(rival)) for each in rounds),
                    _core_seconds(rounds[-1], rival),
                ]
            )
        parts.append(_markdown(rows))
    return "\n\n".join(parts)


def steps(results: Results) -> str:
    """Return the times of training steps on one host, relative to the usual way; a table for each state of the cores.

    What the usual way and a step without communication take is in ``faster``: no time stands in two tables.
    """
    parts = []
    for state in results.states("resnet50", "bert"):
        cases = [*results.in_state("resnet50", state), *results.in_state("bert", state)]
        rows = [[f"time of a step, {state}", *(case.title for case in cases)]]
        for rival in dict.fromkeys(rival for case in cases for rival in case.rivals()):
            if rival != ALONE:
                cells = [_relative(case.rounds[0], rival, FUNCTION) for case in cases]
                rows.append([rival, *cells])
        parts.append(_markdown(rows))
    return "\n\n".join(parts)


def between_hosts(results: Results) -> str:
    """Return the times between two hosts, a row for each rival."""
    return _of_hosts(results, 2)


def four_hosts(results: Results) -> str:
    """Return the times between four hosts, a row for each rival."""
    return _of_hosts(results, 4)


def _of_hosts(results: Results, count: int) -> str:
    names = [f"hosts_{name}" for name in ("all_reduce", "resnet50", "bert")]
    parts = []
    for state in results.states(*names):
        columns = []
        for case in (case for name in names for case in results.in_state(name, state)):
            if case.ranks == count:
                columns += [(_title_between(case, each), each) for each in case.rounds]
        parts.append(_by_rival(columns, f"ms, {state}"))
    return "\n\n".join(filter(None, parts))


def _title_between(case: CaseResult, one_round: RoundResult) -> str:
    label = "" if one_round.label == "step" else f" {one_round.label}"
    return f"{case.title}{label}, {one_round.gbit:g} Gbit/s"


def checks(results: Results) -> str:
    """Return what the start and the checks cost, and what XLA changes."""
    rows = [["what", "cores", "without", "with", "difference"]]
    for case in results.of(START):
        for each in case.rounds:
            without, package = (each.median(timing.rival) for timing in each.timings[:2])
            if without is not None and package is not None:
                cells = [f"{without:.3g}", f"{package:.3g}", f"{package - without:+.3g}"]
                rows.append([each.label, case.cores, *cells])
    for case in [*results.of("checks"), *results.of("compiled")]:
        rows += _pairs(case)
    return _markdown(rows) if len(rows) > 1 else ""


def faster(results: Results) -> str:
    """Return the samples a second of the same work on one process, on ranks and on hosts."""
    return "\n\n".join(
        _samples(_with_step_between_hosts(results, case), f"samples per second, {case.cores}")
        for case in results.of("faster")
    )


def _with_step_between_hosts(results: Results, case: CaseResult) -> CaseResult:
    """Return a case with the step between hosts as another case has measured it, so that all tables have one time."""
    rounds = []
    for each in case.rounds:
        timings = list(each.timings)
        for hosts in results.of(f"hosts_{each.label}"):
            is_comparable = (hosts.cores, hosts.earlier) == (case.cores, case.earlier)
            for step in hosts.rounds:
                between = step.timing(RING_BETWEEN)
                if between is not None and (hosts.ranks, step.gbit) == (case.ranks, each.gbit):
                    timings = [timing for timing in timings if timing.rival != TWO_HOSTS]
                    # A step of another day or state has a table of its own only.
                    if is_comparable:
                        timings.append(replace(between, rival=TWO_HOSTS))
        rounds.append(replace(each, timings=timings))
    return replace(case, rounds=rounds)


def model(results: Results) -> str:
    """Return steps of two ranks as the time to compute plus the time to send all bytes, and what was measured."""
    parts = []
    for state in results.states("faster", "resnet50", "bert", "hosts_resnet50"):
        parts.append(_model_in_state(results, state))
    return "\n\n".join(filter(None, parts))


def _model_in_state(results: Results, state: str) -> str:
    head = f"ms per step, {state}"
    rows = [[head, "computing", "sending", "sum", "measured", "one process or host"]]
    # The same steps as in the table of samples, so that both pages show one figure for them.
    same_work = {
        each.label: each for case in results.in_state("faster", state) for each in case.rounds
    }
    steps_of = [("", "resnet50", FUNCTION), ("", "bert", FUNCTION)]
    steps_of += [("hosts_", "resnet50", rival) for rival in (RING_BETWEEN, TCP_BETWEEN)]
    for hosts, name, rival in steps_of:
        # The largest size comes last.
        sums = [
            each
            for case in results.in_state(f"{hosts}all_reduce", state)[:1]
            for each in case.rounds
        ]
        per_byte = {
            each.gbit: seconds / each.size for each in sums if (seconds := each.median(rival))
        }
        for case in results.in_state(hosts + name, state)[:1]:
            for each in case.rounds:
                computing, measured = each.median(ALONE), each.median(rival)
                alone = 2 * computing if hosts and computing else None
                if not hosts and name in same_work:
                    work = same_work[name]
                    computing, measured = (
                        work.median(f"{TWO_RANKS}, {ALONE}"),
                        work.median(TWO_RANKS),
                    )
                    alone = work.median(ONE_PROCESS)
                if computing and measured and each.gbit in per_byte:
                    sending = each.size * per_byte[each.gbit]
                    label = f"{_NAMES[name]}, one host"
                    if hosts:
                        label = f"{_NAMES[name]}, two hosts, {each.gbit:g} Gbit/s, {rival}"
                    times = (computing, sending, computing + sending, measured, alone)
                    cells = (f"{1000 * seconds:.0f}" if seconds else "" for seconds in times)
                    rows.append([label, *cells])
    return _markdown(rows) if len(rows) > 1 else ""


def summary(results: Results) -> str:
    """Return who gains from two ranks: for the same batch, how many times as fast they are as what stands beside."""
    rows = [["samples per second", "one process", "two ranks", "gain", "`tf.distribute`"]]
    for case in results.of("faster")[:1]:
        for each in case.rounds:
            name = f"{_NAMES[each.label]}, one host of {results.machine.cores} cores"
            rows.append(_gain(name, each, each.median(ONE_PROCESS), TWO_RANKS, TWO_DEVICES))
    for case in results.of("hosts_resnet50")[:1]:
        samples = 2 * SAMPLES["resnet50"]
        for each in case.rounds:
            name = (
                f"{_NAMES['resnet50']}, one or two hosts of one core, {each.gbit:g} Gbit/s, `tcp`"
            )
            alone = each.median(ALONE)
            # A host has the whole batch then: twice the samples of a rank.
            whole = 2 * alone if alone else None
            rows.append(_gain(name, replace(each, size=samples), whole, TCP_BETWEEN, MIRRORED))
    for gain in [gain for gain in results.gains if gain.case == "python_in_the_step"][:1]:
        host = f"{results.machine.cores} cores"
        if gain.processor != results.machine.processor:
            host = gain.processor
        name = f"{_gain_name(gain)}, one host of {host}"
        rows.insert(1, [name, *_gain_rates(gain), f"**{gain.ratio:.2f}×**", _NOT_MEASURED])
    return _markdown([row for row in rows if row]) if len(rows) > 1 else ""


def gains(results: Results) -> str:
    """Return which trainings gain from two ranks on one host, as ``npurun speed`` measures them."""
    rows = [["samples per second", "one process, all cores", "2 ranks", "gain", "verdict"]]
    for gain in sorted(results.gains, key=lambda gain: -gain.ratio):
        spread = f"**{gain.ratio:.2f}×** ({gain.low:.2f}–{gain.high:.2f})"
        rows.append([_gain_name(gain), *_gain_rates(gain), spread, gain.verdict])
    runs = sorted({f"{gain.date}, {gain.processor}" for gain in results.gains})
    return f"Measured on {'; '.join(runs)}.\n\n{_markdown(rows)}" if runs else ""


def _gain_name(gain: Gain) -> str:
    return f"{_GAINING[gain.case]}, {gain.keras}"


def _gain_rates(gain: Gain) -> list[str]:
    return [f"{float(f'{rate:.3g}'):g}" for rate in (gain.single, gain.together)]


def _gain(name: str, each: RoundResult, alone: float | None, rival: str, other: str) -> list[str]:
    """Return a row: samples a second of one process, and of two ranks, their ratio, and that of TensorFlow's way."""
    two = each.median(rival)
    if not alone or not two:
        return []
    mirrored = each.median(other)
    other_ratio = f"{alone / mirrored:.2f}×" if mirrored else _NOT_MEASURED
    samples = (f"{float(f'{each.size / seconds:.3g}'):g}" for seconds in (alone, two))
    return [name, *samples, f"**{alone / two:.2f}×**", other_ratio]


def reading(results: Results) -> str:
    """Return the speed of two ranks with input pipelines, relative to one process, but for the one in ``faster``."""
    parts = []
    for case in [case for case in results.of("reading") if case.ranks == 2]:
        rounds = [each for each in case.rounds if each.label != "images, tf_keras"]
        rows = [[f"speed, {case.ranks} ranks, {case.cores}", *map(_title, rounds)]]
        for rival in (WHOLE, DIVIDED):
            cells = [_relative(each, ONE_PROCESS, rival) for each in rounds]
            rows.append([rival, *cells])
        parts.append(_markdown(rows))
    return "\n\n".join(parts)


def updates(results: Results) -> str:
    """Return the steps with divided updates, a row for each rival."""
    parts = []
    for name in ("updates", "updates_tf_keras", "hosts_updates"):
        parts.append(_rounds_by_rival(results, name, ALONE))
    return "\n\n".join(filter(None, parts))


def copies(results: Results) -> str:
    """Return sums and steps with copies past the cache, relative to those without."""
    parts = []
    for case in results.of("copies"):
        rows = [[f"{case.ranks} ranks, {case.cores}", *map(_title, case.rounds)]]
        rows.append([TUNED, *(_relative(each, TUNED, FUNCTION) for each in case.rounds)])
        parts.append(_markdown(rows))
    return "\n\n".join(parts)


def _rounds_by_rival(results: Results, name: str, base: str) -> str:
    parts = []
    for case in results.of(name):
        columns = [(_title(each), each) for each in case.rounds]
        parts.append(_by_rival(columns, f"{case.ranks} ranks, {case.cores}, ms", base))
    return "\n\n".join(parts)


_GAINING = {
    "python_in_the_step": "3,000 Python iterations per sample, in an own loop",
    "pydataset": "3,000 Python iterations per sample, in `rows` of a `PyDataset`",
    "generator": "3,000 Python iterations per sample, in a generator on each rank (`divided`)",
    "recurrent": "a small LSTM in `fit`",
    "pipeline": "JPEG files of records in `fit`, `pipeline`",
    "several_models": "eight small models in a loop",
    "short_epochs": "a small dense model in `fit`, epochs of ten steps",
}


FIGURES: dict[str, Callable[[Results], str]] = {
    each.__name__: each
    for each in (
        setup,
        all_reduce,
        steps,
        between_hosts,
        four_hosts,
        checks,
        faster,
        model,
        summary,
        reading,
        updates,
        copies,
        gains,
    )
}


def tables(results: Results) -> str:
    """Return all figures, and what failed."""
    parts = [text for figure in FIGURES.values() if (text := figure(results))]
    errors = dict.fromkeys(
        f"* {case.title}, {one_round.label}, {timing.rival}: {textwrap.shorten(timing.error, _ERROR_WIDTH)}"
        for case in results.cases
        for one_round in case.rounds
        for timing in one_round.timings
        if timing.error is not None
    )
    return "\n\n".join([*parts, "\n".join(errors)] if errors else parts) + "\n"


def one_step(case: CaseResult) -> str:
    """Return the table of a case with one round."""
    return _by_rival([(case.title, case.rounds[0])], f"ms per step, {case.cores}", ALONE)


def _by_rival(columns: Sequence[tuple[str, RoundResult]], corner: str, base: str = "") -> str:
    """Return a row for each rival with times, and how many times as long they are as another rival's."""
    if not columns:
        return ""
    rows = [[corner, *(title for title, _ in columns)]]
    for rival in dict.fromkeys(timing.rival for _, each in columns for timing in each.timings):
        cells = []
        for _, each in columns:
            own, other = each.median(rival), each.median(base)
            ratio = f", ×{own / other:.2f}" if own and other and rival != base else ""
            cells.append(_milliseconds(each.timing(rival)) + ratio)
        rows.append([rival, *cells])
    return _markdown(rows)


def _relative(one_round: RoundResult, rival: str, base: str) -> str:
    """Return how many times as long a rival takes as another one."""
    own, other = one_round.median(rival), one_round.median(base)
    if own and other:
        return f"{own / other:.2f}"
    return _milliseconds(one_round.timing(base if own else rival))


def _title(one_round: RoundResult) -> str:
    return ", ".join(_NAMES.get(word, word) for word in one_round.label.split(", "))


def _samples(case: CaseResult, corner: str) -> str:
    rows = [[corner, *map(_title, case.rounds)]]
    for rival in case.rivals():
        cells = []
        for each in case.rounds:
            timing = each.timing(rival)
            rates = [each.size / seconds for seconds in timing.seconds] if timing else []
            cells.append(
                _spread(rates) if timing and timing.median is not None else _milliseconds(timing)
            )
        rows.append([rival, *cells])
    return _markdown(rows)


def _pairs(case: CaseResult) -> Rows:
    """Return for each round how much longer the second rival takes, turn by turn: the median, and its standard error.

    The times themselves are left out: other cases have steps of the same models.
    """
    rows = []
    for each in case.rounds:
        model, _, what = each.label.partition(", ")
        without, package = each.timings
        difference = _FAILED if without.error or package.error else ""
        if without.median is not None and package.median is not None:
            shares = [theirs / ours - 1 for ours, theirs in zip(without.seconds, package.seconds)]
            error = (
                1.25 * statistics.stdev(shares) / math.sqrt(len(shares))
                if len(shares) > 1
                else math.inf
            )
            difference = f"{statistics.median(shares):+.1%} ± {error:.1%}"
        rows.append([f"{_NAMES[model]}, {what}", case.cores, "", "", difference])
    return rows


def _core_seconds(one_round: RoundResult, rival: str) -> str:
    timing = one_round.timing(rival)
    if timing is None or timing.median is None or one_round.size < _SMALLEST_BANDWIDTH:
        return ""
    return f"{statistics.median(timing.core_seconds) / one_round.size * 1e9:.1f}"


def _milliseconds(timing: Timing | None) -> str:
    if timing is None:
        return ""
    if timing.median is None:
        if timing.error is None:
            return _NOT_MEASURED
        return NOT_INSTALLED if timing.error.startswith(NOT_INSTALLED) else _FAILED
    return _spread([1000 * seconds for seconds in timing.seconds])


def _spread(values: Sequence[float]) -> str:
    shown = [
        f"{value:.3g}" if value < 1000 else f"{value:.0f}"
        for value in (statistics.median(values), min(values), max(values))
    ]
    return f"{shown[0]} ({shown[1]}–{shown[2]})" if len(values) > 1 else shown[0]


def _markdown(rows: Rows) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|---" + "|--:" * (len(rows[0]) - 1) + "|", *body])


def chart(results: Results) -> str:
    """Return a picture of the steps on one host, as SVG: how many times as long as with npu_device."""
    bars = []
    for case in [*results.of("resnet50"), *results.of("bert")]:
        usual = case.rounds[0].median(FUNCTION)
        for rival in (FUNCTION, MIRRORED):
            own = case.rounds[0].median(rival)
            if own and usual:
                bars.append((f"{case.title}, {case.cores}: {rival}", own / usual))
    if not bars:
        return ""
    widest = max(ratio for _, ratio in bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 {26 * len(bars) + 4}" font-size="13">'
    ]
    for place, (label, ratio) in enumerate(bars):
        y, colour = 26 * place + 4, "#2a6" if FUNCTION in label else "#999"
        lines.append(f'<text x="470" y="{y + 15}" text-anchor="end">{label}</text>')
        lines.append(
            f'<rect x="478" y="{y}" width="{340 * ratio / widest:.0f}" height="20" fill="{colour}"/>'
        )
        lines.append(f'<text x="{484 + 340 * ratio / widest:.0f}" y="{y + 15}">{ratio:.2f}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
