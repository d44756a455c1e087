"""One file from source to ported source: reading, all rules in their order, guards, opening the job, and writing."""

from __future__ import annotations

import io
import os
import re
import shutil
import tokenize
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import libcst as cst

from npu_device._src.port.guarding import ask_about_managers, guard_files
from npu_device._src.port.port import DONE, OPEN, Finding, Port, Refused
from npu_device._src.port.rules import WORDS_BY_TOPIC
from npu_device._src.port.version_1 import (
    port_horovod,
    port_sessions,
    port_strategies,
    uses_strategy,
)
from npu_device._src.port.version_2 import port_loops, replicate_models

_OWN_IMPORT = re.compile(r"^\s*(import|from)\s+(npu_device|npu_bridge|hccl)\b", re.M)
_TRAINS = re.compile(
    r"\.(fit|compile|apply_grad|train_on|minimize|estimator|num_replicas)|horovod|Tape|(Session|Strategy)\("
)
_BEFORE_OPEN = re.compile(
    r"(import|from)\s|os\.environ|warnings\.|logging\.|sys\.path|matplotlib\.use|.*\.(set_verbosity|(dis|en)able_\w+)\("
)
_TEXT = re.compile(r"[BbRrUu]*[\"']")
_ONLY_IMPORTS = re.compile(r"(try|if)\b.*:\n(\s+(import|from)\s.*\n)+(except|else)?")
_PYTHON_2 = re.compile(
    r"^\s*(print\s+[\"'\w%(]|exec\s+[\"'\w]|except\s+[\w.]+\s*,\s*\w+\s*:|raise\s+\w+\s*,)", re.M
)
_MAGIC = re.compile(r"^\s*(%|!)\w", re.M)
_IMPORT = re.compile(r".*\bimport\b.*")
_IS_MAIN = re.compile(r"^if\s+__name__\s*==\s*[\"']__main__", re.M)


class Source:
    """The text of a file, with all that is needed to write it back; Refused for a notebook, and what isn't text."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.suffix == ".ipynb":
            raise Refused(
                f"a notebook. Save it as a script first: jupyter nbconvert --to script {path.name}"
            )
        raw = path.read_bytes()
        # Read as Python reads it, since the first line may name another encoding.
        try:
            self._encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
            self.text = raw.decode(self._encoding)
        except (SyntaxError, UnicodeDecodeError) as error:
            raise Refused(
                f"not text: {error}. Save it as UTF-8, or name its encoding in the first line"
            ) from None
        if "\0" in self.text:
            raise Refused("it contains zero bytes: this isn't a script")

    def write(self, text: str, path: Path) -> None:
        """Write another text in the encoding and with the mode of this file; by rename, so that nothing is lost."""
        target = path.resolve()
        # The draft lies beside the target, since a rename doesn't cross file systems.
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with draft.open("xb") as file:
                file.write(text.encode(self._encoding))
                file.flush()
                os.fsync(file.fileno())
            # The mode is kept, since a script may be executable.
            shutil.copymode(self.path, draft)
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)


def scripts(folder: Path) -> Iterator[Path]:
    """Yield the scripts and notebooks of a folder, without hidden folders and virtual environments."""
    for path, folders, names in os.walk(folder):
        if "pyvenv.cfg" in names or "site-packages" in folders:
            folders.clear()
            continue
        # Changed in place, since ``os.walk`` goes into the folders of this list only.
        folders[:] = sorted(name for name in folders if name[0] not in "._")
        for name in sorted(names):
            if name.endswith((".py", ".ipynb")):
                yield Path(path, name)


def entries(sources: Collection[Source]) -> list[Path]:
    """Return the files with which a job may start: those that ask for it, and those that no other file imports."""
    # Words are compared, as a module may be imported from a package, or under another name.
    lines = [line for source in sources for line in _IMPORT.findall(source.text)]
    imported_words = set(re.findall(r"\w+", "\n".join(lines)))
    paths = []
    for source in sources:
        if _IS_MAIN.search(source.text) or source.path.stem not in imported_words:
            paths.append(source.path)
    return paths


def port_text(
    text: str, is_entry: bool = True, distribution: str = "", is_v1: bool = False
) -> tuple[str, list[Finding]]:
    """Return the ported source of a script, which is the same if a question is open, and what the report says.

    Args:
        text: its source; Refused if that isn't Python 3.
        is_entry: the job starts with it: it calls ``npu.open``.
        distribution: "tf_strategy" or "horovod": what it is distributed with; "" for what it imports.
        is_v1: TensorFlow 1 calls of ``import tensorflow`` are to run as ``tf.compat.v1``.
    """
    # The file is ported already, or has nothing to port.
    if _OWN_IMPORT.search(text) or not _TRAINS.search(text):
        return text, []
    port = _parsed(text)
    is_horovod = port_horovod(port)
    # A Horovod script divides its data and saves on rank 0 by itself.
    if not is_horovod:
        port_strategies(port)
        replicate_models(port)
        port_loops(port)
        port_sessions(port, is_v1)
        # A file that doesn't train stays as it is: other scripts may use it.
        if port or port.is_open:
            guard_files(port)
            ask_about_managers(port)
    if distribution and distribution != _distribution(port, is_horovod):
        port.report(OPEN, "other distribution", port.module)
    # Half a ported script would train wrongly, so it is all or nothing.
    if port.is_open or not port:
        return text, port.findings
    if any(node.value == "npu" for node in port.of(cst.Name)):
        raise Refused("it uses the name npu, which this package is imported by. Rename it first")
    if not is_horovod:
        _open(port, is_entry)
    return _applied(port), port.findings


def _applied(port: Port) -> str:
    """Return the ported source, once it is known to be Python."""
    try:
        ported = port.apply()
    except (cst.ParserSyntaxError, cst.CSTValidationError) as error:
        raise Refused(
            f"a change of the tool isn't Python, which is a defect of the tool: {error}"
        ) from None
    try:
        with warnings.catch_warnings():
            # Warnings are about strings of the script.
            warnings.simplefilter("ignore")
            compile(ported, "ported.py", "exec", dont_inherit=True)
    except SyntaxError as error:
        # LibCST doesn't find all errors, such as a return outside of a function.
        raise Refused(f"a syntax error ({error.msg}) in: {(error.text or '').strip()}") from None
    return ported


def _distribution(port: Port, is_horovod: bool) -> str:
    if is_horovod:
        return "horovod"
    if uses_strategy(port):
        return "tf_strategy"
    return ""


def _parsed(text: str) -> Port:
    try:
        return Port(text)
    except RecursionError:
        raise Refused(
            "nested too deeply: hundreds of elif, or of operations in one expression. Divide them"
        ) from None
    except cst.ParserSyntaxError as error:
        line = error.raw_line
        if _PYTHON_2.search(text):
            raise Refused(
                "Python 2. Convert it first: 2to3 -w, with Python 3.12 or older"
            ) from None
        if _MAGIC.search(text):
            raise Refused(
                f"line {line}: a command of IPython. Take the lines with % and ! out"
            ) from None
        problem = error.message.splitlines()[0]
        raise Refused(
            f"line {line}: a syntax error ({problem}). Fix it; python -m py_compile shows it, too"
        ) from None


def _open(port: Port, is_entry: bool) -> None:
    """Import the package, and open the job in the file that it starts with."""
    anchor = _anchor(port)
    is_after = anchor is not None
    if anchor is None:
        anchor = port.module.body[0]
    for line in ["import npu_device as npu", *port.imports]:
        port.insert(anchor, line, after=is_after)
    for call in port.calls:
        if port.name(call.func) in WORDS_BY_TOPIC["generators"] and not call.args:
            port.replace(call, f"{port.text(call.func)}(1)")
            port.report(DONE, "generator", call)
    if is_entry:
        names = [port.name(call.func) for call in port.calls]
        seed = "seed=1"
        if any(name.endswith("utils.set_random_seed") for name in names):
            seed = ""
        port.insert(anchor, f"npu.open({seed})", after=is_after)
        port.report(DONE, "open", anchor)


def _anchor(port: Port) -> Any:
    """Return the statement after which the job is opened; None for the top of the script."""
    statements = port.module.body
    # With one statement, nothing would come after the guard.
    if len(statements) < 2:
        return None
    candidates = [statement for statement in port.opened_after if statement in statements]
    introduction = _last_of_introduction(port)
    if introduction is not None:
        candidates.append(introduction)
    # The latest candidate is taken, since all of them have to come before the job is opened.
    return max(candidates, key=port.line, default=None)


def _last_of_introduction(port: Port) -> Any:
    """Return the last of the imports, and of what is set with them, at the top of a script."""
    end = None
    for statement in port.module.body:
        code = "\n".join(port.lines[port.line(statement) - 1 :])
        # A string that stands alone, as a docstring does, may be a raw one.
        is_text = _TEXT.match(code)
        is_docstring = is_text and end is None
        if _BEFORE_OPEN.match(code) or _ONLY_IMPORTS.match(code) or is_docstring:
            end = statement
        elif not is_text and not _is_alias(port, statement):
            break
    return end


def _is_alias(port: Port, statement: Any) -> bool:
    """Return True for ``keras = tf.keras``."""
    return port.target(statement) is not None and bool(port.name(statement.body[0].value))
