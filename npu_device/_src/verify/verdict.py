"""Judges what the processes of ``npurun verify`` have left: the cause of a difference, and what wasn't compared.

``causes.py`` has the causes, ``report.py`` prints the verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from npu_device._src.comparison import compare, topics
from npu_device._src.comparison.compare import Deviation, Record, RecordedCall
from npu_device._src.verify import causes
from npu_device._src.verify.compared_run import ComparedRun
from npu_device._src.verify.plan import FAILED, PlannedProcess
from npu_device._src.wording import shortened

# Exit codes.
SAME = 0
DIFFERS = 1
NOT_COMPARABLE = 3

_FAILED = "failed"  # cause of a verdict whose text is the error: ``causes.md`` has none
_RESULT = "N ranks give the single-process result"
_AVERAGE = "all ranks apply the average of their gradients"
_SHOWN = 8

_NO_SEED = "the script sets no seed; verify has set one. Call npu.open(seed=…) so that all ranks draw alike."
_NOT_SYNCHRONIZED = (
    "not compared: batch normalization with the samples of each rank, in {layers}; they aren't synchronized, and used "
    "their moving statistics. For the single-process result: BatchNormalization(synchronized=True)."
)
_QUIET = "not compared: dropout and noise, which were off, in {layers}."
_NORMALIZES_ALONE = (
    "{layers}: BatchNormalization(synchronized=True) used the samples of each rank by itself. Announce the layer "
    "before its first call: npu.distribute.broadcast(model.weights) before the first step; or use "
    "npu.distribute.SyncBatchNormalization."
)
_CLIPS = "each rank clips its own gradients before they are reduced, {line}. Reduce them first."
_HOROVOD = (
    "with Horovod's names, N ranks aren't one process: they were compared with each other only."
)
_HOROVOD_SAMPLES = (
    "all ranks read the same samples: dataset.shard(hvd.size(), hvd.rank()) gives each its own."
)


@dataclass
class Verdict:
    """The outcome."""

    code: int  # exit code
    cause: str  # name of the cause; "" if it is the same
    text: str  # what it means, and what to do
    table: list[str] = field(default_factory=list)  # a line for each step and number of ranks
    notes: list[str] = field(default_factory=list)
    ranks: int = 0  # number of ranks on which it was seen
    # Ratios of the first deviating gradients, as in ``Deviation``.
    ratios: dict[str, float | None] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)  # what the comparison hasn't reached


def judge(stages: Sequence[Sequence[PlannedProcess]]) -> Verdict:
    """Compare one process with each number of ranks, by what the processes of ``PlannedProcess.stages`` have left.

    The smallest number of ranks that differs has the verdict. Of more ranks, the table, notes and what is missed are
    kept: they mostly differ for the same reason.
    """
    first_stage, *stages_of_ranks = stages
    single, perturbed = (compare.load(process.folder) for process in first_stage)
    verdict = Verdict(SAME, "", "")
    notes = _notes_of_script(single, first_stage[0].replicates)
    missed = _missed(single, first_stage)
    single_fails = bool(_failure(first_stage[:1]))
    incomplete = []  # runs whose ranks made too few steps, each with a cause and its text
    for processes in stages_of_ranks:
        size = len(processes)
        failure = _failure(processes)
        ranks = [compare.load(process.folder) for process in processes]
        # If the ranks for which the user has asked make no steps, npurun verify has ended already.
        if not all(record.steps for record in ranks):
            if failure:
                missed.append(f"{size} ranks: {failure}")
            else:
                notes.append(
                    f"{size} ranks were left out: the global batch size can't be divided by {size}."
                )
            continue
        unreached = {}
        if ranks[0].uses_horovod:
            average = compare.average_of(ranks)
            run = ComparedRun(average, average, ranks)
            # Other notes are on what is compared with one process, for which the average stands here.
            notes = [_HOROVOD]
        else:
            run = ComparedRun(single, perturbed, ranks)
            unreached = _unreached_by_ranks(single, ranks)
            missed += unreached
        cause, explanation = causes.cause_of(run)
        notes += _notes_of_run(run, cause)
        verdict.table += _table(run)
        verdict.text = verdict.text or _sameness(run.single)
        if cause and not verdict.cause:
            verdict = _verdict_on(run, cause, explanation, verdict.table)
        fewer_steps = " ".join(text for text, is_meant in unreached.items() if not is_meant)
        # If one process fails, too, it is the script's own error, unless the ranks haven't come as far.
        if failure and (unreached or not single_fails):
            incomplete.append((run, _FAILED, failure))
        elif failure and ranks[0].uses_horovod:
            # With Horovod's names, ranks may have fewer steps to make.
            missed.append(f"what follows an error: {failure}")
        elif fewer_steps and processes is stages_of_ranks[0]:
            # Ranks that are only tried may make fewer steps.
            explanation = causes.text_of(causes.FEWER_STEPS, run, fewer_steps)
            incomplete.append((run, causes.FEWER_STEPS, explanation))
    if incomplete:
        run, cause, explanation = incomplete[0]
        if not verdict.cause:
            # The steps that all have made may be as in one process: comparing alone would praise the script.
            explanation = f"{explanation}\nBefore that, {_sameness(run.single)}"
            verdict = Verdict(NOT_COMPARABLE, cause, explanation, verdict.table, ranks=run.size)
        elif cause == _FAILED:
            # A cause says more than an error, which may follow from it.
            missed.append(f"what follows an error: {explanation}")
    verdict.notes = list(dict.fromkeys(notes))
    verdict.missed = list(dict.fromkeys(missed))
    return verdict


def _verdict_on(run: ComparedRun, cause: str, explanation: str, table: list[str]) -> Verdict:
    """Return the verdict on a run that has a cause."""
    code = DIFFERS
    if cause in causes.NOT_COMPARABLE:
        code = NOT_COMPARABLE
    if len(_phases(run.single)) > 1:
        explanation = f"in {run.phase}: {explanation}"
    deviations = run.step.deviations[compare.GRADIENT]
    ratios = {deviation.variable: deviation.ratio for deviation in deviations}
    return Verdict(code, cause, explanation, table, ranks=run.size, ratios=ratios)


def _phases(record: Record) -> Counter[str]:
    """Return the number of recorded steps of each phase."""
    return Counter(step.phase for step in record.steps)


def _sameness(record: Record) -> str:
    """Return what is the same, and for how many steps of each phase."""
    claim = _RESULT
    if record.uses_horovod:
        claim = _AVERAGE
    phases = [
        f"{count} step{'s' * (count > 1)} of {phase}" for phase, count in _phases(record).items()
    ]
    return f"{claim}, for {shortened(phases, _SHOWN, 'more phases')}."


def _missed(single: Record, first_stage: Sequence[PlannedProcess]) -> list[str]:
    """Return what the single process hasn't reached, or the perturbed one."""
    missed = []
    process = first_stage[0]
    failure = _failure(first_stage)
    if failure:
        missed.append(f"what follows an error: {failure}")
    if single.ended_at:
        missed.append(
            f"what follows {process.seconds:.0f} s after the first step, when the script was ended, in "
            f"{single.ended_at}. --seconds sets this limit."
        )
    if single.unreached:
        lines = ", ".join(single.unreached)
        missed.append(f"calls that train or evaluate in {lines}, which weren't reached.")
    missed += _missed_beside_steps(single)
    without = _without_gradients(single)
    if without:
        variables = shortened(without, _SHOWN, "more variables")
        missed.append(f"{variables}, whose gradients were None or NaN in all steps.")
    if single.ended_at or failure:
        for phase, count in _phases(single).items():
            if count % process.steps:
                missed.append(f"{phase}, after {count} steps.")
    return missed


def _missed_beside_steps(single: Record) -> list[str]:
    """Return what a script does besides the steps that were compared."""
    missed = []
    evaluations: dict[str, RecordedCall] = {}
    for call in single.of(topics.EVALUATION):
        # A ``fit`` with validation is noted before the ``evaluate`` that it calls in the same line.
        evaluations.setdefault(call.line, call)
    if evaluations:
        calls = shortened(list(map(str, evaluations.values())), _SHOWN, "more calls", "; ")
        missed.append(f"{calls}: only training steps are compared.")
    for call in single.of(topics.EPOCH_END):
        missed.append(
            f"{call.detail} between epochs: the fit in {call.line} was ended within its first one."
        )
    return missed


def _without_gradients(record: Record) -> list[str]:
    """Return the names of the variables whose gradients were never numbers."""
    names: dict[str, bool] = {}
    for step in record.steps:
        for name, gradient in zip(step.names, step.gradients):
            names[name] = names.get(name, True) and bool(np.isnan(gradient).all())
    return [name for name, is_without in names.items() if is_without]


def _unreached_by_ranks(single: Record, ranks: Sequence[Record]) -> dict[str, bool]:
    """Return what ranks haven't reached, unlike the single process; True for what is left to one rank on purpose."""
    reached = [_phases(compare.aligned([single, record])[0]) for record in ranks]
    unreached = {}
    for phase, count in _phases(single).items():
        steps = [of_rank[phase] for of_rank in reached]
        if min(steps) < count:
            text = f"{phase}: {len(ranks)} ranks made {min(steps)} of its {count} steps."
            # A phase that some ranks make and others don't even begin.
            unreached[text] = set(steps) == {0, count}
    return unreached


def _failure(processes: Sequence[PlannedProcess]) -> str:
    """Return how the process that failed first did so; "" if all went well."""
    paths = [process.folder / FAILED for process in processes]
    failures = [path for path in paths if path.exists()]
    if not failures:
        return ""
    # It most likely made the others fail.
    earliest = min(failures, key=lambda path: path.stat().st_mtime)
    return earliest.read_text(encoding="utf-8")


def _notes_of_script(record: Record, replicate: bool) -> list[str]:
    """Return notes on what verify has changed in the script."""
    notes = []
    # npurun --replicate gives all ranks a seed.
    if not replicate and not record.of(topics.SEED):
        notes.append(_NO_SEED)
    notes += _note_on_layers(record, topics.QUIET, _QUIET)
    return notes + _note_on_layers(record, topics.BATCH_NORM, _NOT_SYNCHRONIZED)


def _notes_of_run(run: ComparedRun, cause: str) -> list[str]:
    """Return notes on what the ranks do by themselves without a difference that shows."""
    notes = _note_on_layers(run.ranks[0], topics.NORMALIZES_ALONE, _NORMALIZES_ALONE)
    if run.single.uses_horovod and run.read_same_samples() and not run.shuffles_unseeded():
        notes.append(_HOROVOD_SAMPLES)
    lost = run.lost_in_rounding()
    if lost and not cause:
        notes.append(f"not compared: {lost}.")
    line = run.clipped()
    if line and not cause:
        notes.append(_CLIPS.format(line=line))
    return notes


def _note_on_layers(record: Record, topic: str, note: str) -> list[str]:
    """Return a note with the number and names of the layers in calls on a topic; no note without any."""
    names = list(dict.fromkeys(call.detail for call in record.of(topic)))
    if not names:
        return []
    return [note.format(layers=f"{len(names)} layer(s) ({shortened(names, 3)})")]


def _table(run: ComparedRun) -> list[str]:
    """Return a line for each step: its samples, and how far gradients and updates are off."""
    has_phases = len(_phases(run.single)) > 1
    lines = []
    for step in run.steps:
        samples = "same"
        repeats = compare.differ_by_rounding(run.single, step.single, step.perturbed)
        if step.other_samples(shows=repeats and step.shows_deviations):
            samples = "other"
        line = f"{run.size:>5} {step.number:>5} {sum(step.single.rows.values()):>8} {samples:>8}"
        line += _cell(step.deviations[compare.GRADIENT], step.shows_deviations)
        # What the last step of an optimizer adds isn't recorded.
        shows_update = step.shows_deviations and run.single.successor(step.number - 1) is not None
        line += _cell(step.deviations[compare.UPDATE], shows_update)
        if has_phases:
            line += f"  {step.single.phase}"
        lines.append(line)
    return lines


def _cell(deviations: Sequence[Deviation], shows: bool) -> str:
    """Return the largest of some deviations, as a cell of the table."""
    if not deviations and not shows:
        return f"{'unknown':>12}"
    if not deviations:
        return f"{'same':>12}"
    error = max(deviation.relative_error for deviation in deviations)
    return f"{f'off {error:.0e}':>12}"
