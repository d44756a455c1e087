"""Measures how readable the code of the package is; ``make lint`` fails if a figure is worse than the one kept here.

Limits may only shrink: whoever lowers a figure keeps it. ``--names`` lists the files with the most empty names. Only
Python 3.11 counts tokens as the limits do (later versions split f-strings), so other versions check nothing. Docstrings
and ``__init__.py`` aren't counted.
"""

from __future__ import annotations

import ast
import collections
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LIMITS = {
    "names that are pronouns, %": 0.5,
    "names such as item, value or data, %": 0.94,
    "tokens per statement": 10.0,
    "statements over 30 tokens, %": 1.2,
    "conditional expressions per 100 functions": 1.1,
    "assignments of several values": 4,
    "circles of files": 0,
    "statements of a file": 300,
    "functions over 60 lines": 0,
}
"""The most that is allowed. Comments have a least number instead."""
LEAST_COMMENTS = 10.0  # per 100 statements

_PRONOUNS = """
another anything before behind both begun did done each either every everybody everything few first found given got had
here it its kept kind known last left less made many mine missing more most much my near next_ none nothing now one ones
only other others own part place present rest same seen several shown some something such taken that their them then
there these they thing things this those told us we what whatever which who whole whose yours
"""
PRONOUNS = frozenset(_PRONOUNS.split())
_EMPTY = "item items value values data result results entry entries obj element elements info stuff tmp temp"
EMPTY = frozenset(_EMPTY.split())
_NO_REMARK = re.compile(r"# ?(noqa|type:|ruff|pragma|fmt)")
_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (*_FUNCTIONS, ast.ClassDef, ast.Module)

Position = tuple[int, int]  # line and column


class Count:
    """The counts of a package, added up file by file."""

    def __init__(self) -> None:
        self.number: collections.Counter[str] = collections.Counter()
        self.empty_names: collections.Counter[str] = collections.Counter()  # by file
        self.statement_tokens: list[int] = []
        self.longest_file = 0

    def add(self, path: Path) -> None:
        """Count a file."""
        text = path.read_text()
        tree = ast.parse(text)
        docs = lines_of_docstrings(tree)
        for name, is_comprehended in names(tree):
            self._add_name(name, is_comprehended, str(path))
        for node in ast.walk(tree):
            self.number["conditionals"] += isinstance(node, ast.IfExp)
            self.number["several values"] += _assigns_several(node)
            if isinstance(node, _FUNCTIONS):
                lines = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
                self.number["functions"] += 1
                self.number["long functions"] += len(lines - docs) > 60
        positions = []
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                self.number["comments"] += not _NO_REMARK.match(token.string)
            elif token.type not in _LAYOUT and token.start[0] not in docs:
                positions.append(token.start)
        self.number["tokens"] += len(positions)
        spans = list(statements(tree, docs))
        sizes = [sum(start <= position < end for position in positions) for start, end in spans]
        self.statement_tokens += [size for size in sizes if size]
        self.longest_file = max(self.longest_file, len(spans))

    def _add_name(self, name: str, is_comprehended: bool, file: str) -> None:
        self.number["names"] += 1
        bare = name.strip("_")
        is_letter = len(bare) == 1 and not is_comprehended and name != "_"
        self.number["pronouns"] += bare in PRONOUNS
        self.number["empty"] += bare in EMPTY
        self.empty_names[file] += bare in PRONOUNS or bare in EMPTY or is_letter

    def figures(self) -> dict[str, float]:
        """Return the figures that have limits."""
        number = self.number
        sizes = self.statement_tokens
        return {
            "names that are pronouns, %": 100 * number["pronouns"] / number["names"],
            "names such as item, value or data, %": 100 * number["empty"] / number["names"],
            "tokens per statement": sum(sizes) / len(sizes),
            "statements over 30 tokens, %": 100 * sum(size > 30 for size in sizes) / len(sizes),
            "conditional expressions per 100 functions": 100
            * number["conditionals"]
            / number["functions"],
            "assignments of several values": number["several values"],
            "statements of a file": self.longest_file,
            "functions over 60 lines": number["long functions"],
        }

    def comments(self) -> float:
        """Return the number of comments per 100 statements."""
        return 100 * self.number["comments"] / len(self.statement_tokens)


def lines_of_docstrings(tree: ast.AST) -> set[int]:
    """Return the numbers of the lines that docstrings take."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def names(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the names that a file gives to something, and whether a comprehension does."""
    targets = {
        id(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.comprehension)
        for target in ast.walk(node.target)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, id(node) in targets
        elif isinstance(node, ast.arg):
            yield node.arg, False
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, False
        elif isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield node.name, False


def statements(tree: ast.AST, docs: set[int]) -> Iterator[tuple[Position, Position]]:
    """Yield start and end of each statement; a compound one ends where its body begins."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or node.lineno in docs:
            continue
        start = node.lineno, node.col_offset
        decorators = getattr(node, "decorator_list", [])
        if decorators:
            start = decorators[0].lineno, decorators[0].col_offset - 1
        body = node.cases[0].body if isinstance(node, ast.Match) else getattr(node, "body", [])
        if body:
            yield start, (body[0].lineno, body[0].col_offset)
        else:
            yield start, (node.end_lineno or node.lineno, node.end_col_offset or 0)


def _assigns_several(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return isinstance(node.targets[0], ast.Tuple)


def circles(package: Path) -> list[list[str]]:
    """Return the groups of modules that import each other in a loop, in functions and for types too."""
    paths = modules(package)
    imports = {module: set(_imported(path, paths)) for module, path in paths.items()}
    reached = {module: _reached(module, imports) for module in imports}
    loops = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in imports
    }
    return [list(loop) for loop in sorted(loops) if len(loop) > 1]


def modules(package: Path) -> dict[str, Path]:
    """Return the files of a package by the names of their modules."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imported(path: Path, paths: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full_name = f"{node.module}.{alias.name}"
                yield full_name if full_name in paths else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _reached(module: str, imports: dict[str, set[str]]) -> set[str]:
    """Return the modules that a module imports, directly or by others."""
    reached: set[str] = set()
    waiting = [module]
    while waiting:
        for name in imports[waiting.pop()] & imports.keys() - reached:
            reached.add(name)
            waiting.append(name)
    return reached


def main(arguments: list[str]) -> int:
    """Print the figures and what is worse than its limit, and return the exit code."""
    if sys.version_info[:2] != (3, 11):
        print("tests/tools/readable.py counts with Python 3.11 only")
        return 0
    package = Path(
        next((word for word in arguments if not word.startswith("--")), ROOT / "npu_device")
    )
    count = Count()
    for path in modules(package).values():
        if path.name != "__init__.py":
            count.add(path)
    loops = circles(package)
    figures = {**count.figures(), "circles of files": len(loops)}
    if "--names" in arguments:
        print("\n".join(f"{number:5} {file}" for file, number in count.empty_names.most_common(40)))
    if "--counts" in arguments:
        print("\n".join(f"{figure:8.2f}  {name}" for name, figure in figures.items()))
        print(
            f"{count.comments():8.2f}  comments per 100 statements\n{count.number['tokens']:8}  tokens"
        )
        print("\n".join(f"circle of {len(loop)}: {', '.join(loop)}" for loop in loops))
    worse = [
        f"{figures[name]:.2f} {name}, at most {most}"
        for name, most in LIMITS.items()
        if figures[name] > most
    ]
    if count.comments() < LEAST_COMMENTS:
        worse.append(
            f"{count.comments():.2f} comments per 100 statements, at least {LEAST_COMMENTS}"
        )
    print("\n".join(worse), file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
