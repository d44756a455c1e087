"""One file from source to ported source: reading, all rules in their order, guards, opening the job, and writing."""

from __future__ import annotations

import io
import os
import re
import shutil
import tokenize
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import libcst as cst

from npu_device._src.port.port import DONE, NOTE, OPEN, RULES, WORDS, Finding, Port, dotted, keyword, method, walk
from npu_device._src.port.version_1 import horovod, sessions, strategies, uses_strategy
from npu_device._src.port.version_2 import loops, models

_OURS = re.compile(r"^\s*(import|from)\s+(npu_device|npu_bridge|hccl)\b", re.M)
_TRAINS = re.compile(
    r"\.(fit|compile|apply_grad|train_on|minimize|estimator|num_replicas)|horovod|Tape|(Session|Strategy)\("
)
_BEFORE_OPEN = re.compile(
    r"(import|from)\s|os\.environ|warnings\.|logging\.|sys\.path|matplotlib\.use|.*\.(set_verbosity|(dis|en)able_\w+)\("
)
_ONLY_IMPORTS = re.compile(r"(try|if)\b.*:\n(\s+(import|from)\s.*\n)+(except|else)?")
_PYTHON_2 = re.compile(r"^\s*(print\s+[\"'\w%(]|exec\s+[\"'\w]|except\s+[\w.]+\s*,\s*\w+\s*:|raise\s+\w+\s*,)", re.M)
_MAGIC = re.compile(r"^\s*(%|!)\w", re.M)
_IS_MAIN = re.compile(r"^if\s+__name__\s*==\s*[\"']__main__", re.M)
_FIRST, _MAIN = "with npu.distribute.rank_zero_first()", "if npu.distribute.is_main()"
_READS = re.compile(r"(^|\.)(load(?!_data\b)\w*|restore|latest_\w+|(im)?read\w*|open|\w*csv|\w*Dataset|list_files)$")


class Refused(Exception):
    """A file that can't be ported, with the reason and the remedy."""


class Source:
    """The text of a file, with all that is needed to write it back; Refused for a notebook, and what isn't text."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.suffix == ".ipynb":
            raise Refused(f"a notebook. Save it as a script first: jupyter nbconvert --to script {path.name}")
        raw = path.read_bytes()
        try:
            self._encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
            self.text = raw.decode(self._encoding)
        except (SyntaxError, UnicodeDecodeError) as error:
            raise Refused(f"not text: {error}. Save it as UTF-8, or name its encoding in the first line") from None
        if "\0" in self.text:
            raise Refused("it contains zero bytes: this isn't a script")

    def write(self, text: str, path: Path) -> None:
        """Write another text in the encoding and with the mode of this file; by rename, so that nothing is lost."""
        target = path.resolve()
        new = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with new.open("xb") as file:
                file.write(text.encode(self._encoding))
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(self.path, new)
            new.replace(target)
        finally:
            new.unlink(missing_ok=True)


def scripts(folder: Path) -> Iterator[Path]:
    """Yield the scripts and notebooks of a folder, without hidden folders and virtual environments."""
    for where, folders, names in os.walk(folder):
        is_environment = "pyvenv.cfg" in names or "site-packages" in folders
        folders[:] = () if is_environment else sorted(each for each in folders if each[0] not in "._")
        found = () if is_environment else sorted(each for each in names if each.endswith((".py", ".ipynb")))
        yield from (Path(where, each) for each in found)


def entries(sources: Collection[Source]) -> list[Path]:
    """Return the files with which a job may start: those that ask for it, and those that no other file imports."""
    imports = [line for each in sources for line in re.findall(r".*\bimport\b.*", each.text)]
    used = {word for line in imports for word in re.findall(r"\w+", line)}
    return [each.path for each in sources if _IS_MAIN.search(each.text) or each.path.stem not in used]


def port_text(text: str, is_entry: bool = True, kind: str = "", is_v1: bool = False) -> tuple[str, list[Finding]]:
    """Return the ported source of a script, which is the same if a question is open, and what the report says.

    Args:
        text: its source; Refused if that isn't Python 3.
        is_entry: the job starts with it: it calls ``npu.open``.
        kind: "tf_strategy" or "horovod": what it is distributed with; "" for what it imports.
        is_v1: TensorFlow 1 calls of ``import tensorflow`` are to run as ``tf.compat.v1``.
    """
    if _OURS.search(text) or not _TRAINS.search(text):
        return text, []
    port = _parsed(text)
    is_horovod = horovod(port)
    if not is_horovod:
        strategies(port)
        models(port)
        loops(port)
        sessions(port, is_v1)
        if port or port.is_open:
            files(port)
    if kind not in ("", "horovod" if is_horovod else "tf_strategy" if uses_strategy(port) else ""):
        port.found(OPEN, "other distribution", port.module)
    if port.is_open or not port:
        return text, port.findings
    if any(node.value == "npu" for node in port.of(cst.Name)):
        raise Refused("it uses the name npu, which this package is imported by. Rename it first")
    if not is_horovod:
        _open(port, is_entry)
    new = port.apply()
    _parsed(new)
    return new, port.findings


def _parsed(text: str) -> Port:
    try:
        return Port(text)
    except cst.ParserSyntaxError as error:
        line, problem = error.raw_line, error.message.splitlines()[0]
        if _PYTHON_2.search(text):
            raise Refused("Python 2. Convert it first: 2to3 -w, with Python 3.12 or older") from None
        if _MAGIC.search(text):
            raise Refused(f"line {line}: a command of IPython. Take the lines with % and ! out") from None
        raise Refused(f"line {line}: a syntax error ({problem}). Fix it; python -m py_compile shows it, too") from None


def _open(port: Port, is_entry: bool) -> None:
    """Import the package, and open the job in the file that it starts with."""
    last = None
    for statement in port.module.body:
        code = "\n".join(port.lines[port.line(statement) - 1 :])
        if _BEFORE_OPEN.match(code) or _ONLY_IMPORTS.match(code) or (last is None and code[:1] in "\"'"):
            last = statement
        elif code[:1] not in "\"'" and not (port.target(statement) and port.name(statement.body[0].value)):
            break  # neither a text nor keras = tf.keras
    known = [each for each in (last, *port.after) if each in port.module.body and len(port.module.body) > 1]
    last = max(known, key=port.line, default=None)
    place = port.module.body[0] if last is None else last
    for line in ["import npu_device as npu", *port.imports]:
        port.insert(place, line, after=last is not None)
    for call in (each for each in port.calls if port.name(each.func) in WORDS["generators"] and not each.args):
        port.replace(call, f"{port.text(call.func)}(1)")
        port.found(DONE, "generator", call)
    if is_entry:
        is_seeded = any(port.name(call.func).endswith("utils.set_random_seed") for call in port.calls)
        port.insert(place, f"npu.open({'' if is_seeded else 'seed=1'}).as_default()", after=last is not None)
        port.found(DONE, "open", place)


def files(port: Port) -> None:
    """Guard what is plain of the calls in the table, and point out the rest."""
    for call in port.calls:
        rule = _rule(port, call)
        statement = _whole(port, call) if rule else None
        if rule is None or (rule.action == "exist_ok" and keyword(call, "exist_ok", 2) is not None):
            continue
        if rule.action == "exist_ok":
            port.replace(call.args[-1], "{}, exist_ok=True")
        elif rule.action == "first" and statement is not None:
            port.guard(statement, _FIRST)
        elif rule.action != "note" and statement is not None and _is_plain(port, statement, call):
            port.guard(statement, _MAIN, wait=rule.action in ("save", "write") and _is_read(port, statement))
        else:
            if rule.action != "print":
                port.found(NOTE, rule.name, call)
            continue
        port.found(DONE, rule.name, call)


def _rule(port: Port, call: Any) -> Any:
    """Return the first rule that names a call; None for files that are only read, and what Keras saves by itself."""
    name, receiver = port.name(call.func) or dotted(call.func), ""
    if method(call) and not port.name(call.func):
        receiver = port.text(call.func.value)
        maker = port.maker(call.func.value) if dotted(call.func.value) else ""
        name = f"{maker}().{method(call)}" if maker else f".{method(call)}"
    if name == "open" and not re.search("[wax+]", port.text(keyword(call, "mode", 1))):
        return None
    rules = [each for each in RULES.values() if each.action != "save" or receiver not in dict(port.replicated)]
    return next((each for each in rules if any(fnmatchcase(name, pattern) for pattern in each.calls)), None)


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
    return statement if is_expression and (isinstance(statement.body[0], cst.Expr) or port.target(statement)) else None


def _is_plain(port: Port, statement: Any, call: Any) -> bool:
    """Return True if nothing in a statement is missed on other ranks: no name, and no call that all must make."""
    allowed = WORDS["harmless in a guarded call"]
    allowed += WORDS["harmless below an opened file"] if isinstance(statement, cst.With) else ()
    keeps = (cst.Assign, cst.AnnAssign, cst.AugAssign, cst.Return, cst.Yield, cst.Await)
    others = [each for each in walk(statement) if isinstance(each, cst.Call) and each is not call]
    others = [each for each in others if not port.name(each.func).startswith(WORDS["harmless modules"])]
    is_harmless = all((method(each) or dotted(each.func)) in allowed for each in others)
    return is_harmless and not any(isinstance(each, keeps) for each in walk(statement))
