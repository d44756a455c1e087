"""A parsed script: full names, where values come from, and which functions a statement may run. Knows no rule."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any, NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

_SAME = (  # the names of one thing
    *(("tensorflow.compat.v1", "tensorflow"), ("tensorflow.compat.v2", "tensorflow"), ("tensorflow.keras", "keras")),
    *(("tensorflow.python.keras", "keras"), ("tf_keras", "keras"), ("tensorflow.optimizers", "keras.optimizers")),
    *(("tensorflow.losses", "keras.losses"), ("tensorflow.initializers", "keras.initializers")),
)
BLOCKS = (cst.Module, cst.IndentedBlock)
_SCOPES = (cst.Module, cst.FunctionDef, cst.ClassDef)
_WHOLE, _UNKNOWN = -1, -2


class Assigned(NamedTuple):
    """One assignment; ``place`` is the part of the value that a name gets, if it doesn't get the whole."""

    value: Any
    statement: Any
    scope: Any
    place: int = _WHOLE


class Script:
    """A script; libcst.ParserSyntaxError if it isn't Python 3."""

    def __init__(self, code: str) -> None:
        wrapper = MetadataWrapper(cst.parse_module(code), unsafe_skip_copy=True)
        self.module = wrapper.module
        self.lines = code.splitlines()
        self._places = wrapper.resolve(PositionProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._nodes = list(walk(self.module))
        self.calls = self.of(cst.Call)
        self._defined: dict[str, list[Any]] = {}
        for node in self.of(cst.FunctionDef):
            self._defined.setdefault(node.name.value, []).append(node)
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
        """Return the nodes of a kind, in their order."""
        return [node for node in self._nodes if isinstance(node, kind)]

    def text(self, node: Any) -> str:
        """Return a node's source; "" for None."""
        return self.module.code_for_node(node).strip() if node is not None else ""

    def line(self, node: Any) -> int:
        """Return the number of a node's first line."""
        return int(self._places[node].start.line)

    def up(self, node: Any) -> Iterator[Any]:
        """Yield the nodes around a node, from the inside."""
        while (node := self._parents.get(node)) is not None:
            yield node

    def scope(self, node: Any) -> Any:
        """Return the function, class or module around a node."""
        return next(each for each in self.up(node) if isinstance(each, _SCOPES))

    def statement(self, node: Any) -> Any:
        """Return the statement around a node that stands in a block of its own."""
        return next((each for each in [node, *self.up(node)] if isinstance(self._parents.get(each), BLOCKS)), None)

    def name(self, node: Any) -> str:
        """Return the full name of what an import has brought ("keras.Model"); "" for anything else."""
        words = dotted(node).split(".")
        if words[0] not in self.aliases:
            return ""
        name = ".".join([self.aliases[words[0]], *words[1:]])
        for old, new in _SAME:
            if f"{name}.".startswith(f"{old}."):
                name = new + name[len(old) :]
        return name

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
            around = [each for each in self.up(node) if isinstance(each, cst.FunctionDef) and name in parameters(each)]
            return self._arguments(name, around[0]) if around else []
        if made.place == _WHOLE:
            return [made.value]
        results = [each for each in self.origins(made.value) if isinstance(each, cst.Tuple)] if made.place >= 0 else []
        return [each.elements[made.place].value for each in results if made.place < len(each.elements)]

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
        return any(self.name(base).endswith(wanted) for base in bases) or any(
            self.inherits(each, wanted) for each in known
        )

    def functions(self, node: Any, at: Any) -> list[Any]:
        """Return the functions of the script that a name may mean in a call."""
        last = dotted(node).rpartition(".")[2]
        if not last or self.name(node):
            return []
        wanted = "__init__" if last in self.classes and isinstance(node, cst.Name) else last
        found = self._defined.get(wanted, [])
        owners = {each: self.scope(each) for each in found}
        if not isinstance(node, cst.Name):
            return [each for each in found if isinstance(owners[each], cst.ClassDef)]
        owner = self.classes.get(last)
        found = [
            each for each in found if owners[each] is owner or not (owner or isinstance(owners[each], cst.ClassDef))
        ]
        return ([each for each in found if self.line(each) < self.line(at)] or found)[-1:]  # of several definitions

    def _arguments(self, name: str, function: Any) -> list[Any]:
        """Return what the script's calls of a function pass for a parameter."""
        place, values = parameters(function).index(name), []
        for call in (each for each in self.calls if function in self.callees(each)):
            is_bound = isinstance(self.scope(function), cst.ClassDef) and isinstance(call.func, cst.Attribute)
            value = keyword(call, name, place - is_bound)
            values += [value] if value is not None else []
        return values

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


def walk(node: Any, defined: bool = True) -> Iterator[Any]:
    """Yield a node and all below it; without ``defined``, not what functions and classes hold that it defines."""
    yield node
    for child in node.children:
        if defined or not is_definition(child):
            yield from walk(child, defined)


def is_definition(node: Any) -> bool:
    """Return True for a function or a class."""
    return isinstance(node, (cst.FunctionDef, cst.ClassDef))


def dotted(node: Any) -> str:
    """Return "a.b.c" of names and attributes; "" for anything else."""
    if isinstance(node, cst.Attribute):
        return f"{dotted(node.value)}.{node.attr.value}" if dotted(node.value) else ""
    return node.value if isinstance(node, cst.Name) else ""


def parameters(function: Any) -> list[str]:
    """Return the names of a function's parameters."""
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


def target_of(statement: Any) -> Any:
    """Return what a statement assigns to, if it does nothing else; else None."""
    is_simple = isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1
    assign = statement.body[0] if is_simple else None
    return assign.targets[0].target if isinstance(assign, cst.Assign) and len(assign.targets) == 1 else None
