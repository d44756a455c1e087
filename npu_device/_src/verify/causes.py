"""The causes that ``npurun verify`` knows, each with what has to be seen. ``causes.md`` has what to say.

A cause is a function that returns where it is (``Where``). Begin with the list ``CAUSES`` below the functions: it has
their names and their order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Callable, Union

from npu_device._src.comparison import topics
from npu_device._src.comparison.compare import GRADIENT, STATE, UPDATE, Record
from npu_device._src.verify.compared_run import ComparedRun, first_names

PAGE = Path(__file__).with_name("causes.md").read_text(encoding="utf-8")
TEXTS = dict(re.findall(r"^### (.+?)\n\n(.+?)(?=\n### |\Z)", PAGE, flags=re.M | re.S))
"""The sections of ``causes.md``: what a cause means, with an example, and what to do."""

FEWER_STEPS = "fewer steps"
"""Not among ``CAUSES``: a ``ComparedRun`` has only the steps that all processes have made, so ``verdict.py`` recognizes
this.
"""

Where = Union[str, bool, None]
"""The place of a cause in the script; True if there is none to name, and False, None or "" if the run doesn't show the
cause.
"""

Cause = Callable[[ComparedRun], Where]


def no_call(run: ComparedRun) -> Where:
    """Recognize ranks that haven't joined a job."""
    return not all(record.joined for record in run.ranks)


def other_variables(run: ComparedRun) -> Where:
    """Return which variables only some processes train, in the first step in which their numbers differ."""
    for step in run.steps:
        rank = step.rank_with_other_variables()
        if rank is None:
            continue
        reference = "one process"
        # With Horovod's names, rank 0 stands for one process.
        if run.single.uses_horovod:
            reference = "rank 0"
        counts = (
            f"{reference} trains {step.single.trained}, and rank {rank} {step.ranks[rank].trained}"
        )
        return f"in step {step.number}, {counts}; {first_names(step.uncommon_variables(rank))}"
    return None


def adapted_to_a_part(run: ComparedRun) -> Where:
    """Return the call of ``adapt`` that has seen different data in one process or on a rank."""
    # Data may differ each time that the script runs.
    if run.not_repeatable():
        return None
    return _call_with_different_outcomes(topics.ADAPTED, [run.single, *run.ranks])


def different_seeds(run: ComparedRun) -> Where:
    """Return the shuffle that has no seed, and comes before the data is divided, or a different seed on each rank."""
    # No numbers show the first, since verify doesn't shuffle.
    unseeded = run.line_in_script(topics.UNSEEDED)
    if unseeded or not run.step_with_other_samples():
        return unseeded
    return _call_with_different_outcomes(topics.SHUFFLE, run.ranks)


def different_starts(run: ComparedRun) -> Where:
    """Return the phase that ranks begin with different variables, rank 0 with those of one process."""
    step = run.different_start()
    # Where rank 0 differs from one process, too, something has set the variables, or they differ each time.
    if step is None or (step.different_variables() and not run.not_repeatable()):
        return None
    return step.single.phase


def state_before_the_first_step(run: ComparedRun) -> Where:
    """Return the variables that no rank has as one process when an optimizer makes its first step."""
    step = run.different_start()
    return step is not None and first_names(step.different_variables())


def discarded_result(run: ComparedRun) -> Where:
    """Return the reduction of as many tensors as the optimizer trains variables, on ranks that apply their own."""
    if not run.applies_own_gradients():
        return None
    # A reduction of all gradients was made, so that only its result can have been dropped.
    trained = run.step.ranks[0].trained
    reductions = run.calls(topics.ALL_REDUCE)
    return next((str(call) for call in reductions if call.outcome == trained), None)


def only_loss_reduced(run: ComparedRun) -> Where:
    """Return the reduction of a single number, where nothing else is reduced."""
    # Losses and metrics have one element, unlike gradients.
    reductions = run.calls(topics.ALL_REDUCE)
    if not run.applies_own_gradients() or any(call.outcome > 1 for call in reductions):
        return None
    return run.line(topics.ALL_REDUCE)


def not_reduced(run: ComparedRun) -> Where:
    """Return the phase in which each rank applies its own gradients."""
    return run.applies_own_gradients() and run.phase


def updates_differ(run: ComparedRun) -> Where:
    """Return the phase whose ranks have different variables before or after they apply the same gradients, which
    ``not_reduced`` has found to be reduced.
    """
    # Weights are recorded before a step, so that those after it are with its successor.
    successor = run.single.successor(run.index)
    steps = [run.step]
    if successor is not None:
        steps.append(run.steps[successor])
    return any(step.ranks_differ("weights") for step in steps) and run.phase


def same_samples(run: ComparedRun) -> Where:
    """Recognize ranks that all read the same samples, unlike one process."""
    return run.step_with_other_samples() is not None and run.read_same_samples()


def random_with_samples(run: ComparedRun) -> Where:
    """Return the call that draws random numbers in a step whose samples differ."""
    return run.step_with_other_samples() is not None and run.line(topics.RANDOM)


def different_samples(run: ComparedRun) -> Where:
    """Return which samples the ranks together read in the first step in which one process reads others."""
    step = run.step_with_other_samples()
    return step is not None and step.other_samples()


def normalized_alone(run: ComparedRun) -> Where:
    """Return the synchronized layer that normalizes by the samples of one rank."""
    # With equal gradients, the layer has made no difference.
    return run.gradients_deviate and run.line(topics.NORMALIZES_ALONE)


def clipped_before_reduction(run: ComparedRun) -> Where:
    """Return the call that clips gradients before they are reduced, if they aren't a multiple."""
    # A multiple has a cause of its own.
    return run.gradients_deviate and not run.ratio() and run.clipped()


def loss_per_sample_added(run: ComparedRun) -> Where:
    """Return the call of ``add_loss`` with one value per sample, where gradients are too small."""
    return run.is_ratio(1 / run.size) and run.line(topics.ADD_LOSS)


def global_batch_size(run: ComparedRun) -> Where:
    """Return the call that divides by the global batch size, where gradients are too small."""
    return run.is_ratio(1 / run.size) and run.line(topics.AVERAGE_LOSS)


def sum_averaged(run: ComparedRun) -> Where:
    """Recognize gradients that are too small by the number of ranks."""
    # This cause comes after the causes that have the same ratio and a line to name.
    return run.is_ratio(1 / run.size)


def mean_summed(run: ComparedRun) -> Where:
    """Return the reduction after which gradients are too large by the number of ranks."""
    # A wrapped optimizer reduces without a call of the script.
    return run.is_ratio(run.size) and (run.line(topics.ALL_REDUCE) or "by an optimizer")


def state_in_the_step(run: ComparedRun) -> Where:
    """Return the variables that no optimizer trains, and that deviate up to the step that is explained.

    A deviation alone says nothing: a step may add up the ranks' parts at its end.
    """
    steps = run.steps[: run.first_deviating]
    deviations = [deviation for step in steps for deviation in step.deviations[STATE]]
    return first_names(list(dict.fromkeys(deviation.variable for deviation in deviations)))


def scaled_rate(run: ComparedRun) -> Where:
    """Recognize updates by the same gradients that are too large by the number of ranks."""
    return not run.gradients_deviate and run.is_ratio(run.size, UPDATE)


def multiplied_updates(run: ComparedRun) -> Where:
    """Recognize updates by the same gradients that are all the same multiple."""
    return not run.gradients_deviate and bool(run.ratio(UPDATE))


def different_updates(run: ComparedRun) -> Where:
    """Return the variables that the same gradients update differently."""
    return not run.gradients_deviate and run.described(UPDATE)


def random_in_the_step(run: ComparedRun) -> Where:
    """Return the call that draws random numbers in a step whose gradients deviate."""
    return run.gradients_deviate and run.line(topics.RANDOM)


def different_gradients(run: ComparedRun) -> Where:
    """Return the variables whose gradients deviate."""
    return run.described(GRADIENT)


def metric_of_sums(run: ComparedRun) -> Where:
    """Return the metric of the model that isn't that of one process."""
    return run.different_log(only_metrics=True)


def horovod_not_reduced(run: ComparedRun) -> Where:
    """Recognize ranks that apply their own gradients instead of their average."""
    return run.applies_own_gradients() and run.gradients_deviate


def horovod_different_variables(run: ComparedRun) -> Where:
    """Recognize ranks with different variables after the first step, after which they may still be sent."""
    return any(step.ranks_differ("weights") for step in run.steps[1:2])


def _call_with_different_outcomes(topic: str, records: Sequence[Record]) -> str | None:
    """Return the first call on a topic that hasn't the same outcome in all processes."""
    for calls in zip(*(record.of(topic) for record in records)):
        if any(call.outcome != calls[0].outcome for call in calls):
            return str(calls[0])
    return None


CAUSES: tuple[tuple[str, Cause], ...] = (
    ("script does not use npu_device", no_call),
    ("other variables", other_variables),
    ("adapt saw part of the data", adapted_to_a_part),
    ("shuffle seed differs per rank", different_seeds),
    ("different starts", different_starts),
    ("state in the step", state_before_the_first_step),
    ("discarded result", discarded_result),
    ("only the loss is reduced", only_loss_reduced),
    ("not reduced", not_reduced),
    ("updates differ per rank", updates_differ),
    ("not repeatable", ComparedRun.not_repeatable),
    ("same samples", same_samples),
    ("random numbers", random_with_samples),
    ("different samples", different_samples),
    ("normalized alone", normalized_alone),
    ("clipped before the reduction", clipped_before_reduction),
    ("add_loss per sample", loss_per_sample_added),
    ("global batch size", global_batch_size),
    ("sum averaged", sum_averaged),
    ("mean summed", mean_summed),
    ("state in the step", state_in_the_step),
    ("scaled rate", scaled_rate),
    ("updates by the number of ranks", multiplied_updates),
    ("different updates", different_updates),
    ("random numbers", random_in_the_step),
    ("unknown", different_gradients),
    ("metric of sums", metric_of_sums),
    ("different logs", ComparedRun.different_log),
)
"""Section of ``causes.md`` and cause. The order decides: the first cause that a run shows is the one that is named, so
those that name a line, or explain the deviations that others look at, come first.
"""

CAUSES_WITH_HOROVOD: tuple[tuple[str, Cause], ...] = (
    ("other variables", other_variables),
    ("Horovod: not reduced", horovod_not_reduced),
    ("Horovod: different variables", horovod_different_variables),
    ("Horovod: not the average", different_gradients),
)
"""The same for a script with Horovod's names, whose ranks are compared with each other only."""

NOT_COMPARABLE = ("random numbers", "not repeatable", "script does not use npu_device")
"""Causes that don't tell whether the ranks train right: numbers differ in each run, or there are no ranks."""


def cause_of(run: ComparedRun) -> tuple[str, str]:
    """Return name and text of the most specific cause; both "" if N ranks give the single-process result."""
    causes = CAUSES
    if run.single.uses_horovod:
        causes = CAUSES_WITH_HOROVOD
    for name, cause in causes:
        where = cause(run)
        if where:
            return name, text_of(name, run, str(where))
    return "", ""


def text_of(name: str, run: ComparedRun, where: str) -> str:
    """Return the section of a cause without its example, as paragraphs of one line."""
    section = re.sub(r"```python.+?```\n\n|`", "", TEXTS[name].strip(), flags=re.S)
    text = "\n".join(" ".join(paragraph.split()) for paragraph in section.split("\n\n"))
    ratio = run.ratio() or run.ratio(UPDATE)
    return text.format(ranks=run.size, ratio=f"{ratio:.2f}", step=run.first_deviating, where=where)
