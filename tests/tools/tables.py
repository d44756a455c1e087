"""The rows of the tables in ``docs/environment.md`` and ``docs/options.md``, from the declarations in the package;
``python tests/tools/tables.py`` writes them. What stands around the tables is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from npu_device._src.environment import ALL, ascend, launcher_variables, own, tensorflow_variables
from npu_device._src.environment.forms import Variable
from npu_device._src.options.table import RULES, Rule

DOCS = Path(__file__).resolve().parents[2] / "docs"

_BY_NPURUN = (
    *("HUB", "ERROR_FILE", "HOROVOD", "RESTART_COUNT", "RANK_PROCESS", "PROGRESS_FILE"),
    *("JOIN_REQUESTS", "MEMORY_COPIES"),
)
_BY_LAUNCH_SCRIPTS = re.compile("RANK_|POD_NAME|CM_|(ASCEND_)?DEVICE_ID|JOB_ID")


def filled() -> dict[Path, str]:
    """Return both pages as they should be."""
    return {
        DOCS / "environment.md": _page("environment.md", _variables()),
        DOCS / "options.md": _options_page(),
    }


def _page(name: str, tables: dict[str, list[str]]) -> str:
    text = (DOCS / name).read_text(encoding="utf-8")
    for heading, rows in tables.items():
        table = re.compile(rf"(## {heading}\n.*?\n\|---[^\n]*\n)(?:\|[^\n]*\n)*", re.DOTALL)
        text, count = table.subn(lambda found, rows=rows: found[1] + "".join(rows), text)
        assert count == 1, f"{name} has no table under {heading!r}"
    return text


def _variables() -> dict[str, list[str]]:
    """Return the rows for each of those who set variables."""
    declared = {variable.name: variable for variable in (*_of(own), *ALL)}
    tables: dict[str, list[str]] = {
        "Variables that you set": [],
        "Variables that npurun or a rank sets": [
            _row(declared.pop(f"NPU_DEVICE_{name}")) for name in _BY_NPURUN
        ],
        "Variables that Ascend launch scripts set": [
            _row(declared.pop(variable.name))
            for variable in _of(ascend)
            if _BY_LAUNCH_SCRIPTS.match(variable.name)
        ],
        "Variables that launchers and platforms set": [
            _row(declared.pop(variable.name))
            for variable in (tensorflow_variables.TF_CONFIG, *_of(launcher_variables))
        ],
    }
    tables["Variables that you set"] = list(map(_row, declared.values()))
    return tables


def _of(owner: object) -> Iterable[Variable]:
    return [value for value in vars(owner).values() if isinstance(value, Variable)]


def _row(variable: Variable) -> str:
    value = variable.default
    default = (
        "–" if value in (None, ()) else f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
    )
    meaning = variable.meaning + (" Must be the same on all ranks." if variable.is_compared else "")
    return f"| `{variable.name}` | {default} | {variable.unit or '–'} | {variable.form.expected} | {meaning} |\n"


def _options_page() -> str:
    tables: dict[str, list[str]] = {"Options with an effect": [], "Options without effect": []}
    for rule in RULES:
        tables[
            f"Options with{'out' if rule.effect.startswith('No effect') else ' an'} effect"
        ].append(_option(rule))
    return _page("options.md", tables)


def _option(rule: Rule) -> str:
    example = rule.allowed[0] if rule.allowed else rule.default
    kind = ("any" if example is None else type(example).__name__) + (
        " or bool" if "true" in rule.allowed else ""
    )
    default = "unset" if rule.default is None else f"`{rule.default!r}`"
    allowed = ", ".join(f"`{value!r}`" for value in rule.allowed) or "any"
    allowed = f"{rule.between[0]} to {rule.between[1]}" if rule.between else allowed
    effect = rule.effect + (" Deprecated by Ascend." if rule.is_deprecated else "")
    return f"| `{rule.path}` | {kind} | {default} | {allowed} | {effect} |\n"


if __name__ == "__main__":
    for page, text in filled().items():
        page.write_text(text, encoding="utf-8")
