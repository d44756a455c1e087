"""Files that a script writes: which statements only rank 0 runs, and which are pointed out."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

import libcst as cst
from libcst import matchers

from npu_device._src.port.nodes import DEFINITIONS, argument, dotted, method, walk
from npu_device._src.port.port import DONE, NOTE, OPEN, Port
from npu_device._src.port.rules import RULES, WORDS_BY_TOPIC, PortingRule
from npu_device._src.port.version_2 import MODEL_CLASSES, is_model

_FIRST = "with npu.distribute.rank_zero_first(): ..."
_MAIN = "if npu.distribute.is_main(): ..."
_WAIT = "\nnpu.distribute.barrier()"
_READS = re.compile(
    r"(^|\.)(load(?!_data\b)\w*|restore|latest_\w+|(im)?read\w*|open|\w*csv|\w*Dataset|list_files)$"
)
_KEEPS = (
    *(cst.Assign, cst.AnnAssign, cst.AugAssign, cst.NamedExpr, cst.Del, cst.Import, cst.ImportFrom),
    *(cst.Return, cst.Break, cst.Continue, cst.Raise, cst.Yield, cst.Await, *DEFINITIONS),
)
"""What the other ranks would miss: a name, or where to go on."""
_LEAVES = (cst.Return, cst.Break, cst.Continue)


def guard_files(port: Port) -> None:
    """Guard what is plain of the calls in the table, and point out the rest."""
    for call in port.calls:
        rule = _rule(port, call)
        if rule is None:
            continue
        if rule.action == "exist_ok" and argument(call, "exist_ok", 2) is not None:
            continue
        if rule.action != "note" and _guard(port, call, rule.action):
            port.report(DONE, rule.name, call)
        elif rule.action != "print":
            # Printing on all ranks does no harm.
            port.report(NOTE, rule.name, call)


def _guard(port: Port, call: Any, action: str) -> bool:
    """Do what the rule of a call asks for; return False if the call isn't plain enough."""
    if action == "exist_ok":
        port.replace(call.args[-1], "{}, exist_ok=True")
        return True
    statement = _guardable(port, call)
    # What a function of the script writes is guarded there.
    if statement is None or _may_be_own(port, call):
        return False
    if action.startswith("first"):
        entered = _entered_by_all(port, statement)
        # Some calls download again what is there, unless a branch looks for it.
        if entered is None or (action == "first if missing" and entered is statement):
            return False
        port.guard(entered, _FIRST)
        return True
    # The other ranks would miss a statement that does more than this call.
    if not _is_plain(port, statement, call):
        return False
    guard = _MAIN
    if action in ("save", "write") and _is_read(port, statement):
        guard += _WAIT
    port.guard(statement, guard)
    return True


def _entered_by_all(port: Port, statement: Any) -> Any:
    """Return the statement, or the largest branch around it that only some ranks may take; None if they may not all
    come to it, or may wait for each other in it.
    """
    around = list(port.around(statement))
    scope = port.scope(statement)
    # A function may be called in a branch.
    places = [call for call in port.calls if scope in port.callees(call)]
    # A rank may leave before: if os.path.exists(path): return
    for node in port.of(_LEAVES):
        if port.scope(node) is scope and port.line(node) < port.line(statement):
            places.append(node)
    for place in places:
        if any(_may_differ(port, node) for node in port.around(place) if node not in around):
            return None
    branches = [node for node in around if _may_differ(port, node)]
    if not branches:
        return statement
    branch = port.statement(branches[-1])
    calls = matchers.findall(branch, matchers.Call())
    if all(_is_of_files(port, call) for call in calls):
        return branch
    return None


def _may_differ(port: Port, node: Any) -> bool:
    """Return True for a branch that a rank takes if it finds no file, or one that others don't find."""
    if isinstance(node, cst.ExceptHandler):
        return True
    if not isinstance(node, (cst.If, cst.While)):
        return False
    looks = WORDS_BY_TOPIC["looks for a file"]
    targets = [call for call in port.calls if port.called_word(call) in looks]
    tests = [node.test]
    # The answer may have a name: found = os.path.exists(path)
    for name in matchers.findall(node.test, matchers.Name()):
        tests += port.origins(name)
    return any(port.runs(test, targets) for test in tests)


def _is_of_files(port: Port, call: Any) -> bool:
    """Return True for a call that other ranks needn't make at the same time."""
    rule = _rule(port, call)
    if rule is not None:
        return rule.action != "save"
    words = WORDS_BY_TOPIC["harmless in a guarded call"] + WORDS_BY_TOPIC["handles files"]
    return _is_harmless(port, call, words + WORDS_BY_TOPIC["looks for a file"])


def _may_be_own(port: Port, call: Any) -> bool:
    """Return True if a call may run a function of the script."""
    functions = port.functions(call.func, call)
    if not functions or not method(call):
        return bool(functions)
    receiver = call.func.value
    if port.text(receiver) == "super()":
        return False
    # A model of the script may save in its own way.
    if any(port.inherits(port.scope(function), MODEL_CLASSES) for function in functions):
        return True
    return not port.maker(receiver) and not is_model(port, receiver)


def ask_about_managers(port: Port) -> None:
    """Ask where a checkpoint manager may restore what it has saved: only that of rank 0 knows of it."""
    saves = [call for call in port.calls if method(call) == "save"]
    for save in saves:
        manager = save.func.value
        if not port.maker(manager).endswith(".CheckpointManager"):
            continue
        for node in port.of(cst.Attribute):
            is_read = node.attr.value in WORDS_BY_TOPIC["what a manager knows"]
            if (
                is_read
                and port.text(node.value) == port.text(manager)
                and _may_follow(port, node, save)
            ):
                port.report(OPEN, "checkpoint manager", node)


def _may_follow(port: Port, node: Any, call: Any) -> bool:
    """Return True unless a node is known to run before a call: further up, and in no loop with it."""
    scope = port.scope(node)
    if scope is not port.scope(call):
        return not (isinstance(scope, cst.FunctionDef) and scope.name.value == "__init__")
    around = set(port.around(call))
    is_in_loop = any(
        isinstance(outer, (cst.For, cst.While)) and outer in around for outer in port.around(node)
    )
    return is_in_loop or port.line(node) > port.line(call)


def _rule(port: Port, call: Any) -> PortingRule | None:
    """Return the rule that names a call; None for files that are only read, and what Keras saves by itself."""
    name = port.name(call.func) or dotted(call.func)
    is_replicated = False
    if method(call) and not port.name(call.func):
        receiver = call.func.value
        is_replicated = port.is_replicated(receiver)
        name = f".{method(call)}"
        # The maker names the method of an object: saver.save(…), where saver = tf.train.Saver()
        if dotted(receiver) and port.maker(receiver):
            name = f"{port.maker(receiver)}().{method(call)}"
    # A file that is only read needs no guard.
    mode = port.text(argument(call, "mode", 1))
    if name == "open" and not re.search("[wax+]", mode):
        return None
    for rule in RULES.values():
        # A replicated model is saved by rank 0 only, by itself.
        if is_replicated and rule.action == "save":
            continue
        if any(fnmatchcase(name, pattern) for pattern in rule.patterns):
            return rule
    return None


def _is_read(port: Port, statement: Any) -> bool:
    """Return True if other ranks may read a file that a statement writes; not where they may not come by."""
    branches = (cst.If, cst.Try, cst.ExceptHandler)
    if any(isinstance(outer, branches) for outer in port.around(statement)):
        return False
    inside = set(walk(statement))
    # In a function, calls above the statement may come later.
    line = 0
    if statement in port.module.body:
        line = port.line(statement)
    for call in port.calls:
        is_later = call not in inside and port.line(call) > line
        if is_later and _READS.search(dotted(call.func) or method(call)):
            return True
    return False


def _guardable(port: Port, call: Any) -> Any:
    """Return the statement that is to be guarded; None if the call is a part of something larger."""
    statement = port.statement(call)
    if isinstance(statement, cst.With):
        managers = [with_item.item for with_item in statement.items]
        # The call may be a context manager: with open(…) as file
        is_guardable = call in managers
    elif matchers.findall(statement, matchers.Lambda() | matchers.CompFor()):
        # In these, nothing shows when, and how often, the call is made.
        is_guardable = False
    else:
        is_call = matchers.matches(statement, matchers.SimpleStatementLine([matchers.Expr()]))
        is_guardable = is_call or port.target(statement) is not None
    if not is_guardable:
        return None
    return statement


def _is_plain(port: Port, statement: Any, call: Any) -> bool:
    """Return True if nothing in a statement is missed on other ranks: no name, and no call that all must make."""
    harmless = WORDS_BY_TOPIC["harmless in a guarded call"]
    if isinstance(statement, cst.With):
        harmless += WORDS_BY_TOPIC["harmless below an opened file"]
    for node in walk(statement):
        if isinstance(node, _KEEPS) or _binds_for_others(port, statement, node):
            return False
        if (
            isinstance(node, cst.Call)
            and node is not call
            and not _is_harmless(port, node, harmless)
        ):
            return False
    return True


def _is_harmless(port: Port, call: Any, words: tuple[str, ...]) -> bool:
    """Return True for a call of these words, or of a harmless module, which other ranks may leave out."""
    name = port.name(call.func)
    # All ranks draw, so that they go on to draw the same numbers.
    if name.startswith("numpy.random.") or port.functions(call.func, call):
        return False
    is_of_harmless_module = name.startswith(WORDS_BY_TOPIC["harmless modules"])
    return is_of_harmless_module or (method(call) or dotted(call.func)) in words


def _binds_for_others(port: Port, statement: Any, node: Any) -> bool:
    """Return True if a loop or a context manager in a statement gives a name a value that is read after it."""
    target = None
    if isinstance(node, cst.For):
        target = node.target
    elif isinstance(node, cst.WithItem) and node.asname and node not in statement.items:
        target = node.asname.name
    if target is None:
        return False
    names = {inner.value for inner in matchers.findall(target, matchers.Name())}
    end = max(map(port.line, matchers.findall(statement, matchers.Name())))
    scope = port.scope(statement)
    for inner in port.of(cst.Name):
        is_later = port.line(inner) > end and port.scope(inner) is scope
        if inner.value in names and is_later and not _is_bound_again(port, inner):
            return True
    return False


def _is_bound_again(port: Port, name: Any) -> bool:
    """Return True in a loop that gives a name its values."""
    for outer in port.around(name):
        is_loop = isinstance(outer, (cst.For, cst.CompFor))
        if is_loop and matchers.findall(outer.target, matchers.Name(name.value)):
            return True
    return False
