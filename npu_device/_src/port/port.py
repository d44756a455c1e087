"""The port of one script while it is made: the table of rules, the edits, and what the report will say."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any, NamedTuple

import libcst as cst

from npu_device._src.port.script import BLOCKS, Script

DONE, NOTE, OPEN = "done", "note", "open"


class Rule(NamedTuple):
    """A section of ``rules.md``; one with ``choices`` asks a question, one with ``calls`` needs no code of its own."""

    name: str
    does: str
    choices: tuple[str, ...]
    action: str
    calls: tuple[str, ...]
    example: str


def _rule(section: str) -> Rule:
    name, _, rest = section.partition("\n")
    text, _, example = rest.partition("```diff\n")
    head, _, patterns = text.partition("\nCalls (")
    does, *choices = [" ".join(each.split()) for each in re.split(r"^- ", head, flags=re.M)]
    calls = tuple(re.findall(r"`(.+?)`", patterns))
    return Rule(name, does, tuple(choices), patterns.partition(")")[0], calls, example.partition("```")[0])


PAGE = Path(__file__).with_name("rules.md").read_text(encoding="utf-8")
_HEAD, *_SECTIONS = re.split(r"^### ", PAGE, flags=re.M)[1:]
RULES = {rule.name: rule for rule in map(_rule, _SECTIONS)}
WORDS = {line.partition(":")[0]: tuple(re.findall("`(.+?)`", line)) for line in _HEAD.split("\n- ")[1:]}


class Finding(NamedTuple):
    """One line of the report: something done, a note for a person, or an open question, which keeps the file."""

    rule: str
    kind: str
    line: int
    code: str
    text: str
    choices: tuple[str, ...] = ()


class Port(Script):
    """A script with edits, which ``apply`` makes all at once, and findings. The rest keeps its layout and comments."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.findings: list[Finding] = []
        self.imports: list[str] = []
        self.after: list[Any] = []  # statements before which the job mustn't be opened
        self.replicated: set[tuple[str, Any]] = set()  # names of models, and their scopes
        self._lines: dict[tuple[Any, bool], dict[str, None]] = {}
        self._replaced: dict[Any, str] = {}
        self._guarded: dict[Any, tuple[str, bool]] = {}

    def found(self, kind: str, rule: str, node: Any, text: str = "") -> None:
        """Add a line to the report, once; the text is the rule's if none is given."""
        line, choices = self.line(node), RULES[rule].choices if kind == OPEN else ()
        finding = Finding(rule, kind, line, self.lines[line - 1].strip(), text or RULES[rule].does, choices)
        self.findings = sorted({*self.findings, finding}, key=lambda each: (each.line, each.rule))

    def insert(self, statement: Any, line: str, after: bool) -> None:
        """Put a line before or after a statement, once."""
        self._lines.setdefault((statement, after), {})[line] = None

    def replace(self, node: Any, template: str) -> None:
        """Replace an expression, an argument or an import; {} in the template is what it was."""
        self._replaced[node] = template

    def guard(self, statement: Any, head: str, wait: bool = False) -> None:
        """Put a statement below ``head``; with ``wait``, a barrier follows."""
        self._guarded.setdefault(statement, (head, wait))

    @property
    def is_open(self) -> bool:
        """Return True if a question is open, so that the file stays as it is."""
        return any(finding.kind == OPEN for finding in self.findings)

    def __bool__(self) -> bool:
        return bool(self._lines or self._replaced or self._guarded)

    def apply(self) -> str:
        """Return the changed source."""
        return self.module.visit(_Changer(self._lines, self._replaced, self._guarded)).code


class _Changer(cst.CSTTransformer):
    def __init__(self, lines: Any, replaced: Any, guarded: Any) -> None:
        super().__init__()
        self._lines, self._replaced, self._guarded = lines, replaced, guarded

    def on_leave(self, original: Any, updated: Any) -> Any:
        updated = super().on_leave(original, updated)
        if original in self._replaced:
            whole = self._replaced[original].replace("{}", cst.Module([]).code_for_node(updated).strip().rstrip(","))
            if isinstance(original, cst.Arg):
                args = cst.parse_expression(f"_({whole})").args
                return cst.FlattenSentinel([*args[:-1], args[-1].with_changes(comma=updated.comma)])
            if isinstance(original, (cst.Import, cst.ImportFrom)):
                return _parsed([whole])[0].body[0]
            return cst.parse_expression(whole)
        if isinstance(original, BLOCKS):
            return updated.with_changes(body=list(self._block(zip(original.body, updated.body))))
        return updated

    def _block(self, statements: Any) -> Any:
        """Yield a block's statements with the lines that belong before and after them, and guards around them."""
        for guard, group in itertools.groupby(statements, lambda pair: self._guard(pair[0])):
            pairs = list(group)
            for original, statement in pairs if guard is None else ():
                new = _parsed(self._lines.get((original, False), ()))
                above = list(getattr(statement, "leading_lines", ()))
                blank = list(itertools.takewhile(lambda line: line.comment is None, above if new else ()))
                if blank:  # the comments stay with the statement
                    new[0] = new[0].with_changes(leading_lines=blank)
                yield from [*new, statement.with_changes(leading_lines=above[len(blank) :]) if blank else statement]
                yield from _parsed(self._lines.get((original, True), ()))
            if guard is not None:
                above = pairs[0][1].leading_lines
                body = [pairs[0][1].with_changes(leading_lines=()), *(_tidy(statement) for _, statement in pairs[1:])]
                [head] = _parsed([f"{guard[0]}:\n    pass\n"])
                yield head.with_changes(leading_lines=above, body=cst.IndentedBlock(body))
                yield from _parsed(["npu.distribute.barrier()"] if guard[1] else [])

    def _guard(self, statement: Any) -> Any:
        has_lines = (statement, True) in self._lines or (statement, False) in self._lines
        return None if has_lines else self._guarded.get(statement)


def _parsed(lines: Any) -> list[Any]:
    return [cst.parse_statement(line) for line in lines]


def _tidy(statement: Any) -> Any:
    """Return a statement whose empty lines above have no blanks."""
    above = [line.with_changes(indent=line.comment is not None) for line in statement.leading_lines]
    return statement.with_changes(leading_lines=above)
