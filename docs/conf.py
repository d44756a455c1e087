"""Sphinx's settings for the site: ``make site`` builds it from these pages, the docstrings and the commands' help."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from sphinx.application import Sphinx

from npu_device._src.version import __version__

DOCS = Path(__file__).parent
MODULES = {
    "npu_device": "the job, and Ascend's options and scopes",
    "npu_device.distribute": "models, optimizers, data and values over the ranks",
    "npu_device.callbacks": "Keras callbacks",
    "npu_device.train": "checkpoints",
    "npu_device.train.optimizer": "loss-scale optimizers",
    "npu_device.errors": "errors to catch",
    "npu_device.testing": "tests on several ranks",
    "npu_device.horovod.tensorflow": "Horovod's names",
    "npu_device.horovod.tensorflow.keras": "Horovod's names for Keras",
    "npu_device.horovod.tensorflow.keras.callbacks": "Horovod's Keras callbacks",
    "npu_device.distribute.hccl_ops": "HCCL's collectives on tensors",
    "hccl.manage.api": "groups of ranks",
    "hccl.split.api": "segments of gradients",
    "npu_device.distribute.npu_callbacks": "Ascend's broadcast callbacks",
    "npu_device.distribute.hccl": "Ascend's own paths of names in `npu_device.distribute`",
    "npu_device.ops": "Ascend's operators for models",
    "npu_device.gen_npu_ops": "Ascend's low-level operators",
    "npu_device.configs": "Ascend's run contexts",
    "npu_device.utils.scope": "Ascend's scopes",
    "npu_device.compat": "version 1 behaviour",
    "npu_device.compat.v1": "session configurations",
    "npu_bridge.npu_init": "TF1 style: sessions, hooks, estimators",
}
"""The modules of the reference, with what they are for."""

COMMANDS = {
    "npurun": "-m npu_device.launch",
    "npurun check": "-m npu_device.launch check",
    "npurun verify": "-m npu_device.launch verify",
    "npurun speed": "-m npu_device.launch speed",
    "npurun port": "-m npu_device.launch port",
    "npurun trace": "-m npu_device.launch trace",
    "npurun docs": "-m npu_device.launch docs",
}

project = "npu_device"
release = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns: list[str] = []
myst_heading_anchors = 4
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
autodoc_member_order = "groupwise"
autodoc_typehints = "none"
autodoc_inherit_docstrings = False  # those of TensorFlow and Keras are Markdown
nitpick_ignore_regex = [
    ("py:.*", r"(tensorflow|tf|keras|tf_keras|numpy|np|collections|typing|contextlib)\..*")
]

html_theme = "furo"
html_title = "npu_device"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}


def write_reference(app: Sphinx) -> None:
    """Write the pages that are made anew at each build: a page per module, and the commands' help."""
    folder = DOCS / "reference"
    folder.mkdir(exist_ok=True)
    shown: dict[int, str] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        again, members = {}, []
        for each in getattr(module, "__all__", None) or sorted(vars(module)):
            thing = getattr(module, each)
            if each.startswith("_") or not str(getattr(thing, "__module__", "")).startswith(
                "npu_device"
            ):
                continue
            if id(thing) in shown:
                again[each] = shown[id(thing)]
            else:
                shown[id(thing)] = f"{name}.{each}"
                members.append(each)
        text = f"{name}\n{'=' * len(name)}\n\n.. automodule:: {name}\n"
        text += f"   :members: {', '.join(members)}\n" if members else ""
        if again:
            text += "\nUnder other names:\n\n"
            text += "".join(f"- ``{each}``: :py:obj:`{first}`\n" for each, first in again.items())
        _write(folder / f"{name}.rst", text)
    rows = [f"- [`{name}`]({name}.rst): {purpose}\n" for name, purpose in MODULES.items()]
    contents = "\n".join(MODULES)
    for file in ("CONTRIBUTING", "CHANGELOG"):
        text = (DOCS.parent / f"{file}.md").read_text()
        _write(
            folder / f"{file.lower()}.md", re.sub(r"\]\((?=[\w.]+[/\w]*\.\w+)", "](../../", text)
        )
    _write(
        folder / "api.md",
        f"# Python API\n\nFrom the docstrings.\n\n{''.join(rows)}\n```{{toctree}}\n:hidden:\n\n{contents}\n```\n",
    )
    sections = "".join(
        f"\n## {name}\n\n```text\n{_help(words)}```\n" for name, words in COMMANDS.items()
    )
    _write(folder / "commands.md", f"# Commands\n\nWhat `--help` prints.\n{sections}")


def _help(words: str) -> str:
    command = [sys.executable, *words.split(), "--help"]
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout


def _write(path: Path, text: str) -> None:
    """Write a page, unless it is there already: Sphinx reads changed pages only."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def link_to_pages(app: Sphinx, name: str, source: list[str]) -> None:
    """Let links to the repository's own pages lead to their copies in the site."""
    up = "../" * name.count("/")
    for file, page in (
        ("CONTRIBUTING", "reference/contributing"),
        ("CHANGELOG", "reference/changelog"),
        ("README", "index"),
    ):
        source[0] = re.sub(rf"\]\((\.\./)+{file}\.md", f"]({up}{page}.md", source[0])
    source[0] = source[0].replace("](../../docs/", f"]({up}")


def is_other_name(app: Sphinx, what: str, name: str, thing: object, *_: object) -> bool | None:
    """Leave out a class attribute that only names another class of the package."""
    return (
        True
        if isinstance(thing, type) and "._src." in thing.__module__ and name != thing.__name__
        else None
    )


def setup(app: Sphinx) -> None:
    """Register the steps."""
    app.connect("autodoc-skip-member", is_other_name)
    app.connect("builder-inited", write_reference)
    app.connect("source-read", link_to_pages)
