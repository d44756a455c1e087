"""What trains in TensorFlow 2: models that ``fit`` trains, and custom loops."""

from __future__ import annotations

import enum
import itertools
import re
from typing import Any

import libcst as cst
from libcst import matchers

from npu_device._src.port.loop_data import divide
from npu_device._src.port.nodes import (
    DEFINITIONS,
    argument,
    binds,
    bounded,
    dotted,
    follow,
    is_call_of,
    method,
    walk,
)
from npu_device._src.port.port import DONE, NOTE, OPEN, Port
from npu_device._src.port.rules import WORDS_BY_TOPIC
from npu_device._src.port.scaling import Scale, counts_replicas, scaling
from npu_device._src.port.script import BLOCKS, Assignment

MODEL_CLASSES = ("Model", "Sequential")
_DRAWS = re.compile(r"dropout\w*[(=]|GaussianNoise\(|(normal|uniform)\([^)]*\bshape\(", re.I)


class _Trainee(enum.Enum):
    """What ``fit`` is called on."""

    MODEL = True
    OTHER = False
    COMPILED = "compiled"  # a model that a function of the script has compiled, and so replicated
    UNKNOWN = None


def replicate_models(port: Port) -> None:
    """Replicate every model that the script compiles, or trains without compiling it here."""
    # Functions of modules are left out, such as re.compile and tf.compat.v1.test.compile.
    calls = [call for call in port.calls if method(call) and not port.name(call.func.value)]
    for call in calls:
        # A class that compiles itself is replicated where it is made.
        model = call.func.value
        if method(call) == "compile" and port.text(model) not in ("self", "super()"):
            _replicate(port, call, model)
    for call in calls:
        if method(call) in WORDS_BY_TOPIC["trains a model"]:
            _replicate_trained(port, call)
    if port.replicated:
        _point_out_draws(port)


def _point_out_draws(port: Port) -> None:
    """Point out what a model draws by itself in each step."""
    for call in port.calls:
        if method(call) not in WORDS_BY_TOPIC["draws"]:
            continue
        scope = port.scope(call)
        if not isinstance(scope, cst.Module) and scope.name.value in ("call", "train_step"):
            text = "each rank draws its own numbers here, which aren't those of one process"
            port.report(NOTE, "noise", call, text)


def _replicate(port: Port, node: Any, model: Any, after: bool = True) -> None:
    """Replicate a model before or after the statement of a node; a model that is replicated already stays so."""
    # The call of a function would make a second model.
    if isinstance(model, cst.Call):
        return
    if _is_of_expression(port, model):
        port.report(OPEN, "unknown fit", node)
        return
    name = port.text(model)
    line = f"npu.distribute.replicate({name})"
    # A name is assigned anew where it is assigned; otherwise ``replicate`` changes the model in place.
    if after and dotted(model) and _is_assigned(port, model, node):
        line = f"{name} = {line}"
    port.insert(port.own_statement(node), line, after)
    key = (name, port.scope(node))
    if key not in port.replicated:
        port.replicated.add(key)
        port.report(DONE, "fit", node)


def _is_of_expression(port: Port, model: Any) -> bool:
    """Return True for a model of a lambda or a comprehension, which has no name outside."""
    owners = [outer for outer in port.around(model) if not isinstance(outer, DEFINITIONS)]
    names = matchers.findall(model, matchers.Name())
    return any(binds(owner, name.value) for owner in owners for name in names)


def _is_assigned(port: Port, model: Any, node: Any) -> bool:
    """Return True if a name belongs to the scope of a node, where an assignment doesn't make it another variable."""
    scope = port.scope(node)
    if isinstance(scope, cst.Module) or not isinstance(model, cst.Name):
        return True
    return scope in port.takers(model.value, node) or bool(port.assignments(model.value, scope))


def _replicate_trained(port: Port, call: Any) -> None:
    """Replicate the model of a call of ``fit``, unless that has been done where it was compiled."""
    model = call.func.value
    assignment = port.assigned(model)
    is_one_model = assignment is None or _is_compiled(port, model, assignment.scope)
    if is_one_model and port.is_replicated(model):
        return
    trainee = _trainee(port, model)
    if trainee is _Trainee.COMPILED and is_one_model:
        # The next calls of fit must not replicate the model in this function.
        port.replicated.add((port.text(model), port.scope(call)))
    elif trainee in (_Trainee.MODEL, _Trainee.COMPILED):
        if is_one_model and assignment is not None and assignment.scope is port.scope(call):
            _replicate(port, assignment.statement, model)
        else:
            # Several models may have the name, or it isn't this function's to assign.
            _replicate(port, call, model, after=False)
    elif trainee is _Trainee.UNKNOWN:
        # The name is a model if it is replicated elsewhere, or if only Keras has such a call.
        if dotted(model) and (port.is_replicated(model) or _looks_like_training(call)):
            _replicate(port, call, model, after=False)
        else:
            port.report(OPEN, "unknown fit", call)


def _is_compiled(port: Port, model: Any, scope: Any) -> bool:
    """Return True if each model that a name gets is compiled before the name gets the next, or there is only one."""
    name = port.text(model)
    assigned = []
    for assignment in port.assignments(name, scope):
        if port.text(assignment.value) != "None":
            assigned.append(assignment.statement)
    compiled = []
    for call in port.calls:
        is_compile = method(call) == "compile" and port.text(call.func.value) == name
        if is_compile and port.scope(call) is scope:
            compiled.append(port.statement(call))
    if len(assigned) < 2 and not compiled:
        return True
    lines = [port.line(statement) for statement in compiled]
    for statement, following in itertools.zip_longest(assigned, assigned[1:]):
        end = float("inf")
        if following is not None:
            end = port.line(following)
        if not any(port.line(statement) < line < end for line in lines):
            return _are_followed(port, assigned, compiled)
    return True


def _are_followed(port: Port, assigned: list, compiled: list) -> bool:
    """Return True if what all branches assign is compiled after them."""
    for statement in compiled:
        block = next(outer for outer in port.around(statement) if isinstance(outer, BLOCKS))
        inside = set(walk(block))
        is_last = all(port.line(other) < port.line(statement) for other in assigned)
        if is_last and inside.issuperset(assigned):
            return True
    return False


def _looks_like_training(call: Any) -> bool:
    # Only ``fit`` is doubtful, since scikit-learn has one, too.
    if method(call) != "fit":
        return True
    return any(argument(call, name) is not None for name in WORDS_BY_TOPIC["arguments of fit"])


def _trainee(port: Port, model: Any) -> _Trainee:
    for node in follow(model, port.origins):
        if not isinstance(node, cst.Call):
            continue
        name = port.name(node.func)
        class_name = dotted(node.func)
        # A class may be called by its full name: tf.keras.Sequential()
        if name:
            return _Trainee(name.startswith(WORDS_BY_TOPIC["makers of models"]))
        if class_name in port.classes:
            return _Trainee(port.inherits(port.classes[class_name], MODEL_CLASSES))
        bodies = [function.body for function in port.callees(node)]
        if any(method(inner) == "compile" for body in bodies for inner in walk(body)):
            return _Trainee.COMPILED
    return _Trainee.UNKNOWN


def is_model(port: Port, node: Any) -> bool:
    """Return True if a value is known to be a Keras model."""
    return _trainee(port, node) in (_Trainee.MODEL, _Trainee.COMPILED)


# Custom loops


def port_loops(port: Port) -> None:
    """Port every loop that applies gradients of a tape."""
    _ask_where_tapes_go(port)
    applies = training_steps(port)
    for call in applies:
        _reduce(port, call)
        _broadcast(port, call)
    if applies:
        divide(port, applies)
        ask_about_noise(port, applies[0])
    for call in port.calls:
        if port.called_word(call) == "BatchNormalization":
            is_plain_in_fit = port.replicated and argument(call, "synchronized") is None
            if applies or is_plain_in_fit:
                port.report(NOTE, "batch normalization", call)


def training_steps(port: Port) -> list:
    """Return the calls that apply gradients of a tape."""
    # Gradients come from a tape only if the script calls ``gradient``.
    if not any(method(call) == "gradient" for call in port.calls):
        return []
    applies = [call for call in port.calls if method(call) == "apply_gradients"]
    return [call for call in applies if not _is_of_keras(port, call)]


def _ask_where_tapes_go(port: Port) -> None:
    """Ask about tapes that are passed to functions, which may take the gradients."""
    tapes = set()
    for manager in port.of(cst.WithItem):
        # Only a tape with a name can be passed on.
        if manager.asname and "GradientTape" in port.text(manager):
            tapes.add(port.text(manager.asname.name))
    for call in port.calls:
        # The tape may be passed to a function: minimize(tape, loss)
        if any(dotted(arg.value) in tapes for arg in call.args):
            port.report(OPEN, "gradients from elsewhere", call)


def ask_about_noise(port: Port, node: Any) -> None:
    """Point out what draws numbers in a training step."""
    if _DRAWS.search(port.module.code):
        port.report(NOTE, "noise", node)


def _is_of_keras(port: Port, call: Any) -> bool:
    """Return True in the train step of a model and the methods that it calls, and in an optimizer."""
    for owner in port.around(call):
        if not isinstance(owner, cst.ClassDef):
            continue
        methods = {node.name.value for node in owner.body.body if isinstance(node, cst.FunctionDef)}
        # An optimizer around another one is given gradients, which its caller reduces.
        if port.inherits(owner, ("Optimizer",)):
            return True
        # fit calls the train step, and replicate reduces its gradients.
        if "train_step" in methods and port.inherits(owner, MODEL_CLASSES):
            return True
    return False


def _reduce(port: Port, call: Any) -> None:
    """Reduce the gradients that a call of ``apply_gradients`` gets, where the tape gives them."""
    source = None
    if call.args:
        source = _gradient(port, call.args[0].value)
    if source is None:
        port.report(OPEN, "gradients from elsewhere", call)
        return
    scale = scaling(port, argument(source, "target", 0))
    if scale is Scale.MEAN:
        reduction = "mean"
        effect = "averages over"
    elif scale in (Scale.SUM, Scale.EACH):
        # A tape adds up the values of a loss that has several.
        reduction = "sum"
        effect = "adds up"
    else:
        port.report(OPEN, "sum or mean", source)
        return
    statement = port.statement(source)
    template = f'npu.distribute.all_reduce({{}}, reduction="{reduction}")'
    target = port.text(port.target(statement)).strip("[]()")
    # The gradients have a name: gradients = tape.gradient(…)
    if target and statement.body[0].value is source:
        port.insert(statement, f"{target} = {template.format(target)}", after=True)
    else:
        # The call stands inside another one: optimizer.apply_gradients(zip(tape.gradient(…), …))
        port.replace(source, template)
    port.report(
        DONE,
        "reduce",
        source,
        f"the loss {effect} the samples: gradients are reduced by {reduction}",
    )


@bounded(None)
def _gradient(port: Port, node: Any) -> Any:
    """Return the call of ``tape.gradient`` behind gradients, which may have been changed since; None if unknown."""
    if method(node) == "gradient":
        return node
    if isinstance(node, cst.Name):
        assignment = port.assigned(node)
        # Reduced before the clip, so that all ranks clip alike.
        if assignment is not None and _is_clipped(assignment):
            return _gradient(port, assignment.value.args[0].value)
    # Gradients that are divided by replicas aren't the tape's.
    if counts_replicas(port, node):
        return None
    # The pairs may be made here: zip(gradients, variables)
    if is_call_of(node, "zip"):
        candidates = [node.args[0].value]
    else:
        candidates = [*port.origins(node), *node.children]
    for candidate in candidates:
        source = _gradient(port, candidate)
        if source is not None:
            return source
    return None


def _is_clipped(assignment: Assignment) -> bool:
    """Return True for gradients that ``gradients, norm = tf.clip_by_global_norm(…)`` has clipped."""
    return assignment.position == 0 and method(assignment.value) == "clip_by_global_norm"


def _broadcast(port: Port, call: Any) -> None:
    """Send the variables of rank 0 before the loop, where they exist."""
    variables = _applied_variables(port, call)
    is_of_model = False
    if isinstance(variables, cst.Attribute):
        is_of_model = variables.attr.value in WORDS_BY_TOPIC["variables of a model"]
    names = []
    # The variables may belong to a model: model.trainable_variables
    if is_of_model:
        names = [variables.value]
    elif variables is not None:
        # The variables may be listed: [w, b], generator.variables + discriminator.variables
        names = list(matchers.findall(variables, matchers.Name()))
    start = _first_statement_leading_to(port, names, call)
    if start is None or (is_of_model and not _is_built(port, names[0], start)):
        port.report(NOTE, "no broadcast", call)
        return
    text = port.text(variables)
    if is_of_model:
        # All variables are sent, also untrained ones.
        text = f"{port.text(names[0])}.variables"
    port.insert(start, f"npu.distribute.broadcast({text}, root_rank=0)", after=False)
    port.report(DONE, "broadcast", start)


def _applied_variables(port: Port, call: Any) -> Any:
    """Return the variables that ``apply_gradients(zip(gradients, variables))`` changes; None if unknown."""
    zips = [node for node in walk(call) if is_call_of(node, "zip") and len(node.args) > 1]
    if not zips:
        return None
    variables = zips[0].args[1].value
    # The variables may have a name: variables = model.trainable_variables
    if isinstance(variables, cst.Name):
        return port.meant(variables)
    return variables


def _first_statement_leading_to(port: Port, names: list, call: Any) -> Any:
    """Return the statement after the assignments of all names that leads to a call; None if there isn't one."""
    assignments = list(filter(None, map(port.assigned, names)))
    # With assignments in several scopes, no line is known that all of them reach.
    if len({assignment.scope for assignment in assignments}) != 1:
        return None
    latest = max(assignments, key=lambda assignment: port.line(assignment.statement))
    # No statement after a class attribute is in the loop.
    if isinstance(latest.scope, cst.ClassDef):
        return None
    block = next(node for node in port.around(latest.statement) if hasattr(node, "body"))
    for statement in block.body:
        is_later = port.line(statement) > port.line(latest.statement)
        if is_later and not isinstance(statement, DEFINITIONS) and port.runs(statement, [call]):
            return statement
    return None


def _is_built(port: Port, node: Any, user: Any) -> bool:
    """Return True if a model has its variables before a node: it was made of inputs, or called or built before."""
    for source in follow(node, port.origins):
        place = source
        if source is node:
            place = user
        name = dotted(source)
        if name and any(_is_use(port, call, name, place) for call in port.calls):
            return True
        if isinstance(source, cst.Call) and _makes_variables(port, source):
            return True
    return False


def _makes_variables(port: Port, call: Any) -> bool:
    """Return True for the call of a class that gives a model its variables at once."""
    maker = port.name(call.func)
    # A Sequential builds its layers at once if the shape of the input is known.
    if maker.endswith("Sequential"):
        return "Input(" in port.text(call) or "input_shape=" in port.text(call)
    return maker.startswith(WORDS_BY_TOPIC["makers of models"])


def _is_use(port: Port, call: Any, name: str, user: Any) -> bool:
    """Return True if a call builds the variables of a model before a node, in its scope."""
    builds = method(call) in ("build", "summary") and dotted(call.func.value) == name
    if not builds and dotted(call.func) != name:
        return False
    return port.scope(call) is port.scope(user) and port.line(call) < port.line(user)
