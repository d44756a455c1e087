"""One script while it is ported: the edits, which are made at once, and what the report says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import libcst as cst

from npu_device._src.port.rules import RULES
from npu_device._src.port.script import BLOCKS, Script

DONE = "done"
NOTE = "note"
OPEN = "open"


class Refused(Exception):
    """A file that can't be ported, with the reason and the remedy."""


@dataclass(frozen=True)
class Finding:
    """One line of the report: something DONE, a NOTE for a person, or an OPEN question, which keeps the file."""

    rule: str
    kind: str
    line: int
    code: str
    text: str
    choices: tuple[str, ...] = ()


class Port(Script, cst.CSTTransformer):
    """A script with edits, which ``apply`` makes all at once; libcst.ParserSyntaxError if it isn't Python 3.

    Attributes:
        imports: lines that are imported with the package.
        opened_after: statements before which the job mustn't be opened.
        replicated: names of replicated models, with their scopes.
    """

    def __init__(self, code: str) -> None:
        super().__init__(code)
        cst.CSTTransformer.__init__(self)
        self.findings: list[Finding] = []
        self.imports: list[str] = []
        self.opened_after: list = []
        self.replicated = set[tuple[str, Any]]()
        # Lines to insert, by statement and whether they follow it.
        self._inserted: dict[tuple[Any, bool], dict[str, None]] = {}
        self._replaced: dict[Any, str] = {}
        # What stands for an expression in new code, and the name that takes its place.
        self._moved: dict[Any, tuple[str, str]] = {}
        self._text_by_mark: dict[str, str] = {}
        self._guards: dict[Any, str] = {}

    def report(self, kind: str, rule: str, node: Any, text: str = "") -> None:
        """Add a line to the report, once; without a text, the text of the rule."""
        line = self.line(node)
        code = self.lines[line - 1].strip()
        choices: tuple[str, ...] = ()
        if kind == OPEN:
            choices = RULES[rule].choices
        finding = Finding(rule, kind, line, code, text or RULES[rule].text, choices)
        if finding not in self.findings:
            self.findings.append(finding)
            self.findings.sort(key=lambda finding: (finding.line, finding.rule))

    def own_statement(self, node: Any) -> Any:
        """Return the statement of a node, for lines around it; Refused if it shares its line with another one."""
        statement = self.statement(node)
        for outer in (node, *self.around(node)):
            is_shared = isinstance(outer, cst.SimpleStatementLine) and len(outer.body) > 1
            # The line also has what the statement depends on: if small: model.compile()
            if is_shared or isinstance(outer, cst.SimpleStatementSuite):
                line = self.line(node)
                raise Refused(f"line {line}: several statements. Put each on a line of its own")
            if outer is statement:
                break
        return statement

    def is_replicated(self, model: Any) -> bool:
        """Return True if a model is replicated by this name, as far as it is seen from here."""
        name = self.text(model)
        # An attribute may have been replicated in another method.
        if name.startswith("self."):
            return any(replicated == name for replicated, _ in self.replicated)
        return any((name, scope) in self.replicated for scope in self.scopes_of(name, model))

    def unused_name(self, name: str) -> str:
        """Return a name that the script doesn't use."""
        used = {node.value for node in self.of(cst.Name)}
        while name in used:
            name += "_"
        return name

    def insert(self, statement: Any, line: str, after: bool) -> None:
        """Put a line before or after a statement, once."""
        self._inserted.setdefault((statement, after), {})[line] = None

    def replace(self, node: Any, template: str) -> None:
        """Replace an expression, an argument or an import; {} in the template is what it was."""
        self._replaced[node] = template

    def move(self, node: Any, name: str) -> str:
        """Put a name in the place of an expression; return what stands for the expression, with its edits, in new
        code of the same statement or around it.
        """
        mark, _ = self._moved.setdefault(node, (f"__moved_{len(self._moved)}__", name))
        return mark

    def guard(self, statement: Any, code: str) -> None:
        """Let a statement be the body of the first statement in ``code``."""
        self._guards.setdefault(statement, code)

    @property
    def is_open(self) -> bool:
        """Return True if a question is open, so that the file stays as it is."""
        return any(finding.kind == OPEN for finding in self.findings)

    def __bool__(self) -> bool:
        return bool(self._inserted or self._replaced or self._guards)

    def apply(self) -> str:
        """Return the ported source."""
        # A statement with lines around it isn't guarded: the lines may use what it assigns.
        for statement, _ in self._inserted:
            self._guards.pop(statement, None)
        return str(self.module.visit(self).code)

    # Edits, made while the nodes are left, from the inside

    def on_leave(self, original: Any, updated: Any) -> Any:
        if original in self._replaced:
            updated = self._replacement(original, updated)
        if original in self._moved:
            mark, name = self._moved[original]
            self._text_by_mark[mark] = cst.Module([]).code_for_node(updated)
            return cst.parse_expression(name)
        if isinstance(original, BLOCKS):
            statements = zip(original.body, updated.body)
            return updated.with_changes(body=list(self._block(statements)))
        return updated

    def _replacement(self, original: Any, updated: Any) -> Any:
        """Return the nodes that replace one, whose own parts may have been changed before."""
        plain = updated
        if isinstance(original, cst.Arg):
            # Comments stand behind an argument, or in its comma.
            plain = updated.with_changes(
                comma=cst.MaybeSentinel.DEFAULT, whitespace_after_arg=cst.SimpleWhitespace("")
            )
        code = cst.Module([]).code_for_node(plain).strip()
        code = self._completed(self._replaced[original].replace("{}", code))
        if isinstance(original, (cst.Import, cst.ImportFrom)):
            return cst.parse_statement(code).body[0]
        arguments = list(cst.parse_expression(f"_({code})").args)
        # In a call, an expression may go over several lines.
        if not isinstance(original, cst.Arg):
            return arguments[0].value
        arguments[-1] = arguments[-1].with_changes(
            comma=updated.comma, whitespace_after_arg=updated.whitespace_after_arg
        )
        return cst.FlattenSentinel(arguments)

    def _completed(self, code: str) -> str:
        """Return new code with the expressions that have moved into it."""
        for mark, text in self._text_by_mark.items():
            code = code.replace(mark, text)
        return code

    def _block(self, statements: Any) -> Iterator:
        """Yield the statements of a block with the lines that belong before and after them, and guards around them."""
        for guard, group in itertools.groupby(statements, lambda pair: self._guards.get(pair[0])):
            pairs = list(group)
            if guard is None:
                for original, statement in pairs:
                    yield from self._with_lines(original, statement)
            else:
                yield from _guarded(guard, [statement for _, statement in pairs])

    def _with_lines(self, original: Any, statement: Any) -> Iterator:
        lines = self._lines(original, after=False)
        if lines:
            # Blank lines go above the new lines; comments stay with the statement.
            above = list(getattr(statement, "leading_lines", ()))
            blank = list(itertools.takewhile(lambda line: line.comment is None, above))
            # Without blank lines, the original node stays as it is.
            if blank:
                lines[0] = lines[0].with_changes(leading_lines=blank)
                statement = statement.with_changes(leading_lines=above[len(blank) :])
        yield from lines
        yield statement
        yield from self._lines(original, after=True)

    def _lines(self, original: Any, after: bool) -> list:
        lines = self._inserted.get((original, after), ())
        return [cst.parse_statement(self._completed(line)) for line in lines]


def _guarded(code: str, statements: list) -> Iterator:
    """Yield a guard with statements as its body, and what comes after it."""
    guard, *following = cst.parse_module(code).body
    leading, *later = statements
    body = [leading.with_changes(leading_lines=())]
    for statement in later:
        # Only lines with a comment are indented, since the others are empty.
        lines = []
        for line in statement.leading_lines:
            lines.append(line.with_changes(indent=line.comment is not None))
        body.append(statement.with_changes(leading_lines=lines))
    yield guard.with_changes(leading_lines=leading.leading_lines, body=cst.IndentedBlock(body))
    yield from following
