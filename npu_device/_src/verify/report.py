"""The verdict of ``npurun verify``: as text, as JSON, and as a page with a picture of the ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path

from npu_device._src.verify import causes, compare
from npu_device._src.verify.process_settings import Settings

SAME, DIFFERS, NOT_COMPARABLE = 0, 1, 3


@dataclass
class Verdict:
    """The outcome.

    Attributes:
        code: exit code: 0 the same, 1 it differs, 3 not comparable.
        cause: name of the cause; "" if it is the same.
        text: what it means, and what to do.
        table: a line for each step and number of ranks.
        notes: what the user should know besides.
        ratios: by variable, the gradient of the first deviating step as a multiple of one process's; None elsewhere.
    """

    code: int
    cause: str
    text: str
    table: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ratios: dict[str, float | None] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """Return the outcome for JSON."""
        return asdict(self)


def judge(runs: Sequence[Sequence[Settings]]) -> Verdict:
    """Compare the records that the runs have left: of one process and its twin, and of each number of ranks."""
    single, moved = (compare.read(process.folder) for process in runs[0])
    verdict = Verdict(SAME, "", f"N ranks do what one process does, for {len(single.steps)} steps.")
    verdict.notes = _notes(single)
    for run in runs[1:]:
        ranks = [compare.read(process.folder) for process in run]
        if not all(record.facts["joined"] for record in ranks):
            text = "the script makes no call of npu_device, so that each rank trains a model of its own.\nWhat to do: "
            return Verdict(NOT_COMPARABLE, "no call", text + "npurun port shows what to add; see npurun docs recipes.")
        found = causes.Findings(single, moved, ranks)
        cause = causes.cause_of(found)
        verdict.table += _table(found)
        verdict.notes += _notes_on_logs(ranks)
        if cause is not None and verdict.code == SAME:
            evidence = [found.samples()] if found.samples() else []
            verdict.code, verdict.cause = DIFFERS, cause.name
            verdict.text = "\n".join([f"on {len(run)} ranks, {cause.said(found)}", *evidence])
            draws = single.calls("random")
            if draws and cause.name in ("other samples", "unknown"):
                verdict.code, verdict.cause = NOT_COMPARABLE, "random numbers"
                verdict.text = f"the step draws random numbers itself: {draws[0]['what']}, {draws[0]['where']}."
            verdict.ratios = {each.variable: each.ratio for each in found.first_of(found.gradients)}
    return verdict


def _notes(record: compare.Record) -> list[str]:
    notes = []
    if not record.calls("seed"):
        notes.append("the script sets no seed; verify has set one. Call npu.open(seed=…) so that all ranks draw alike.")
    layers = [call["layer"] for call in record.calls("batch_norm")]
    if layers:
        notes.append(
            f"batch normalisation isn't synchronized in {len(layers)} layers ({layers[0]}, …), and was compared with "
            "its moving statistics. For one process's result: BatchNormalization(synchronized=True)."
        )
    return notes


def _notes_on_logs(ranks: Sequence[compare.Record]) -> list[str]:
    """Return a note if the ranks' logs differ; those of sessions always do."""
    logs = [[step.logs for step in record.steps] for record in ranks]
    differs = any(
        values.keys() & {"loss"} and values["loss"] != other.get("loss")
        for rank in logs[1:]
        for values, other in zip(logs[0], rank)
    )
    return [
        "each rank logs the losses and metrics of its own samples; those of npu.distribute.replicate(model) are of "
        "the whole batch."
    ] * differs


def _table(found: causes.Findings) -> list[str]:
    lines = []
    for number, (mine, *ranks) in enumerate(found.steps, start=1):
        same = compare.union(ranks) == mine.rows
        off = max((each.off for each in found.gradients if each.step == number), default=0.0)
        moved = max((each.off for each in found.updates if each.step == number), default=0.0)
        lines.append(
            f"{found.size:>5} {number:>5} {sum(mine.rows.values()):>8} {'same' if same else 'other':>8}"
            f"{_off(off):>12}{_off(moved):>12}"
        )
    return lines


def _off(value: float) -> str:
    return f"off {value:.0e}" if value else "same"


def text(verdict: Verdict) -> str:
    """Return the outcome for the terminal."""
    head = [f"{'ranks':>5} {'step':>5} {'samples':>8} {'':>8}{'gradients':>12}{'updates':>12}", *verdict.table]
    notes = [f"note: {note}" for note in verdict.notes]
    names = {SAME: "the same", DIFFERS: "differs", NOT_COMPARABLE: "not comparable"}
    return "\n".join([*(head if verdict.table else []), *notes, "", f"{names[verdict.code]}: {verdict.text}"])


def write_page(verdict: Verdict, path: Path) -> None:
    """Write the outcome as one self-contained page: each variable's gradient as a multiple of one process's."""
    bars = []
    for place, (name, ratio) in enumerate(verdict.ratios.items()):
        y, width = 20 * place, 0 if ratio is None else min(400.0, 200 * abs(ratio))
        said = "another direction" if ratio is None else f"{ratio:.3f}"
        bars.append(
            f'<text x="0" y="{y + 14}">{escape(name)}</text><rect x="320" y="{y + 3}" width="{width:.0f}" height="13" '
            f'fill="#4f86d9"/><text x="{330 + width:.0f}" y="{y + 14}">{said}</text>'
        )
    height = 20 * len(bars) + 4
    picture = f'<svg viewBox="0 0 900 {height}" width="900" height="{height}" font-size="12">{"".join(bars)}</svg>'
    path.write_text(
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>npurun verify</title></head><body '
        f'style="font-family: system-ui, sans-serif; margin: 2em"><h1>npurun verify</h1><pre>{escape(text(verdict))}'
        f"</pre><h2>Gradients as a multiple of one process's</h2>{picture}</body></html>\n",
        encoding="utf-8",
    )
