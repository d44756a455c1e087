"""A script as it is read: its calls and functions, what names mean in it, and where values come from."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from typing import Any, NamedTuple

import libcst as cst
from libcst import matchers
from libcst.metadata import (
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    QualifiedNameProvider,
    QualifiedNameSource,
)

from npu_device._src.port.nodes import (
    DEFINITIONS,
    argument,
    binds,
    dotted,
    follow,
    last_word,
    method,
    parameters,
    walk,
)

_TENSORFLOW = re.compile(r"^tensorflow\.compat\.v[12](?=\.|$)")
_KERAS = re.compile(
    r"^((tensorflow\.(python\.)?|tf_)keras|tensorflow(?=\.(optimizers|losses|initializers)))(?=\.|$)"
)
_SCOPES = (cst.Module, *DEFINITIONS)
BLOCKS = (cst.Module, cst.IndentedBlock)
_ASSIGNMENT = matchers.SimpleStatementLine([matchers.Assign([matchers.AssignTarget()])])


class Assignment(NamedTuple):
    """One assignment to a name.

    Attributes:
        value: the expression; a statement, or an item of ``with``, if it isn't known which of its values the name gets.
        position: of the element that the name gets, if the expression gives several; None for the whole.
    """

    value: Any
    statement: Any
    scope: Any
    position: int | None


class Script:
    """The nodes of a script, and questions about them; libcst.ParserSyntaxError if it isn't Python 3.

    Attributes:
        module: the whole script.
        lines: its text.
        calls: all calls, in order.
        classes: the classes that it defines, by name.
        imported: full names of what it imports, with the import statements.
    """

    def __init__(self, code: str) -> None:
        # The parser makes each node once: the copy that the wrapper would make is not needed.
        wrapper = MetadataWrapper(cst.parse_module(code), unsafe_skip_copy=True)
        self.module = wrapper.module
        # As LibCST counts them: a form feed doesn't end a line.
        self.lines = re.split(r"\r\n|\r|\n", code)
        self._positions = wrapper.resolve(PositionProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._qualified_names = wrapper.resolve(QualifiedNameProvider)
        self._nodes = list(walk(self.module))
        self.calls = self.of(cst.Call)
        self._functions = self.of(cst.FunctionDef)
        self._returns = self.of(cst.Return)
        self.classes = {node.name.value: node for node in self.of(cst.ClassDef)}
        self.imported: list[tuple[str, Any]] = []
        self._assignments: dict[str, list[Assignment]] = {}
        self._imports: dict[str, list] = {}  # by the name that they bring
        for node in self._nodes:
            if isinstance(node, (cst.Import, cst.ImportFrom)):
                self._read_import(node)
            elif isinstance(node, cst.Assign):
                for target in node.targets:
                    self._read_assignment(target.target, node.value, node)
            elif isinstance(node, (cst.For, cst.AugAssign)):
                # A loop or += gives the name another value than the expression has.
                self._read_assignment(node.target, node, node)
            elif isinstance(node, (cst.NamedExpr, cst.AnnAssign)) and node.value is not None:
                self._read_assignment(node.target, node.value, node)
            elif isinstance(node, cst.WithItem) and node.asname is not None:
                # The name gets what the manager returns, which may be anything.
                self._read_assignment(node.asname.name, node, node)

    def _read_import(self, node: Any) -> None:
        package = ""
        if isinstance(node, cst.ImportFrom):
            package = dotted(node.module)
        if isinstance(node.names, cst.ImportStar) or getattr(node, "relative", False):
            # Names that a star import or a relative one brings aren't known, or are the user's.
            self.imported.append((package, node))
            return
        for alias in node.names:
            name = ".".join(filter(None, (package, dotted(alias.name))))
            self.imported.append((name, node))
            # Without an alias, ``import a.b`` brings the name a.
            brought = alias.evaluated_alias or dotted(alias.name).partition(".")[0]
            self._imports.setdefault(brought, []).append(node)

    def _read_assignment(
        self, target: Any, value: Any, node: Any, position: int | None = None
    ) -> None:
        if isinstance(target, (cst.Tuple, cst.List)):
            self._read_unpacking(target, value, node, position)
            return
        name = dotted(target)
        if not name:
            return
        assignment = Assignment(value, self.statement(node), self.scope(node), position)
        self._assignments.setdefault(name, []).append(assignment)

    def _read_unpacking(self, target: Any, value: Any, node: Any, position: int | None) -> None:
        pairs_up = isinstance(value, cst.Tuple) and len(value.elements) == len(target.elements)
        targets = [element.value for element in target.elements]
        for index, inner_target in enumerate(targets):
            # Both sides have the same number of elements: a, b = x, y
            if pairs_up:
                self._read_assignment(inner_target, value.elements[index].value, node)
            elif position is None:
                # The elements come from one value: a, b = f()
                self._read_assignment(inner_target, value, node, index)
            else:
                # Nested targets aren't followed: a, (b, c) = f()
                self._read_assignment(inner_target, node, node)

    # Nodes and their places

    def of(self, node_type: Any) -> list:
        return [node for node in self._nodes if isinstance(node, node_type)]

    def text(self, node: Any) -> str:
        if node is None:
            return ""
        return self.module.code_for_node(node).strip()

    def line(self, node: Any) -> int:
        return int(self._positions[node].start.line)

    def around(self, node: Any) -> Iterator:
        """Yield the nodes around a node, from the inside."""
        while (node := self._parents.get(node)) is not None:
            yield node

    def scope(self, node: Any) -> Any:
        return next(self._scopes(node))

    def _scopes(self, node: Any) -> Iterator:
        return (outer for outer in self.around(node) if isinstance(outer, _SCOPES))

    def statement(self, node: Any) -> Any:
        """Return the statement around a node that stands in a block of its own."""
        for outer in (node, *self.around(node)):
            if isinstance(self._parents.get(outer), BLOCKS):
                return outer
        return None

    @staticmethod
    def target(statement: Any) -> Any:
        """Return what a statement assigns to, if it does nothing else; else None."""
        if not matchers.matches(statement, _ASSIGNMENT):
            return None
        return statement.body[0].targets[0].target

    # Names

    def name(self, node: Any) -> str:
        """Return the full name of what an import has brought ("keras.Model"); "" for anything else."""
        if not dotted(node):
            return ""
        full_name = self._imported_name(node)
        if not full_name and isinstance(node, cst.Attribute):
            owner = self.name(node.value)
            if owner:
                full_name = f"{owner}.{node.attr.value}"
        elif not full_name:
            assignment = self.assigned(node)
            # A name may stand for an import: keras = tf.keras
            if assignment is not None and assignment.position is None:
                full_name = self.name(assignment.value)
        return _KERAS.sub("keras", _TENSORFLOW.sub("tensorflow", full_name))

    def _imported_name(self, node: Any) -> str:
        names = self._qualified_names.get(node, ())
        # LibCST looks names up when they are asked for.
        if callable(names):
            names = names()
        imported = [name.name for name in names if name.source is QualifiedNameSource.IMPORT]
        if imported and self._is_hidden(node):
            return ""
        # The last import counts where there are several, in try and except for example.
        return max(imported, key=self._import_index, default="")

    def _is_hidden(self, node: Any) -> bool:
        """Return True if an imported name has had another value since the import, whatever the script does."""
        while isinstance(node, cst.Attribute):
            node = node.value
        name = node.value
        line = self.line(node)
        around = list(self.around(node))
        scope = self.scope(node)
        for outer in around[: around.index(scope)]:
            # LibCST doesn't know the names of ``case``.
            if isinstance(outer, (cst.ExceptHandler, cst.MatchCase)) and binds(outer, name):
                return True
        assignments = self.assignments(name, scope)
        earlier = [a for a in assignments if self.line(a.statement) < line]
        if not earlier:
            return False
        newest = earlier[-1]
        begin = self.line(newest.statement)
        for statement in self._imports.get(name, ()):
            is_newer = begin < self.line(statement) <= line
            if is_newer and self.scope(statement) is scope:
                return False
        # In a branch that may not have run, or by one of two expressions, the name may still be the import.
        is_certain = self._parents[newest.statement] in around
        return is_certain and not isinstance(newest.value, (cst.IfExp, cst.BooleanOperation))

    def _import_index(self, name: str) -> tuple[int, str]:
        matches = []
        for index, (imported, _) in enumerate(self.imported):
            if f"{name}.".startswith(f"{imported}."):
                matches.append(index)
        return max(matches, default=-1), name

    def called_word(self, call: Any) -> str:
        """Return the last word of what is called: "reduce_mean" of ``tf.reduce_mean(x)``."""
        name = self.name(call.func) or dotted(call.func)
        return last_word(name or method(call))

    # Where values come from

    def assigned(self, node: Any) -> Assignment | None:
        """Return the last assignment of a name before it in its scope; else the last in a scope around it."""
        name = dotted(node)
        line = self.line(node)
        for depth, scope in enumerate(self.scopes_of(name, node)):
            # An attribute may be assigned in any method.
            is_attribute = name.startswith("self.") and isinstance(scope, cst.ClassDef)
            assignments = self._assignments.get(name, ())
            candidates = [a for a in assignments if a.scope is scope or is_attribute]
            if depth == 0:
                candidates = [a for a in candidates if self.line(a.statement) < line]
            # Lines below in an outer scope may run before the name is used, when the function isn't called yet.
            if candidates:
                return candidates[-1]
        return None

    def scopes_of(self, name: str, node: Any) -> Iterator:
        """Yield the scopes around a node in which a name may be assigned, from the inside."""
        for outer in self.around(node):
            if isinstance(outer, _SCOPES):
                yield outer
            # A parameter hides what scopes around its function assign.
            if binds(outer, name):
                return

    def assignments(self, name: str, scope: Any) -> list[Assignment]:
        """Return the assignments of a name in a scope, in order."""
        return [found for found in self._assignments.get(name, ()) if found.scope is scope]

    def origins(self, node: Any) -> list:
        """Return where a value comes from, one step back: an assignment, arguments, or results of a function."""
        if isinstance(node, cst.Call):
            return self._returned(node)
        name = dotted(node)
        assignment = None
        if not self.name(node):
            assignment = self.assigned(node)
        # A name without an assignment is a parameter.
        if assignment is None:
            takers = self.takers(name, node)
            if not takers:
                return []
            return list(self._arguments(name, takers[0]))
        if not isinstance(assignment.value, cst.BaseExpression):
            return []
        position = assignment.position
        if position is None:
            return [assignment.value]
        origins = []
        for origin in self.origins(assignment.value):
            # a, b = f(), where f returns x, y
            if isinstance(origin, cst.Tuple) and position < len(origin.elements):
                origins.append(origin.elements[position].value)
        return origins

    def _returned(self, call: Any) -> list:
        """Return what the functions of the script that a call runs return."""
        functions = self.callees(call)
        returns = [node for node in self._returns if self.scope(node) in functions]
        return [node.value for node in returns if node.value is not None]

    def _arguments(self, name: str, function: Any) -> list:
        """Return what the calls of a function in the script pass for a parameter."""
        index = parameters(function).index(name)
        is_method = isinstance(self.scope(function), cst.ClassDef)
        arguments = []
        for call in self.calls:
            if function in self.callees(call):
                # The first parameter of a method is the object itself, also where a class is called.
                is_bound = is_method and (bool(method(call)) or function.name.value == "__init__")
                arguments.append(argument(call, name, index - is_bound))
        # A call that leaves a default passes nothing.
        return [passed for passed in arguments if passed is not None]

    def takers(self, name: str, node: Any) -> list:
        """Return the functions around a node that have a parameter of this name, from the inside."""
        takers = []
        for outer in self.around(node):
            if isinstance(outer, cst.FunctionDef) and name in parameters(outer):
                takers.append(outer)
            elif binds(outer, name):
                break
        return takers

    def meant(self, node: Any) -> Any:
        """Return the expression that a name stands for, if it's known; any other expression itself."""
        if not dotted(node):
            return node
        return next(iter(self.origins(node)), node)

    def maker(self, node: Any) -> str:
        """Return the full name of what was called to make a value; "" if unknown."""
        # A name stands for what made it: optimizer = tf.keras.optimizers.SGD()
        call = self.meant(node)
        if not isinstance(call, cst.Call):
            return ""
        return self.name(call.func)

    # Functions and classes of the script

    def callees(self, call: Any) -> list:
        """Return the functions of the script that a call runs, or passes on to be run."""
        functions = self.functions(call.func, call)
        if functions:
            return functions
        # strategy.run(step), threading.Thread(target=step)
        return [function for arg in call.args for function in self.functions(arg.value, call)]

    def runs(self, node: Any, targets: Container[Any]) -> bool:
        """Return True if a node contains one of the targets, or a function that it may call does."""
        return any(inner in targets for inner in follow(node, self._run_with))

    def _run_with(self, node: Any) -> list:
        """Return what runs with a node: its parts, and the functions that it calls."""
        nodes = [child for child in node.children if not isinstance(child, DEFINITIONS)]
        if isinstance(node, cst.Call):
            nodes += [function.body for function in self.callees(node)]
        return nodes

    def inherits(self, owner: Any, endings: tuple[str, ...]) -> bool:
        """Return True if a class of the script derives from one whose name ends so, directly or not."""
        if not isinstance(owner, cst.ClassDef):
            return False
        owners = follow(owner, self._base_classes)
        return any(self.name(arg.value).endswith(endings) for node in owners for arg in node.bases)

    def _base_classes(self, owner: Any) -> list:
        """Return the classes of the script from which one derives."""
        names = [dotted(arg.value) for arg in owner.bases]
        return [self.classes[name] for name in names if name in self.classes]

    def functions(self, node: Any, call: Any) -> list:
        """Return the functions of the script that a name may mean in a call."""
        name = last_word(dotted(node))
        if not name or self.name(node):
            return []
        is_name = isinstance(node, cst.Name)
        owner = None
        # A call of a class, such as Model(), runs its ``__init__``.
        if is_name and name in self.classes:
            owner = self.classes[name]
            name = "__init__"
        candidates = []
        for function in self._functions:
            if function.name.value != name:
                continue
            scope = self.scope(function)
            # A method may be that of any class, since that of its object isn't looked for.
            is_kind = isinstance(scope, cst.ClassDef) != is_name
            if scope is owner or (owner is None and is_kind):
                candidates.append(function)
        if not is_name:
            return candidates
        # The last definition before the call counts.
        earlier = [function for function in candidates if self.line(function) < self.line(call)]
        return (earlier or candidates)[-1:]
