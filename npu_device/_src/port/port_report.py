"""What was done to each file, what wasn't, and why: as text, as JSON, and as one page of HTML."""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape

from npu_device._src.port.port import DONE, NOTE, OPEN, Finding

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:75em}pre{background:#f6f8fa;padding:1em}"
    "ins,del{text-decoration:none;display:block}ins{background:#d9f2e0}del{background:#fbe0e0}.open{color:#b30000}"
    "td{padding:.2em .8em;vertical-align:top}pre{overflow-x:auto}"
)


@dataclass(frozen=True)
class Result:
    """One file: the diff, "" if nothing changes; the findings; and why it was refused, "" if it wasn't."""

    path: str
    diff: str = ""
    findings: list[Finding] = field(default_factory=list)
    refused: str = ""

    @property
    def verdict(self) -> str:
        """Return what has become of the file."""
        if self.refused:
            return f"refused: {self.refused}"
        if any(finding.kind == OPEN for finding in self.findings):
            return "unchanged, since questions are open"
        return "ported" if self.diff else "nothing to do"

    @property
    def code(self) -> int:
        """Return the exit code of this file."""
        return 0 if self.verdict in ("ported", "nothing to do") else 1


def text(results: Sequence[Result]) -> str:
    """Return the report for a terminal."""
    return "\n".join(line for result in results for line in _lines(result))


def _lines(result: Result) -> list[str]:
    lines = [f"{result.path}: {result.verdict}"]
    for finding in (each for each in result.findings if each.kind == OPEN):
        lines += [f"  line {finding.line}: {finding.text}", f"      {finding.code}"]
        lines += [f"    - {choice}" for choice in finding.choices]
    rest = [each for each in result.findings if each.kind == NOTE or (each.kind == DONE and result.code == 0)]
    rest.sort(key=lambda each: (each.kind, each.rule))  # by line within a rule
    for (kind, rule), found in itertools.groupby(rest, lambda each: (each.kind, each.rule)):
        same = list(found)
        numbers = ", ".join(str(each.line) for each in same)
        lines.append(f"  {'look at' if kind == NOTE else 'done:'} {rule}, line {numbers}: {same[0].text}")
    return lines


def as_json(results: Sequence[Result]) -> str:
    """Return the report for a program."""
    found = [
        {**asdict(each), "verdict": each.verdict, "findings": [one._asdict() for one in each.findings]}
        for each in results
    ]
    return json.dumps(found, indent=1)


def page(results: Sequence[Result]) -> str:
    """Return the report as one self-contained page."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>npurun port</title>'
        f"<style>{_STYLE}</style></head><body><h1>npurun port</h1>{''.join(map(_section, results))}</body></html>\n"
    )


def _section(result: Result) -> str:
    rows = "".join(
        f'<tr class="{each.kind}"><td>{each.line}<td>{each.kind}<td>{escape(each.rule)}<td><code>{escape(each.code)}'
        f"</code><br>{escape(each.text)}{''.join(f'<li>{escape(choice)}</li>' for choice in each.choices)}</tr>"
        for each in result.findings
    )
    tags = {"+": "ins", "-": "del"}
    lines = [(tags.get(line[:1], "span"), escape(line)) for line in result.diff.splitlines()]
    shown = "".join(f"<{tag}>{line}</{tag}" + (">\n" if tag == "span" else ">") for tag, line in lines)
    return f"<h2>{escape(result.path)}</h2><p>{escape(result.verdict)}</p><table>{rows}</table><pre>{shown}</pre>"


def diff(old: str, new: str, name: str) -> str:
    """Return the unified diff of two versions."""
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
