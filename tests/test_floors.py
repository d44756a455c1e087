"""Imports go down only: every import of the package against the table of floors in docs/architecture.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROW = re.compile(
    r"^\| (?P<floor>\d+) \| (?P<components>[^|]+) \| [^|]+ \| (?P<beside>[^|]+) \| [^|]+ \|$",
    re.MULTILINE,
)
SOURCE_FOLDER = "npu_device/_src/"
PACKAGES = ("npu_device", "hccl", "npu_bridge")

MORE_THAN_IMPORTS = {
    "npu_device/__init__.py": "refuses to be mixed with Ascend's wheels; loads names late, for npurun",
    "npu_device/distribute/__init__.py": "loads its callbacks at their first use, which imports Keras",
    "npu_device/horovod/__main__.py": "runs a script",
    "npu_device/compat/v1/__init__.py": "takes npu_bridge's modules in by its __path__",
    "npu_bridge/helper/helper.py": "get_gen_ops() returns another public module, which no component may import",
}
"""Public files that hold more than imports and ``__all__``, and why."""


@dataclass(frozen=True)
class Component:
    """A row of the table: a folder or a file, or several that count as one."""

    floor: int
    paths: tuple[str, ...]
    beside: tuple[str, ...]

    def may_import(self, other: Component) -> bool:
        """True for the component itself, one on a lower floor, or one that the table allows beside this one."""
        return (
            other is self
            or other.floor < self.floor
            or any(path in self.beside for path in other.paths)
        )


def paths(cell: str) -> tuple[str, ...]:
    """Return the paths of a cell; one without a package in front is in ``npu_device/_src/``."""
    quoted = re.findall(r"`([^`]+)`", cell)
    return tuple(path if path.startswith(PACKAGES) else SOURCE_FOLDER + path for path in quoted)


COMPONENTS = [
    Component(int(row["floor"]), paths(row["components"]), paths(row["beside"]))
    for row in ROW.finditer(PAGE)
]


def component_of(file: str) -> Component | None:
    """Return the component with the longest path around a file, or None. A public file matches its own folder only."""
    found = [
        (len(path), component)
        for component in COMPONENTS
        for path in component.paths
        if file.startswith(path)
    ]
    length, component = max(found, key=lambda one: one[0], default=(0, None))
    return None if file.startswith(SOURCE_FOLDER) and length <= len(SOURCE_FOLDER) else component


FILES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


INSIDE = {
    "collectives": (
        (
            "dtypes",
            "engines/host/buffers",
            "engines/host/mpi_world",
            "gpu_choice",
            "graph",
            "group",
            "thread_work",
        ),
        ("calling_threads", "hosts_of_job"),
        ("call",),
        ("call_count", "engines/host/channel", "sessions"),
        ("engines/context", "engines/host/transfer_rounds"),
        ("engines/host/memory_ring", "engines/host/message_channel", "engines/host/queue"),
        ("engines/host/sockets", "engines/host/mpi_messages"),
        ("engines/host/sharing", "engines/host/host_engine", "engines/tensorflow/kernels", "stall"),
        ("engines/host/host_detection", "engines/host/pair_transfers", "engines/tensorflow/engine"),
        ("engines/engines",),
        ("job",),
        ("agreed_engine", "engine_choice", "engine_text", "tensorflow_server"),
        ("collective", "resources"),
        ("moves",),
        ("ops",),
    ),
    "pools": (
        ("answers", "fork_server", "forked", "short_path", "by_value"),
        ("pool", "worker"),
        ("notebook",),
    ),
    "testing": (
        (
            "faults",
            "hosts",
            "leaks",
            "marked_tests",
            "soak/connections",
            "soak/proxy",
            "soak/npuruns",
        ),
        ("soak/running",),
        ("run", "soak/network", "pytest_rank"),
        ("compare_ranks", "pytest_job", "soak/random_faults"),
        ("plugin", "soak/disturbed_job"),
    ),
}
"""The floors inside two components, from the ground up: a file imports from lower ones only. Each room of ``training/``
has a row of the table.
"""


def file_of(module: str) -> str | None:
    """Return the file of a dotted name, or None when it is none of the packages' modules."""
    path = module.replace(".", "/")
    return next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in FILES), None)


def imported(file: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and file of all that a module imports, in functions and for type checking too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: write the module's whole name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            found = file_of(name) or file_of(name.rpartition(".")[0])
            if found is not None:
                yield node.lineno, found


def test_the_table_has_a_row_for_every_component() -> None:
    assert len(COMPONENTS) > 10
    missing = [
        path for component in COMPONENTS for path in component.paths if not (ROOT / path).exists()
    ]
    assert not missing, f"docs/architecture.md lists what isn't there: {missing}"
    folders = {
        parent
        for component in COMPONENTS
        for path in component.paths
        for parent in Path(path).parents
    }
    above = [f"{folder.as_posix()}/__init__.py" for folder in folders]
    unlisted = [file for file in FILES if component_of(file) is None and file not in above]
    assert not unlisted, f"docs/architecture.md has no row for {unlisted}"


def test_imports_go_down() -> None:
    wrong = []
    for file, tree in FILES.items():
        component = component_of(file)
        for line, target in imported(file, tree):
            other = component_of(target)
            if component is not None and other is not None and not component.may_import(other):
                wrong.append(
                    f"{file}:{line} (floor {component.floor}) imports {target} (floor {other.floor})"
                )
    assert not wrong, "imports that go up or sideways:\n" + "\n".join(wrong)


@pytest.mark.parametrize("component", INSIDE)
def test_imports_go_down_inside(component: str) -> None:
    floors = {
        f"{SOURCE_FOLDER}{component}/{name}.py": floor
        for floor, row in enumerate(INSIDE[component])
        for name in row
    }
    files = {
        file
        for file in FILES
        if file.startswith(f"{SOURCE_FOLDER}{component}/") and "__init__" not in file
    }
    assert floors.keys() == files
    wrong = [
        f"{file}:{line} imports {target}"
        for file in files
        for line, target in imported(file, FILES[file])
        if target in floors and floors[target] >= floors[file]
    ]
    assert not wrong, "imports that go up:\n" + "\n".join(wrong)


def _defined() -> set[str]:
    """Return the names that the packages themselves give to something."""
    found = set()
    for tree in FILES.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
                found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return found


PRIVATE = {
    "_getframe",
    "_current_frames",
    "_DummyThread",
    "_ActionsContainer",
    "_asdict",
    "_fields",
    "_replace",
    "_tmp_path_factory",
    "_setupstate",
}
"""Names with an underscore that are used outside of ``compat/``: they are Python's own, and pytest's (the last two)."""


def test_private_names_of_tensorflow_and_keras_stand_in_compat() -> None:
    own = _defined() | PRIVATE
    wrong = []
    for file, tree in FILES.items():
        if "/compat/" in file:
            continue
        for node in ast.walk(tree):
            name = ""
            if isinstance(node, ast.Attribute):
                name = node.attr
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "getattr",
                "hasattr",
                "setattr",
            ):
                name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if re.match(r"_[A-Za-z]", name) and name not in own and not name.startswith("_npu"):
                wrong.append(f"{file}:{node.lineno}: {name}")
    assert not wrong, (
        "private names of TensorFlow or Keras; give them a function in compat/:\n"
        + "\n".join(wrong)
    )


def test_collectives_decide_alone_what_a_session_runs() -> None:
    asking = [file for file in FILES if "runs_if_fetched()" in (ROOT / file).read_text()]
    assert sorted(asking) == [
        f"{SOURCE_FOLDER}collectives/{name}.py" for name in ("collective", "graph")
    ]


def test_public_files_hold_imports_and_all_only() -> None:
    public = [component for component in COMPONENTS if "hccl/" in component.paths]
    wrong = []
    for file, tree in FILES.items():
        if component_of(file) in public and file not in MORE_THAN_IMPORTS:
            wrong += [f"{file}:{node.lineno}" for node in tree.body if not _may_be_public(node)]
    assert not wrong, "code in public files; move it to npu_device/_src:\n" + "\n".join(wrong)


def _may_be_public(node: ast.stmt) -> bool:
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)] == ["__all__"]
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return docstring or isinstance(node, (ast.Import, ast.ImportFrom))


def test_names_of_files_are_of_one_file() -> None:
    """Public files have names for scripts, those of ``compat/`` and ``environment/`` names of what they know."""
    shared = ("__init__.py", "__main__.py")
    own_folders = (SOURCE_FOLDER, "npu_device/launch/")
    public = {Path(file).name for file in FILES if not file.startswith(own_folders)}
    own = [
        Path(file).name
        for file in FILES
        if file.startswith(own_folders)
        and Path(file).name not in shared
        and Path(file).parent.name not in ("compat", "environment")
    ]
    assert {name for name in own if own.count(name) > 1 or name in public} == set()


def test_names_of_classes_are_of_one_class() -> None:
    files: dict[str, list[str]] = {}
    for file, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(file)
    assert {name: places for name, places in files.items() if len(places) > 1} == {}
