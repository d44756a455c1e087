"""What was done to each file, what wasn't, and why: as text, as JSON, and as one page of HTML."""

from __future__ import annotations

import difflib
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape

from npu_device._src.port.port import NOTE, OPEN, Finding

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:75em}pre{background:#f6f8fa;padding:1em}"
    "ins,del{text-decoration:none;display:block}ins{background:#d9f2e0}del{background:#fbe0e0}.open{color:#b30000}"
    "td{padding:.2em .8em;vertical-align:top}pre{overflow-x:auto}"
)


@dataclass(frozen=True)
class PortedFile:
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
        if self.diff:
            return "ported"
        return "nothing to do"

    @property
    def code(self) -> int:
        """Return 0 if nothing is open, else 1."""
        return int(self.verdict not in ("ported", "nothing to do"))


def text(files: Sequence[PortedFile]) -> str:
    return "\n".join(line for file in files for line in _lines(file))


def _lines(file: PortedFile) -> list[str]:
    """Return the lines of a file: its questions one by one, and the rest by rule."""
    lines = [f"{file.path}: {file.verdict}"]
    by_rule: dict[tuple[str, str], list[Finding]] = {}
    for finding in file.findings:
        if finding.kind == OPEN:
            lines.append(f"  line {finding.line}: {finding.text}")
            lines.append(f"      {finding.code}")
            lines += [f"    - {choice}" for choice in finding.choices]
        elif finding.kind == NOTE:
            by_rule.setdefault(("look at", finding.rule), []).append(finding)
        elif file.code == 0:
            # A file without a change needs no list of what was done.
            by_rule.setdefault(("done:", finding.rule), []).append(finding)
    for (head, rule), findings in sorted(by_rule.items()):
        numbers = ", ".join(str(finding.line) for finding in findings)
        lines.append(f"  {head} {rule}, line {numbers}: {findings[0].text}")
    return lines


def as_json(files: Sequence[PortedFile]) -> str:
    return json.dumps([{**asdict(file), "verdict": file.verdict} for file in files], indent=1)


def page(files: Sequence[PortedFile]) -> str:
    body = "".join(map(_section, files))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>npurun port</title>'
        f"<style>{_STYLE}</style></head><body><h1>npurun port</h1>{body}</body></html>\n"
    )


def _section(file: PortedFile) -> str:
    rows = "".join(map(_row, file.findings))
    lines = "".join(map(_diff_line, file.diff.splitlines()))
    return f"<h2>{escape(file.path)}</h2><p>{escape(file.verdict)}</p><table>{rows}</table><pre>{lines}</pre>"


def _row(finding: Finding) -> str:
    choices = "".join(f"<li>{escape(choice)}</li>" for choice in finding.choices)
    return (
        f'<tr class="{finding.kind}"><td>{finding.line}<td>{finding.kind}<td>{escape(finding.rule)}'
        f"<td><code>{escape(finding.code)}</code><br>{escape(finding.text)}{choices}</tr>"
    )


def _diff_line(line: str) -> str:
    if line.startswith("+"):
        return f"<ins>{escape(line)}</ins>"
    if line.startswith("-"):
        return f"<del>{escape(line)}</del>"
    # Only this one needs a line break: insertions and deletions are blocks.
    return f"<span>{escape(line)}</span>\n"


def diff(before: str, after: str, name: str) -> str:
    # Lines end where they do for ``patch``: a form feed is no end.
    lines_before, lines_after = (
        io.StringIO(text, newline="\n").readlines() for text in (before, after)
    )
    # Lines without an end are marked as in git, or the diff couldn't be applied.
    lines = difflib.unified_diff(lines_before, lines_after, f"a/{name}", f"b/{name}")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
