"""What the ranks divide in a custom loop: the dataset that it reads, or the arrays that it cuts."""

from __future__ import annotations

from typing import Any

import libcst as cst
from libcst import matchers

from npu_device._src.port.nodes import argument, bounded, dotted, is_call_of, method, walk
from npu_device._src.port.port import DONE, OPEN, Port
from npu_device._src.port.rules import WORDS_BY_TOPIC
from npu_device._src.port.script import BLOCKS

_GIVEN = matchers.MatchIfTrue(bool)
_RANGE = matchers.SubscriptElement(matchers.Slice(_GIVEN, _GIVEN, None))
_SLICED = matchers.Subscript(slice=[_RANGE])
_LOOPS = (cst.For, cst.While)
SHARE = "[npu.distribute.rank() :: npu.distribute.size()]"


def divide(port: Port, steps: list) -> None:
    """Let each rank read its share of the dataset, or take its share of the arrays, that lead to the steps."""
    training = [loop for loop in port.of(cst.For) if port.runs(loop.body, steps)]
    sources = [loop.iter for loop in training]
    # The nodes of a loop also belong to the loops around it.
    inside = dict.fromkeys(node for loop in training for node in walk(loop.body))
    # A loop may read by ``next``: for _ in range(steps): x, y = next(iterator)
    for node in inside:
        if is_call_of(node, "next") and _leads_to(port, port.statement(node), steps):
            sources.append(node)
    # Loops over epochs read the same dataset.
    batches = {_batch(port, source) for source in sources} - {None}
    slices = [node for node in inside if _is_cut(port, node) and _leads_to(port, node, steps)]
    for statement in slices:
        _divide_slice(port, statement)
    # One line divides one dataset; where several are made, the script has to say which.
    if len(batches) == 1 and _is_made_once(port, next(iter(batches))):
        _shard(port, batches.pop(), training)
    elif batches:
        port.report(OPEN, "several datasets", steps[0])
    elif not slices:
        port.report(OPEN, "no dataset", steps[0])


def _is_made_once(port: Port, batch: Any) -> bool:
    """Return True unless a function that makes a dataset is called for several of them."""
    for maker in port.around(batch):
        if isinstance(maker, cst.FunctionDef):
            callers = [call for call in port.calls if maker in port.callees(call)]
            if len(callers) > 1:
                return False
    return True


@bounded(None)
def _batch(port: Port, node: Any) -> Any:
    """Return the call of ``batch`` behind what a loop reads, or None."""
    if method(node) in WORDS_BY_TOPIC["batches"]:
        return node
    has_argument = isinstance(node, cst.Call) and bool(node.args)
    # A call such as enumerate(data) gives the elements of its argument.
    if has_argument and port.called_word(node) in WORDS_BY_TOPIC["passes data on"]:
        return _batch(port, node.args[0].value)
    if method(node) and not port.name(node.func) and not port.functions(node.func, node):
        # The call is a method of the dataset, such as ``prefetch``.
        return _batch(port, node.func.value)
    for origin in port.origins(node):
        batch = _batch(port, origin)
        if batch is not None:
            return batch
    return None


def _shard(port: Port, batch: Any, training: list) -> None:
    """Divide a dataset after its last shuffle in the statement, else before its first repeat or batch, and batch the
    share of the rank.
    """
    size = argument(batch, "batch_size", 0)
    dataset = batch.func.value
    node = dataset
    # Each method stands around the dataset: x.map(…).shuffle(…).repeat().batch(…)
    while method(node) and not port.name(node.func):
        # Dividing a shuffled dataset keeps the batches of one process: the ranks shuffle it alike.
        if method(node) == "shuffle":
            break
        if method(node) in ("repeat", *WORDS_BY_TOPIC["batches"]):
            dataset = node.func.value
        node = node.func.value
    statement = port.own_statement(batch)
    target = dotted(port.target(statement)) or port.unused_name("dataset")
    rank_batch = port.unused_name("rank_batch")
    arguments = f"{port.move(dataset, target)}, {port.move(size, rank_batch)}"
    call = f"npu.distribute.shard_and_rebatch_dataset({arguments})"
    port.insert(statement, f"{target}, {rank_batch} = {call}", after=False)
    port.report(DONE, "shard", batch)
    # A name may also be used for shapes.
    if isinstance(size, cst.Name):
        _resize(port, size.value, training)


def _resize(port: Port, size: str, training: list) -> None:
    """Give the batch size of the rank to what the functions of a loop draw or fill in the size of a batch."""
    makers = WORDS_BY_TOPIC["draws"] + WORDS_BY_TOPIC["fills"]
    for call in port.calls:
        if method(call) not in makers:
            continue
        uses = matchers.findall(call, matchers.Name(size))
        if not uses or not any(port.runs(loop.body, [call]) for loop in training):
            continue
        if method(call) in WORDS_BY_TOPIC["draws"]:
            # All ranks draw the same numbers, and each takes its own.
            port.replace(call, "{}" + SHARE)
        else:
            # Ones are all the same, so that each rank makes only its number of them.
            port.replace(uses[0], "{} // npu.distribute.size()")
        port.report(DONE, "batch size in a shape", call)


def _is_cut(port: Port, node: Any) -> bool:
    """Return True for a statement that cuts arrays out of larger ones."""
    return port.target(node) is not None and is_slice(node.body[0].value)


def _leads_to(port: Port, statement: Any, steps: list) -> bool:
    """Return True if what a statement in a loop assigns may get to a step of this loop: not a batch of validation."""
    target = port.target(statement)
    if target is None:
        return port.runs(statement, steps)
    # Attributes and elements may be read anywhere.
    if matchers.findall(target, matchers.Attribute() | matchers.Subscript()):
        return True
    loop = next(outer for outer in port.around(statement) if isinstance(outer, _LOOPS))
    block = next(outer for outer in port.around(statement) if isinstance(outer, BLOCKS))
    always_run = {*loop.body.body, *block.body}
    names = _names(target)
    own_nodes = set(walk(statement))
    nodes = list(walk(loop.body))
    start = nodes.index(statement)
    # What comes before the statement also comes after it, in the next round.
    later = [node for node in nodes[start:] + nodes[:start] if node not in own_nodes]
    for node in later:
        if isinstance(node, cst.Call) and names & _names(node) and port.runs(node, steps):
            return True
        if not isinstance(node, (cst.Assign, cst.AugAssign, cst.For)):
            continue
        value, targets = _flow(node)
        # A batch that is cut out of what the statement assigns is divided by itself.
        if names & _names(value) and not is_slice(value):
            names |= targets
        elif port.statement(node) in always_run:
            # The names get other values, unless that is so in a branch only.
            names -= targets
    return False


def _flow(node: Any) -> tuple[Any, set[str]]:
    """Return what an assignment or a loop reads, and the names that get it."""
    if isinstance(node, cst.Assign):
        return node.value, {name for target in node.targets for name in _names(target)}
    # The name keeps a part of its value.
    if isinstance(node, cst.AugAssign):
        return node, _names(node.target)
    return node.iter, _names(node.target)


def _names(node: Any) -> set[str]:
    """Return the names in a node, without those of attributes and arguments."""
    if isinstance(node, cst.Name):
        return {node.value}
    children = node.children
    if isinstance(node, (cst.Attribute, cst.Arg)):
        children = [node.value]
    return set().union(*map(_names, children))


def _divide_slice(port: Port, statement: Any) -> None:
    """Let each rank take its share of the arrays that a statement cuts out of larger ones."""
    names = port.text(port.target(statement)).strip("()").split(",")
    for name in map(str.strip, names):
        # The name _ stands for a value that isn't used.
        if name != "_":
            port.insert(statement, f"{name} = {name}{SHARE}", after=True)
    port.report(DONE, "share of an array", statement)


def is_slice(node: Any) -> bool:
    """Return True for ``x[begin:end]``, several of them, and ``data.next_batch(…)``."""
    if isinstance(node, cst.Tuple):
        return all(is_slice(inner.value) for inner in node.elements)
    if matchers.matches(node, _SLICED):
        return bool(dotted(node.value))
    return method(node) == "next_batch"
