"""Prints a verdict of ``npurun verify``: as text, and as a page with a picture of the ratios."""

from __future__ import annotations

from html import escape

from npu_device._src.verify.verdict import DIFFERS, NOT_COMPARABLE, SAME, Verdict

_NAMES = {SAME: "the same", DIFFERS: "differs", NOT_COMPARABLE: "not comparable"}
_HEAD = f"{'ranks':>5} {'step':>5} {'samples':>8} {'':>8}{'gradients':>12}{'updates':>12}"


def text(verdict: Verdict) -> str:
    """Return the outcome for the terminal."""
    ranks = ""
    if verdict.ranks:
        ranks = f" on {verdict.ranks} ranks"
    return "\n".join(
        [
            _HEAD,
            *verdict.table,
            *(f"note: {note}" for note in verdict.notes),
            "",
            f"{_NAMES[verdict.code]}{ranks}: {verdict.text}",
            *(f"not compared: {missed}" for missed in verdict.missed),
        ]
    )


def page(verdict: Verdict) -> str:
    """Return the outcome as one self-contained page: the gradient of each variable as a multiple of one process's."""
    rows = []
    for name, ratio in verdict.ratios.items():
        multiple = "another direction"
        if ratio is not None:
            multiple = f"{ratio:.3f}"
        width = 200 * min(abs(ratio or 0), 2)
        rows.append(f'<tr><td>{escape(name)}<td><hr style="width:{width:.0f}px"><td>{multiple}')
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>npurun verify</title><style>'
        "body { font-family: system-ui, sans-serif; margin: 2em } hr { border: 0; height: 13px; background: #4f86d9 }"
        f"</style></head><body><h1>npurun verify</h1><pre>{escape(text(verdict))}</pre>"
        f"<h2>Gradients as a multiple of one process's</h2><table>{''.join(rows)}</table></body></html>\n"
    )
