"""The verdict of ``npurun verify``: as text, as JSON, and as a page with a picture of the ratios."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from npu_device._src.comparison import compare
from npu_device._src.comparison.compare import RecordedCall
from npu_device._src.verify import causes
from npu_device._src.verify.causes import Findings
from npu_device._src.verify.plan import FAILED, Process

SAME, DIFFERS, NOT_COMPARABLE = 0, 1, 3
_NAMES = {SAME: "the same", DIFFERS: "differs", NOT_COMPARABLE: "not comparable"}
_UNKNOWN = (
    "Announce the layer before its first call: npu.distribute.broadcast(model.weights) before the first step; or use "
    "npu.distribute.SyncBatchNormalization."
)
_FAILED = "failed"
_RESULT = "N ranks give the single-process result"
_SHOWN = 8
_HEAD = f"{'ranks':>5} {'step':>5} {'samples':>8} {'':>8}{'gradients':>12}{'updates':>12}"


@dataclass
class Verdict:
    """The outcome."""

    code: int  # exit code
    cause: str  # its name; "" if it is the same
    text: str  # what it means, and what to do
    table: list[str] = field(default_factory=list)  # a line for each step and number of ranks
    notes: list[str] = field(default_factory=list)
    ranks: int = 0  # on how many it was seen
    ratios: dict[str, float | None] = field(
        default_factory=dict
    )  # of the first deviating gradients, as in Deviation
    missed: list[str] = field(default_factory=list)  # what the comparison hasn't reached


def judge(runs: Sequence[Sequence[Process]]) -> Verdict:
    """Compare the records that the runs have left: of one process and its twin, and of each number of ranks."""
    single, moved = (compare.load(process.folder) for process in runs[0])
    verdict = Verdict(SAME, "", "")
    notes, missed = _notes(single), _missed(single, runs[0][0])
    for run in runs[1:]:
        ranks = [compare.load(process.folder) for process in run if compare.exists(process.folder)]
        if sum(bool(rank.steps) for rank in ranks) < len(run):
            notes.append(
                f"{len(run)} ranks were left out: the global batch size can't be divided by {len(run)}."
            )
            continue
        if ranks[0].horovod:
            ranks = compare.aligned(ranks)
            one = again = compare.average_of(ranks)
            notes = [
                "with Horovod's names, N ranks aren't one process: they were compared with each other only."
            ]
        else:
            one, again, *ranks = compare.aligned([single, moved, *ranks])
            missed += _missed_by_ranks(single, one, len(run))
        if layers := _layers(ranks[0].of("normalizes alone")):
            notes.append(
                f"{layers}: BatchNormalization(synchronized=True) used the samples of each rank by itself. {_UNKNOWN}"
            )
        found = Findings(one, again, ranks)
        if one.horovod and found.same_samples() and not found.shuffles_unseeded():
            notes.append(
                "all ranks read the same samples: dataset.shard(hvd.size(), hvd.rank()) gives each its own."
            )
        cause, text = causes.cause_of(found)
        if not cause and (line := found.clipped()):
            notes.append(
                f"each rank clips its own gradients before they are reduced, {line}. Reduce them first."
            )
        verdict.table += _table(found)
        verdict.text = verdict.text or _compared(one)
        failed = _failure(run)
        if cause and not verdict.cause:
            code = NOT_COMPARABLE if cause in (causes.NO_CALL, causes.RANDOM) else DIFFERS
            ratios = {each.variable: each.ratio for each in found.first()}
            text = f"in {found.phase()}: {text}" if len(_phases(one)) > 1 else text
            verdict = Verdict(code, cause, text, verdict.table, ranks=len(run), ratios=ratios)
        elif failed and not _failure(runs[0]) and not verdict.code:
            text = f"{failed}\nBefore that, {_compared(one)}"
            verdict = Verdict(NOT_COMPARABLE, _FAILED, text, verdict.table, ranks=len(run))
    verdict.notes = list(dict.fromkeys(notes))
    verdict.missed = list(dict.fromkeys(missed))
    return verdict


def _phases(record: compare.Record) -> dict[str, int]:
    """Return the number of recorded steps of each phase."""
    return dict(Counter(step.phase for step in record.steps))


def _compared(record: compare.Record) -> str:
    who = "all ranks apply the average of their gradients" if record.horovod else _RESULT
    phases = [
        f"{count} step{'s' * (count > 1)} of {phase}" for phase, count in _phases(record).items()
    ]
    tail = [f"and {len(phases) - _SHOWN} more phases"] if len(phases) > _SHOWN else []
    return f"{who}, for {', '.join(phases[:_SHOWN] + tail)}."


def _missed(single: compare.Record, process: Process) -> list[str]:
    """Return what the single process hasn't reached."""
    missed = []
    failed = _failure([process])
    if failed:
        missed.append(f"what follows an error: {failed}")
    if single.ended_at:
        missed.append(
            f"what follows {process.seconds:.0f} s after the first step, when the script was ended, in "
            f"{single.ended_at}. --seconds sets this limit."
        )
    if single.unreached:
        missed.append(f"calls that train in {', '.join(single.unreached)}, which weren't reached.")
    if single.ended_at or failed:
        unfinished = {
            phase: count for phase, count in _phases(single).items() if count % process.steps
        }
        missed += [f"{phase}, after {count} steps." for phase, count in unfinished.items()]
    return missed


def _missed_by_ranks(single: compare.Record, common: compare.Record, ranks: int) -> list[str]:
    """Return what the ranks haven't reached, unlike the single process."""
    reached = _phases(common)
    return [
        f"{phase}: {ranks} ranks made {reached.get(phase, 0)} of its {count} steps."
        for phase, count in _phases(single).items()
        if reached.get(phase, 0) < count
    ]


def _failure(run: Sequence[Process]) -> str:
    """Return what is known of the first process of a run that failed; "" if none did."""
    files = [path for process in run if (path := process.folder / FAILED).exists()]
    return (
        min(files, key=lambda path: path.stat().st_mtime).read_text(encoding="utf-8")
        if files
        else ""
    )


def _notes(record: compare.Record) -> list[str]:
    notes = []
    if not record.of("seed"):
        notes.append(
            "the script sets no seed; verify has set one. Call npu.open(seed=…) so that all ranks draw alike."
        )
    layers = _layers(record.of("batch_norm"))
    if layers:
        notes.append(
            f"not compared: batch normalization with the samples of each rank, in {layers}; they aren't synchronized, "
            "and used their moving statistics. For the single-process result: BatchNormalization(synchronized=True)."
        )
    return notes


def _layers(calls: Sequence[RecordedCall]) -> str:
    """Return the number and names of the layers in some calls; "" without any."""
    names = list(dict.fromkeys(call.what for call in calls))
    shown = ", ".join(names[:3]) + (", …" if names[3:] else "")
    return f"{len(names)} layer(s) ({shown})" if names else ""


def _table(found: Findings) -> list[str]:
    lines = []
    others = found.other_samples()
    has_phases = len(_phases(found.one)) > 1
    for number, (one, *_) in enumerate(found.steps, start=1):
        line = f"{found.size:>5} {number:>5} {sum(one.rows.values()):>8} {'other' if number in others else 'same':>8}"
        for kind in (compare.GRADIENT, compare.UPDATE):
            off = [
                each.off for each in found.deviations if (each.step, each.kind) == (number, kind)
            ]
            line += f"{f'off {max(off):.0e}' if off else 'same':>12}"
        lines.append(f"{line}  {one.phase}" if has_phases else line)
    return lines


def text(verdict: Verdict) -> str:
    """Return the outcome for the terminal."""
    notes = [f"note: {note}" for note in verdict.notes]
    where = f" on {verdict.ranks} ranks" if verdict.ranks else ""
    missed = [f"not compared: {text}" for text in verdict.missed]
    return "\n".join(
        [
            _HEAD,
            *verdict.table,
            *notes,
            "",
            f"{_NAMES[verdict.code]}{where}: {verdict.text}",
            *missed,
        ]
    )


def page(verdict: Verdict) -> str:
    """Return the outcome as one self-contained page: the gradient of each variable as a multiple of one process's."""
    rows = [
        f'<tr><td>{escape(name)}<td><hr style="width:{200 * min(abs(ratio or 0), 2):.0f}px"><td>'
        + ("another direction" if ratio is None else f"{ratio:.3f}")
        for name, ratio in verdict.ratios.items()
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>npurun verify</title><style>'
        "body { font-family: system-ui, sans-serif; margin: 2em } hr { border: 0; height: 13px; background: #4f86d9 }"
        f"</style></head><body><h1>npurun verify</h1><pre>{escape(text(verdict))}</pre>"
        f"<h2>Gradients as a multiple of one process's</h2><table>{''.join(rows)}</table></body></html>\n"
    )
