"""One file from source to ported source: all rules in their order, and the lines that open the job."""

from __future__ import annotations

import re
from typing import Any

import libcst as cst

from npu_device._src.port.distribution import horovod, strategies, uses_strategy
from npu_device._src.port.guards import files
from npu_device._src.port.port import DONE, OPEN, Finding, Port
from npu_device._src.port.script import target_of
from npu_device._src.port.source import Refused, not_python
from npu_device._src.port.version_1 import sessions
from npu_device._src.port.version_2 import loops, models

_OURS = re.compile(r"^\s*(import|from)\s+(npu_device|npu_bridge|hccl)\b", re.M)
_TRAINS = re.compile(
    r"\.(fit\w*|compile|apply_gradients|train_on_batch|minimize|estimator|num_replicas_in_sync)\b|horovod|GradientTape|Session\(|Strategy\("
)
_BEFORE_OPEN = re.compile(
    r"(import|from)\s|os\.environ|warnings\.|logging\.|sys\.path|matplotlib\.use|.*\.(disable_v2_behavior|set_verbosity|"
    r"disable_eager_execution|disable_resource_variables|enable_eager_execution|enable_v2_behavior)\("
)
_ONLY_IMPORTS = re.compile(r"(try|if)\b.*:\n(\s+(import|from)\s.*\n)+(except|else)?")


def port_text(text: str, is_entry: bool = True, kind: str = "", is_v1: bool = False) -> tuple[str, list[Finding]]:
    """Return a script's ported source, which is the same if a question is open, and what the report says.

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
        raise not_python(text, error.raw_line, error.message) from None


def _open(port: Port, is_entry: bool) -> None:
    """Import the package, and open the job in the file that it starts with."""
    last = _last_before_open(port)
    place = port.module.body[0] if last is None else last
    for line in ["import npu_device as npu", *port.imports]:
        port.insert(place, line, after=last is not None)
    if is_entry:
        is_seeded = any(port.name(call.func).endswith("utils.set_random_seed") for call in port.calls)
        port.insert(place, f"npu.open({'' if is_seeded else 'seed=1'}).as_default()", after=last is not None)
        port.found(DONE, "open", place)


def _last_before_open(port: Port) -> Any:
    """Return the last of a script's first imports, and of what must be set before TensorFlow is used."""
    last = None
    for statement in port.module.body:
        code = "\n".join(port.lines[port.line(statement) - 1 :])
        if _BEFORE_OPEN.match(code) or _ONLY_IMPORTS.match(code) or (last is None and code[:1] in "\"'"):
            last = statement
        elif code[:1] not in "\"'" and not (target_of(statement) and port.name(statement.body[0].value)):
            break  # neither a text nor keras = tf.keras
    known = [each for each in (last, *port.after) if each in port.module.body]
    return max(known, key=port.line, default=None) if len(port.module.body) > 1 else None
