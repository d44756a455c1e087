"""What was done to each file, what wasn't, and why: as text, as JSON, and as one page of HTML."""

from __future__ import annotations

import difflib
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
        is_open = any(finding.kind == OPEN for finding in self.findings)
        return "unchanged, since questions are open" if is_open else "ported" if self.diff else "nothing to do"

    @property
    def code(self) -> int:
        return 0 if self.verdict in ("ported", "nothing to do") else 1


def text(results: Sequence[Result]) -> str:
    lines = []
    for result in results:
        lines.append(f"{result.path}: {result.verdict}")
        rules: dict[tuple[str, str], list[Finding]] = {}
        for each in result.findings:
            if each.kind == OPEN:
                lines += [f"  line {each.line}: {each.text}", f"      {each.code}"]
                lines += [f"    - {choice}" for choice in each.choices]
            elif each.kind == NOTE or result.code == 0:
                rules.setdefault(("look at" if each.kind == NOTE else "done:", each.rule), []).append(each)
        for (head, rule), found in sorted(rules.items()):
            numbers = ", ".join(str(each.line) for each in found)
            lines.append(f"  {head} {rule}, line {numbers}: {found[0].text}")
    return "\n".join(lines)


def as_json(results: Sequence[Result]) -> str:
    return json.dumps([{**asdict(each), "verdict": each.verdict} for each in results], indent=1)


def page(results: Sequence[Result]) -> str:
    body, tags = "", {"+": "ins", "-": "del"}
    for result in results:
        rows = "".join(
            f'<tr class="{one.kind}"><td>{one.line}<td>{one.kind}<td>{escape(one.rule)}<td><code>{escape(one.code)}'
            f"</code><br>{escape(one.text)}{''.join(f'<li>{escape(choice)}</li>' for choice in one.choices)}</tr>"
            for one in result.findings
        )
        lines = [(tags.get(line[:1], "span"), escape(line)) for line in result.diff.splitlines()]
        shown = "".join(f"<{tag}>{line}</{tag}" + (">\n" if tag == "span" else ">") for tag, line in lines)
        body += f"<h2>{escape(result.path)}</h2><p>{escape(result.verdict)}</p><table>{rows}</table><pre>{shown}</pre>"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>npurun port</title>'
        f"<style>{_STYLE}</style></head><body><h1>npurun port</h1>{body}</body></html>\n"
    )


def diff(old: str, new: str, name: str) -> str:
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
