"""What trains in TensorFlow 2: models that ``fit`` trains, custom loops, and how their loss is scaled."""

from __future__ import annotations

import re
from typing import Any

import libcst as cst

from npu_device._src.port.port import DONE, NOTE, OPEN, WORDS, Port, dotted, keyword, method, walk

SHARE = "[npu.distribute.rank() :: npu.distribute.size()]"
_MODEL, _COMPILED, _OTHER, _UNKNOWN = "model", "compiled", "other", "unknown"  # what a name is
MEAN, SUM, EACH, SHARED, COUNT, UNKNOWN = "mean", "sum", "each", "shared", "count", "unknown"
"""Over the samples; one value per sample; the same on all ranks whatever the samples; the sample count of the rank."""
_PAIRS = {"add": cst.Add, "subtract": cst.Subtract, "multiply": cst.Multiply, "divide": cst.Divide}
_NUMBER = re.compile(r"(batch_?size|num_\w+|\w*(weight|alpha|beta|lambda|gamma|coef|scale|factor|_size|losses))$", re.I)


def models(port: Port) -> None:
    """Replicate every model that the script compiles, or trains without compiling it here."""
    calls = [call for call in port.calls if method(call) and not port.name(call.func.value)]
    for call in (each for each in calls if method(each) == "compile"):
        if port.text(call.func.value) not in ("self", "super()"):
            _replicate(port, call, call.func.value)
    for call in (each for each in calls if method(each) in WORDS["trains a model"]):
        _trained(port, call)
    for call in (each for each in port.calls if method(each) in WORDS["draws"] and port.replicated):
        if getattr(port.scope(call), "name", cst.Name("_")).value in ("call", "train_step"):
            port.found(NOTE, "noise", call, "each rank draws its own numbers here, which aren't those of one process")


def _replicate(port: Port, node: Any, model: Any, after: bool = True) -> None:
    name, scope = port.text(model), port.scope(node)
    if (name, scope) not in port.replicated and not isinstance(model, cst.Call):
        port.replicated.add((name, scope))
        target = f"{name} = " if dotted(model) and after else ""
        port.insert(port.statement(node), f"{target}npu.distribute.replicate({name})", after)
        port.found(DONE, "fit", node)


def _trained(port: Port, call: Any) -> None:
    model = call.func.value
    name, scopes = port.text(model), list(port.up(call))
    given = port.takers(name, call) or scopes[-1:]
    scopes = scopes[: scopes.index(given[0]) + 1]  # a parameter is another model than one of this name outside
    if any(each == name and (scope in scopes or name.startswith("self.")) for each, scope in port.replicated):
        return
    kind = _kind(port, model)
    looks_so = method(call) != "fit" or any(keyword(call, each) is not None for each in WORDS["arguments of fit"])
    if kind == _COMPILED:
        port.replicated.add((name, port.scope(call)))
    elif kind == _MODEL or (kind == _UNKNOWN and looks_so and dotted(model)):
        made = port.assigned(model)
        here = made is not None and kind == _MODEL and made.scope is port.scope(call)
        _replicate(port, made.statement if made and here else call, model, after=here)
    elif kind == _UNKNOWN:
        port.found(OPEN, "fit of what", call)


def _kind(port: Port, node: Any, depth: int = 0) -> str:
    if isinstance(node, cst.Call):
        if port.name(node.func):
            return _MODEL if port.name(node.func).startswith(WORDS["makers of models"]) else _OTHER
        if dotted(node.func) in port.classes:
            return _MODEL if port.inherits(port.classes[dotted(node.func)], ("Model", "Sequential")) else _OTHER
        if any(method(each) == "compile" for function in port.callees(node) for each in walk(function.body)):
            return _COMPILED
    kinds = (_kind(port, each, depth + 1) for each in port.origins(node) if depth < 6)
    return next((each for each in kinds if each != _UNKNOWN), _UNKNOWN)


def _is_built(port: Port, node: Any, at: Any) -> bool:
    """Return True if a model has its variables before a line: it was made of inputs, or called or built before."""
    name = dotted(node)
    for call in port.calls if name else ():
        is_use = dotted(call.func) == name or (method(call) in ("build", "summary") and dotted(call.func.value) == name)
        if is_use and port.scope(call) is port.scope(at) and port.line(call) < port.line(at):
            return True
    if not isinstance(node, cst.Call):
        return any(_is_built(port, each, each) for each in port.origins(node))
    made = port.name(node.func)
    if made.endswith("Sequential"):
        return "Input(" in port.text(node) or "input_shape=" in port.text(node)
    return made.startswith(WORDS["makers of models"]) or any(_is_built(port, each, each) for each in port.origins(node))


def loops(port: Port) -> None:
    """Port every loop that applies gradients of a tape."""
    items = [each for each in port.of(cst.WithItem) if each.asname and "GradientTape" in port.text(each)]
    tapes = {port.text(each.asname.name) for each in items}
    for call in port.calls if tapes else ():
        if any(dotted(arg.value) in tapes for arg in call.args):  # another function takes the gradients
            port.found(OPEN, "gradients from elsewhere", call)
    applies = [call for call in port.calls if method(call) == "apply_gradients" and not _is_of_keras(port, call)]
    applies = applies if any(method(call) == "gradient" for call in port.calls) else []
    for call in applies:
        _reduce(port, call)
        _broadcast(port, call)
    if applies:
        _divide(port, applies)
        noise(port, applies[0])
    for call in (each for each in port.calls if port.last(each) == "BatchNormalization"):
        if applies or (port.replicated and keyword(call, "synchronized") is None):
            port.found(NOTE, "batch normalization", call)


def noise(port: Port, node: Any) -> None:
    """Point out what draws numbers in a training step."""
    if re.search(r"dropout\w*[(=]|GaussianNoise\(|(normal|uniform)\([^)]*\bshape\(", port.module.code, re.I):
        port.found(NOTE, "noise", node)


def _is_of_keras(port: Port, call: Any) -> bool:
    """Return True in the train step of a model and the methods that it calls, and in an optimizer."""
    for owner in (each for each in port.up(call) if isinstance(each, cst.ClassDef)):
        methods = {each.name.value for each in owner.body.body if isinstance(each, cst.FunctionDef)}
        if port.inherits(owner, ("Optimizer", *(("Model", "Sequential") if "train_step" in methods else ()))):
            return True
    return False


def _reduce(port: Port, call: Any) -> None:
    source = _gradient(port, call.args[0].value) if call.args else None
    kind = scaling(port, keyword(source, "target", 0)) if source else UNKNOWN
    if kind not in (MEAN, SUM, EACH):
        port.found(OPEN, "sum or mean" if source else "gradients from elsewhere", source or call)
        return
    how, said = ("mean", "averages over") if kind == MEAN else ("sum", "adds up")
    statement, reduced = port.statement(source), f'npu.distribute.all_reduce({{}}, reduction="{how}")'
    target = port.text(port.target(statement)).strip("[]()")
    if target and statement.body[0].value is source:
        port.insert(statement, f"{target} = {reduced.format(target)}", after=True)
    else:
        port.replace(source, reduced)
    port.found(DONE, "reduce", source, f"the loss {said} the samples: gradients are reduced by {how}")


def _gradient(port: Port, node: Any, depth: int = 0) -> Any:
    """Return the call of ``tape.gradient`` behind gradients, which may have been changed since; None if unknown."""
    if method(node) == "gradient":
        return node
    made = port.assigned(node) if isinstance(node, cst.Name) else None
    if made is not None and made.place == 0 and method(made.value) == "clip_by_global_norm":
        return _gradient(port, made.value.args[0].value, depth + 1)
    below = [node.args[0].value] if _is_call(node, "zip") else [*port.origins(node), *node.children]
    return next(filter(None, (_gradient(port, each, depth + 1) for each in below if depth < 20)), None)


def _broadcast(port: Port, call: Any) -> None:
    """Send the variables of rank 0 before the loop, where they exist."""
    given: Any = next((each.args[1].value for each in walk(call) if _is_call(each, "zip") and len(each.args) > 1), None)
    if isinstance(given, cst.Name):
        given = next(iter(port.origins(given)), given)
    is_model = isinstance(given, cst.Attribute) and given.attr.value in WORDS["variables of a model"]
    names = [given.value] if is_model else [each for each in walk(given) if isinstance(each, cst.Name)] if given else []
    made = [each for each in map(port.assigned, names) if each is not None]
    last = max(made, key=lambda each: port.line(each.statement), default=None)
    start = None
    if last is not None and len({each.scope for each in made}) == 1 and not isinstance(last.scope, cst.ClassDef):
        block = next(each for each in port.up(last.statement) if hasattr(each, "body"))
        later = [each for each in block.body if port.line(each) > port.line(last.statement)]
        start = next(
            (
                each
                for each in later
                if not isinstance(each, (cst.FunctionDef, cst.ClassDef)) and port.runs(each, [call])
            ),
            None,
        )
    if start is None or (is_model and not _is_built(port, names[0], start)):
        port.found(NOTE, "no broadcast", call)
    else:
        text = f"{port.text(names[0])}.variables" if is_model else port.text(given)
        port.insert(start, f"npu.distribute.broadcast({text}, root_rank=0)", after=False)
        port.found(DONE, "broadcast", start)


def _divide(port: Port, steps: list[Any]) -> None:
    """Let each rank read its share of the dataset, or take its share of the arrays, that lead to the steps."""
    running = [loop for loop in port.of(cst.For) if port.runs(loop.body, steps)]
    sources = [loop.iter for loop in running]
    sources += [each for loop in running for each in walk(loop.body) if _is_call(each, "next")]
    chains = {_chain(port, source) for source in sources} - {None}
    are_slices = [_divide_slices(port, loop) for loop in running]
    makers = [each for chain in chains for each in port.up(chain) if isinstance(each, cst.FunctionDef)]
    is_once = all(sum(each in port.callees(call) for call in port.calls) <= 1 for each in makers)
    if len(chains) == 1 and is_once:
        _shard(port, chains.pop(), running)
    elif chains or not any(are_slices):
        port.found(OPEN, "several datasets" if chains else "no dataset", steps[0])


def _chain(port: Port, node: Any, depth: int = 0) -> Any:
    """Return the call of ``batch`` behind what a loop reads, or None."""
    if depth > 12:
        return None
    if method(node) in WORDS["batches"]:
        return node
    if isinstance(node, cst.Call) and node.args and port.last(node) in WORDS["passes data on"]:
        return _chain(port, node.args[0].value, depth + 1)
    if method(node) and not port.name(node.func) and not port.functions(node.func, node):
        return _chain(port, node.func.value, depth + 1)
    return next(filter(None, (_chain(port, each, depth + 1) for each in port.origins(node))), None)


def _shard(port: Port, batch: Any, running: list[Any]) -> None:
    """Divide a dataset before its first shuffle, repeat or batch in the statement, and batch the share of the rank."""
    size, whole, node = keyword(batch, "batch_size", 0), batch.func.value, batch.func.value
    while method(node) and not port.name(node.func):
        whole = node.func.value if method(node) in ("shuffle", "repeat", *WORDS["batches"]) else whole
        node = node.func.value
    statement = port.statement(batch)
    target = dotted(port.target(statement)) or "dataset"
    call = f"npu.distribute.shard_and_rebatch_dataset({port.text(whole)}, {port.text(size)})"
    port.insert(statement, f"{target}, rank_batch = {call}", after=False)
    port.replace(whole, target)
    port.replace(size, "rank_batch")
    port.found(DONE, "shard", batch)
    if isinstance(size, cst.Name):
        _resize(port, size.value, running)


def _resize(port: Port, size: str, running: list[Any]) -> None:
    """Give the batch size of the rank to what the functions of a loop draw or fill in the size of a batch."""
    for call in (each for each in port.calls if method(each) in WORDS["draws"] + WORDS["fills"]):
        inside = [each for each in walk(call) if isinstance(each, cst.Name) and each.value == size]
        if inside and any(port.runs(loop.body, [call]) for loop in running):
            draws = method(call) in WORDS["draws"]
            port.replace(call if draws else inside[0], "{}" + (SHARE if draws else " // npu.distribute.size()"))
            port.found(DONE, "batch size in a shape", call)


def _divide_slices(port: Port, loop: Any) -> bool:
    """Let each rank take its share of the arrays that a loop cuts out of larger ones; True if there are any."""
    found = [each for each in walk(loop.body) if port.target(each) is not None and is_slice(each.body[0].value)]
    for statement in found:
        names = port.text(port.target(statement)).strip("()").split(",")
        for name in (each.strip() for each in names if each.strip() != "_"):
            port.insert(statement, f"{name} = {name}{SHARE}", after=True)
        port.found(DONE, "share of an array", statement)
    return bool(found)


def is_slice(node: Any) -> bool:
    """Return True for ``x[begin:end]``, several of them, and ``data.next_batch(…)``."""
    if isinstance(node, cst.Tuple):
        return all(is_slice(each.value) for each in node.elements)
    if not isinstance(node, cst.Subscript) or len(node.slice) != 1 or not dotted(node.value):
        return method(node) == "next_batch"
    part = node.slice[0].slice
    return isinstance(part, cst.Slice) and part.lower is not None and part.upper is not None and part.step is None


def _is_call(node: Any, name: str) -> bool:
    return isinstance(node, cst.Call) and dotted(node.func) == name


def scaling(port: Port, node: Any, depth: int = 0) -> str:
    """Return the kind of a loss."""
    if depth > 20 or node is None:
        return UNKNOWN
    if isinstance(node, (cst.Integer, cst.Float)):
        return SHARED
    if isinstance(node, cst.UnaryOperation):
        return scaling(port, node.expression, depth + 1)
    if isinstance(node, cst.BinaryOperation):
        return _pair(node.operator, scaling(port, node.left, depth + 1), scaling(port, node.right, depth + 1))
    if isinstance(node, cst.Subscript):
        return COUNT if re.search(r"shape(\(\w+\))?\[0\]$", port.text(node)) else UNKNOWN
    if isinstance(node, cst.Call):
        return _called(port, node, depth)
    kinds = {scaling(port, each, depth + 1) for each in port.origins(node)}
    made = port.assigned(node) if dotted(node) else None
    if kinds == {COUNT} and made and made.statement in port.module.body and "shape(" not in port.text(made.value):
        return SHARED  # the size of all data, not of a batch
    if len(kinds) != 1 or kinds == {UNKNOWN}:
        return SHARED if _NUMBER.match(dotted(node).rpartition(".")[2]) else UNKNOWN
    return kinds.pop()


def _pair(operator: Any, one: str, two: str) -> str:
    if isinstance(operator, (cst.Divide, cst.FloorDivide)):
        if two == COUNT:
            return MEAN if one == SUM else UNKNOWN
        return one if two == SHARED else EACH if one == EACH == two else UNKNOWN
    if isinstance(operator, (cst.Multiply, cst.Power)):
        return two if one == SHARED else one if two == SHARED else EACH if EACH in (one, two) else UNKNOWN
    if one == two or (MEAN in (one, two) and SHARED in (one, two)):
        return MEAN if MEAN in (one, two) else one
    return EACH if EACH in (one, two) and SUM not in (one, two) else UNKNOWN


def _called(port: Port, call: Any, depth: int) -> str:
    name, last, first = port.name(call.func), port.last(call), call.args[0].value if call.args else None
    if last in ("reduce_mean", "reduce_sum"):
        inner, axis = scaling(port, first, depth + 1), keyword(call, "axis", 1) or keyword(call, "reduction_indices")
        if inner in (MEAN, SUM, SHARED):
            return inner  # of a single number
        return EACH if axis is not None and "0" not in port.text(axis) else MEAN if last == "reduce_mean" else SUM
    if last == "compute_average_loss":
        return MEAN if keyword(call, "global_batch_size", 2) is None else SUM
    if last in ("shape", "size", "len") or last in WORDS["the same on all ranks"]:
        return SHARED if last in WORDS["the same on all ranks"] else COUNT
    if last in WORDS["keeps the scale of a loss"]:
        return scaling(port, first, depth + 1)
    if name.startswith("tensorflow.") and last in _PAIRS and len(call.args) > 1:
        return _pair(_PAIRS[last](), scaling(port, first, depth + 1), scaling(port, call.args[1].value, depth + 1))
    if name.startswith("keras.losses."):
        return MEAN if ".v1" in port.text(call.func) else EACH
    if name.startswith(("tensorflow.", "numpy.", "keras.")):
        return EACH
    if last in ("compiled_loss", "compute_loss") and not port.callees(call):
        return MEAN
    if port.maker(call.func).startswith("keras.losses."):
        [maker] = [call.func] if isinstance(call.func, cst.Call) else port.origins(call.func)
        said = port.text(keyword(maker, "reduction")).lower().strip("\"'").rpartition(".")[2]
        return {"none": EACH, "sum": SUM}.get(said, MEAN)
    kinds = {scaling(port, each, depth + 1) for each in port.origins(call)}
    return kinds.pop() if len(kinds) == 1 else UNKNOWN
