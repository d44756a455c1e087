"""Calls that every rank would make and one should: the rows of the table that have calls."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

import libcst as cst

from npu_device._src.port.port import DONE, NOTE, RULES, WORDS, Port, Rule
from npu_device._src.port.script import dotted, keyword, method, target_of, walk

_FIRST, _MAIN = "with npu.distribute.rank_zero_first()", "if npu.distribute.is_main()"
_READS = re.compile(r"(^|\.)(load(?!_data\b)\w*|restore|latest_\w+|(im)?read\w*|open|\w*csv|\w*Dataset|list_files)$")


def files(port: Port) -> None:
    """Guard what is plain of the calls in the table, and point out the rest."""
    for call in port.calls:
        rule = next((each for each in RULES.values() if each.calls and _fits(port, call, each)), None)
        if rule is not None:
            _apply(port, call, rule)


def _fits(port: Port, call: Any, rule: Rule) -> bool:
    name = port.name(call.func) or dotted(call.func)
    if method(call) and not port.name(call.func):
        receiver = call.func.value
        if rule.action == "save" and port.text(receiver) in {each for each, _ in port.replicated}:
            return False
        maker = port.maker(receiver) if dotted(receiver) else ""
        name = f"{maker}().{method(call)}" if maker else f".{method(call)}"
    is_read = name == "open" and not re.search("[wax+]", port.text(keyword(call, "mode", 1)))
    return not is_read and any(fnmatchcase(name, pattern) for pattern in rule.calls)


def _apply(port: Port, call: Any, rule: Rule) -> None:
    statement = _whole(port, call)
    plain = statement is not None and (rule.action == "first" or _is_plain(port, statement, call))
    if rule.action == "exist_ok":
        if keyword(call, "exist_ok", 2) is not None:
            return
        port.replace(call.args[-1], "{}, exist_ok=True")
    elif rule.action == "note" or not plain:
        if rule.action != "print":
            port.found(NOTE, rule.name, call)
        return
    else:
        wait = rule.action in ("save", "write") and _is_read(port, statement)
        port.guard(statement, _FIRST if rule.action == "first" else _MAIN, wait)
    port.found(DONE, rule.name, call)


def _is_read(port: Port, statement: Any) -> bool:
    """Return True if other ranks may read a file that a statement writes; not where they may not come by."""
    if any(isinstance(each, (cst.If, cst.Try, cst.ExceptHandler)) for each in port.up(statement)):
        return False
    inside, first = set(walk(statement)), port.line(statement) if statement in port.module.body else 0
    later = [each for each in port.calls if each not in inside and port.line(each) > first]
    return any(_READS.search(dotted(each.func) or method(each)) for each in later)


def _whole(port: Port, call: Any) -> Any:
    """Return the statement that is to be guarded; None if the call is a part of something larger."""
    statement = port.statement(call)
    if isinstance(statement, cst.With):
        return statement if call in [item.item for item in statement.items] else None
    if any(isinstance(each, (cst.Lambda, cst.CompFor)) for each in walk(statement)):
        return None
    is_expression = isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1
    return statement if is_expression and (isinstance(statement.body[0], cst.Expr) or target_of(statement)) else None


def _is_plain(port: Port, statement: Any, call: Any) -> bool:
    """Return True if nothing in a statement is missed on other ranks: no name, and no call that all must make."""
    allowed = {*WORDS["harmless in a guarded call"]}
    allowed.update(WORDS["harmless below an opened file"] if isinstance(statement, cst.With) else ())
    for each in walk(statement):
        if isinstance(each, (cst.Assign, cst.AnnAssign, cst.AugAssign, cst.Return, cst.Yield, cst.Await)):
            return False
        is_other = (
            isinstance(each, cst.Call)
            and each is not call
            and not port.name(each.func).startswith(WORDS["harmless modules"])
        )
        if is_other and (method(each) or dotted(each.func)) not in allowed:
            return False
    return True
