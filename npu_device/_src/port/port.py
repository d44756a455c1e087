"""One script while it is ported: where its values come from, the table of rules, the edits, and the findings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

_TENSORFLOW = re.compile(r"^tensorflow\.compat\.v[12](?=\.|$)")
_KERAS = re.compile(r"^((tensorflow\.(python\.)?|tf_)keras|tensorflow(?=\.(optimizers|losses|initializers)))(?=\.|$)")
_BLOCKS, _SCOPES = (cst.Module, cst.IndentedBlock), (cst.Module, cst.FunctionDef, cst.ClassDef)
_WHOLE, _UNKNOWN = -1, -2
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


@dataclass(frozen=True)
class Finding:
    """One line of the report: something done, a note for a person, or an open question, which keeps the file."""

    rule: str
    kind: str
    line: int
    code: str
    text: str
    choices: tuple[str, ...] = ()


class Assigned(NamedTuple):
    """One assignment; ``place`` is the part of the value that a name gets, if it doesn't get the whole."""

    value: Any
    statement: Any
    scope: Any
    place: int = _WHOLE


class Port:
    """A script with edits, which ``apply`` makes all at once; libcst.ParserSyntaxError if it isn't Python 3."""

    def __init__(self, code: str) -> None:
        self.findings: list[Finding] = []
        self.imports: list[str] = []
        self.after: list[Any] = []  # statements before which the job mustn't be opened
        self.replicated: set[tuple[str, Any]] = set()  # names of models, and their scopes
        self._lines: dict[tuple[Any, bool], dict[str, None]] = {}
        self._replaced: dict[Any, str] = {}
        self._guarded: dict[Any, tuple[str, bool]] = {}
        wrapper = MetadataWrapper(cst.parse_module(code), unsafe_skip_copy=True)
        self.module = wrapper.module
        self.lines = code.splitlines()
        self._places = wrapper.resolve(PositionProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._nodes = list(walk(self.module))
        self.calls = self.of(cst.Call)
        self._functions = self.of(cst.FunctionDef)
        self.classes = {node.name.value: node for node in self.of(cst.ClassDef)}
        self.aliases: dict[str, str] = {}  # what names of the script mean
        self.imported: list[tuple[str, Any]] = []
        self._assigned: dict[str, list[Assigned]] = {}
        for node in self._nodes:
            if isinstance(node, (cst.Import, cst.ImportFrom)):
                self._read_import(node)
            elif isinstance(node, cst.Assign):
                for target in node.targets:
                    self._assign(target.target, node.value, node)
            elif isinstance(node, (cst.For, cst.AugAssign)):
                self._assign(node.target, node, node, _UNKNOWN)

    def of(self, kind: Any) -> list[Any]:
        return [node for node in self._nodes if isinstance(node, kind)]

    def text(self, node: Any) -> str:
        return self.module.code_for_node(node).strip() if node is not None else ""

    def line(self, node: Any) -> int:
        return int(self._places[node].start.line)

    def up(self, node: Any) -> Iterator[Any]:
        """Yield the nodes around a node, from the inside."""
        while (node := self._parents.get(node)) is not None:
            yield node

    def scope(self, node: Any) -> Any:
        return next(each for each in self.up(node) if isinstance(each, _SCOPES))

    def statement(self, node: Any) -> Any:
        """Return the statement around a node that stands in a block of its own."""
        return next((each for each in [node, *self.up(node)] if isinstance(self._parents.get(each), _BLOCKS)), None)

    @staticmethod
    def target(statement: Any) -> Any:
        """Return what a statement assigns to, if it does nothing else; else None."""
        is_simple = isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1
        assign = statement.body[0] if is_simple else None
        return assign.targets[0].target if isinstance(assign, cst.Assign) and len(assign.targets) == 1 else None

    def name(self, node: Any) -> str:
        """Return the full name of what an import has brought ("keras.Model"); "" for anything else."""
        words = dotted(node).split(".")
        if words[0] not in self.aliases:
            return ""
        return _KERAS.sub("keras", _TENSORFLOW.sub("tensorflow", ".".join([self.aliases[words[0]], *words[1:]])))

    def assigned(self, node: Any) -> Assigned | None:
        """Return the last assignment of a name before it in its scope; else the last in a scope around it."""
        name, line = dotted(node), self.line(node)
        for depth, scope in enumerate(each for each in self.up(node) if isinstance(each, _SCOPES)):
            is_class = name.startswith("self.") and isinstance(scope, cst.ClassDef)
            here = [each for each in self._assigned.get(name, ()) if each.scope is scope or is_class]
            before = [each for each in here if self.line(each.statement) < line]
            if before or (here and depth):
                return (before if depth == 0 else here)[-1]
        return None

    def origins(self, node: Any) -> list[Any]:
        """Return where a value comes from, one step back: an assignment, arguments, or results of a function."""
        if isinstance(node, cst.Call):
            inside = [each for function in self.callees(node) for each in walk(function.body, defined=False)]
            return [each.value for each in inside if isinstance(each, cst.Return) and each.value is not None]
        name = dotted(node)
        made = self.assigned(node) if name and not self.name(node) else None
        if made is None:
            return [value for each in self.takers(name, node)[:1] for value in self._arguments(name, each)]
        if made.place == _WHOLE:
            return [made.value]
        results = [each for each in self.origins(made.value) if isinstance(each, cst.Tuple)] if made.place >= 0 else []
        return [each.elements[made.place].value for each in results if made.place < len(each.elements)]

    def takers(self, name: str, node: Any) -> list[Any]:
        """Return the functions around a node that have a parameter of this name, from the inside."""
        return [each for each in self.up(node) if isinstance(each, cst.FunctionDef) and name in _parameters(each)]

    def maker(self, node: Any) -> str:
        """Return the full name of what was called to make a value; "" if unknown."""
        made = next(iter(self.origins(node)), None) if dotted(node) else node
        return self.name(made.func) if isinstance(made, cst.Call) else ""

    def last(self, call: Any) -> str:
        """Return the last word of what is called."""
        return (self.name(call.func) or dotted(call.func) or method(call)).rpartition(".")[2]

    def callees(self, call: Any) -> list[Any]:
        """Return the functions of the script that a call runs, or passes on to be run."""
        found = self.functions(call.func, call)
        return found or [each for arg in call.args for each in self.functions(arg.value, call)]

    def runs(self, node: Any, wanted: Container[Any], seen: set[Any] | None = None) -> bool:
        """Return True if a node contains one of the wanted ones, or a function that it may call does."""
        seen = set() if seen is None else seen
        for each in walk(node, defined=False):
            if each in wanted:
                return True
            new = [one for one in self.callees(each) if one not in seen] if isinstance(each, cst.Call) else []
            seen.update(new)
            if any(self.runs(function.body, wanted, seen) for function in new):
                return True
        return False

    def inherits(self, owner: Any, wanted: tuple[str, ...]) -> bool:
        """Return True if a class of the script derives from one whose name ends so, directly or not."""
        bases = [each.value for each in owner.bases] if isinstance(owner, cst.ClassDef) else []
        known = [self.classes.get(dotted(base)) for base in bases if dotted(base) != owner.name.value]
        return any(self.name(one).endswith(wanted) for one in bases) or any(self.inherits(one, wanted) for one in known)

    def functions(self, node: Any, at: Any) -> list[Any]:
        """Return the functions of the script that a name may mean in a call."""
        last = dotted(node).rpartition(".")[2]
        if not last or self.name(node):
            return []
        wanted = "__init__" if last in self.classes and isinstance(node, cst.Name) else last
        found, owner = [each for each in self._functions if each.name.value == wanted], self.classes.get(last)
        if not isinstance(node, cst.Name):
            return [each for each in found if isinstance(self.scope(each), cst.ClassDef)]
        is_right = (lambda scope: scope is owner) if owner else (lambda scope: not isinstance(scope, cst.ClassDef))
        found = [each for each in found if is_right(self.scope(each))]
        return ([each for each in found if self.line(each) < self.line(at)] or found)[-1:]  # of several definitions

    def _arguments(self, name: str, function: Any) -> list[Any]:
        """Return what the calls of a function in the script pass for a parameter."""
        place, is_method = _parameters(function).index(name), isinstance(self.scope(function), cst.ClassDef)
        calls = [call for call in self.calls if function in self.callees(call)]
        values = [keyword(call, name, place - (is_method and bool(method(call)))) for call in calls]
        return [value for value in values if value is not None]

    def _read_import(self, node: Any) -> None:
        before = dotted(node.module) if isinstance(node, cst.ImportFrom) and node.module else ""
        if isinstance(node.names, cst.ImportStar) or getattr(node, "relative", False):
            self.imported.append((before, node))
            return
        for each in node.names:
            whole = ".".join(filter(None, (before, dotted(each.name))))
            self.imported.append((whole, node))
            local = dotted(each.asname.name) if each.asname else dotted(each.name).split(".")[0]
            self.aliases[local] = whole if each.asname or before else local

    def _assign(self, target: Any, value: Any, node: Any, place: int = _WHOLE) -> None:
        if isinstance(target, (cst.Tuple, cst.List)):
            same = isinstance(value, cst.Tuple) and len(value.elements) == len(target.elements)
            for number, each in enumerate(target.elements):
                part = _WHOLE if same else number if place == _WHOLE else _UNKNOWN
                self._assign(each.value, value.elements[number].value if same else value, node, part)
        elif dotted(target):
            if self.name(value) and place == _WHOLE and isinstance(target, cst.Name):
                self.aliases[target.value] = self.name(value)  # keras = tf.keras
            made = Assigned(value, self.statement(node), self.scope(node), place)
            self._assigned.setdefault(dotted(target), []).append(made)

    def found(self, kind: str, rule: str, node: Any, text: str = "") -> None:
        """Add a line to the report, once; without a text, the text of the rule."""
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
        if isinstance(original, _BLOCKS):
            return updated.with_changes(body=list(self._block(zip(original.body, updated.body))))
        return updated

    def _block(self, statements: Any) -> Any:
        """Yield the statements of a block with the lines that belong before and after them, and guards around them."""
        heads = {at: head for at, head in self._guarded.items() if not {(at, True), (at, False)} & {*self._lines}}
        for guard, group in itertools.groupby(statements, lambda pair: heads.get(pair[0])):
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
                body = [pairs[0][1].with_changes(leading_lines=())]
                for _, statement in pairs[1:]:  # empty lines have no blanks
                    lines = [each.with_changes(indent=each.comment is not None) for each in statement.leading_lines]
                    body.append(statement.with_changes(leading_lines=lines))
                [head] = _parsed([f"{guard[0]}:\n    pass\n"])
                yield head.with_changes(leading_lines=pairs[0][1].leading_lines, body=cst.IndentedBlock(body))
                yield from _parsed(["npu.distribute.barrier()"] if guard[1] else [])


def _parsed(lines: Any) -> list[Any]:
    return [cst.parse_statement(line) for line in lines]


def walk(node: Any, defined: bool = True) -> Iterator[Any]:
    """Yield a node and all below it; without ``defined``, not what functions and classes hold that it defines."""
    yield node
    for child in node.children:
        if defined or not isinstance(child, (cst.FunctionDef, cst.ClassDef)):
            yield from walk(child, defined)


def dotted(node: Any) -> str:
    """Return "a.b.c" of names and attributes; "" for anything else."""
    if isinstance(node, cst.Attribute):
        return f"{dotted(node.value)}.{node.attr.value}" if dotted(node.value) else ""
    return node.value if isinstance(node, cst.Name) else ""


def _parameters(function: Any) -> list[str]:
    given = function.params
    return [each.name.value for each in (*given.posonly_params, *given.params, *given.kwonly_params)]


def method(call: Any) -> str:
    """Return the name of the method that a call makes; "" if none."""
    func = call.func if isinstance(call, cst.Call) else None
    return func.attr.value if isinstance(func, cst.Attribute) else ""


def keyword(call: Any, name: str, place: int | None = None) -> Any:
    """Return the value of an argument, by its name or place; None if there is none."""
    for position, arg in enumerate(call.args):
        if arg.keyword.value == name if arg.keyword else position == place and not arg.star:
            return arg.value
    return None
