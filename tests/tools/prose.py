"""Checks the English of pages, docstrings and messages; ``make lint`` runs it. Exit code 1 if a rule is broken.

Budgets and counts may only shrink: whoever lowers a number here keeps it. What is generated isn't counted.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PACKAGES = ("npu_device", "hccl", "npu_bridge")

GENERATED = {"environment.md", "options.md"}
CONTRIBUTORS = {"CONTRIBUTING.md", "architecture.md", "notes.md"}

WORDS = {"README.md": 500, "pages for users": 23_000, "pages for contributors": 8_000}
_LONG, _CROWDED = (
    "sentences above 30 words",
    "sentences with two possessives",
)  # the first in pages for users
LIMITS = {
    _LONG: 0,
    _CROWDED: 0,
    "possessives in pages": 17,
    "possessives in docstrings and messages": 200,
}  # on things

_GENERATED_FROM = {"porting_rules.md": "\n## Rules", "verdicts.md": "\n## Causes"}
_MOST_WORDS = 30  # in a sentence
_WIDE = 120  # characters of a line outside of tables
_NAMES = "Ascend|Keras|TensorFlow|Horovod|Python|MPI|NCCL|Kubeflow|Slurm|Ray|Spark|PyTorch|glibc|Linux|gRPC"
_NAMES += "|numpy|NVIDIA|npurun|Perfetto|pytest|torchrun|user|author|caller"  # products, and people
_POSSESSIVE = re.compile(
    rf"\b(?!(?:{_NAMES}|it|that|let|what|here|there|who|one|he|she)'s)(?<!Keras )\w+'s\b",
    re.IGNORECASE,
)
_BANNED = {
    r"says (?:so|what|which|that|how)\b": "reports, prints, lists, warns that",
    r"\bas many \w+ as\b": "the same number of",
    r"\bwho(?:ever)? has not\b": "ranks that haven't",
    r"\bmend(?:s|ed)?\b": "fix",
    r"\bgoes before\b": "takes precedence over",
    r"\bdo on N ranks what one process does\b": "give the single-process result",
    r"\bobey(?:s|ed)?\b": "follow",
    r"\bdata ?sets?\b(?<!dataset)(?<!datasets)": "dataset",
    r"\bbatch normalisation\b": "batch normalization",
    r"\btf_keras\b(?!\.|`)": "tf-keras",
}


def main() -> int:
    """Print what breaks a rule, and return the exit code."""
    problems: list[str] = []
    words = dict.fromkeys(WORDS, 0)
    found: dict[str, list[str]] = {name: [] for name in LIMITS}
    for path in pages():
        name, text = path.relative_to(ROOT).as_posix(), hand_written(path)
        prose = plain(text)
        kind = "pages for contributors" if path.name in CONTRIBUTORS else "pages for users"
        words["README.md" if name == "README.md" else kind] += len(text.split())
        problems += [
            f"{name}: a line of {len(line)} characters: {line[:60]}…" for line in too_wide(text)
        ]
        problems += [f"{name}: {phrase!r}; write {instead!r}" for phrase, instead in banned(prose)]
        headings = re.findall(r"^#+ .*", prose, re.MULTILINE)
        problems += [
            f"{name}: a possessive in a heading: {line}"
            for line in headings
            if _POSSESSIVE.search(line)
        ]
        found["possessives in pages"] += [f"{name}: {one}" for one in _POSSESSIVE.findall(prose)]
        found[_CROWDED] += [
            f"{name}: {one}" for one in sentences(prose) if len(_POSSESSIVE.findall(one)) > 1
        ]
        if kind == "pages for users":
            found[_LONG] += [
                f"{name}: {one}" for one in sentences(prose) if len(one.split()) > _MOST_WORDS
            ]
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        for text in literals(path):
            each = re.split(r"(?<=[.!?:;])\s+|\n\s*\n", text)
            found[_CROWDED] += [
                f"{path.name}: {one.strip()}" for one in each if len(_POSSESSIVE.findall(one)) > 1
            ]
            possessives = _POSSESSIVE.findall(text)
            found["possessives in docstrings and messages"] += [
                f"{path.relative_to(ROOT)}: {o}" for o in possessives
            ]
    problems += [
        f"{name}: {words[name]} words, at most {limit}"
        for name, limit in WORDS.items()
        if words[name] > limit
    ]
    for name, limit in LIMITS.items():
        if len(found[name]) > limit:
            problems.append(f"{len(found[name])} {name}, at most {limit}; those of the last pages:")
            problems += [f"  {one}" for one in found[name][-10:]]
    print("\n".join(problems), file=sys.stderr)
    if "--counts" in sys.argv[1:]:
        print(words, {name: len(each) for name, each in found.items()})
    return 1 if problems else 0


def pages() -> list[Path]:
    """Return the pages that people write."""
    found = [*DOCS.glob("*.md"), *DOCS.glob("tutorials/*.md")]
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted(p for p in found if p.name not in GENERATED),
    ]


def hand_written(path: Path) -> str:
    """Return a page without what is generated in it."""
    text = path.read_text()
    for page, generated in _GENERATED_FROM.items():
        text = text.partition(generated)[0] if path.name == page else text
    text = re.sub(r"(<!-- openings: [^>]*-->)\n\n```text\n.*?```\n", r"\1\n", text, flags=re.DOTALL)
    return re.sub(r"<!-- figures: .*?<!-- end of figures -->", "", text, flags=re.DOTALL)


def plain(text: str) -> str:
    """Return the prose: without code, and without the addresses of links."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^:::.*$|^:\w.*$|<!--.*?-->", "", text, flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", text))


def sentences(prose: str) -> Iterator[str]:
    """Yield the sentences of paragraphs, list items and cells."""
    for block in re.split(r"\n\s*\n|\n(?=\s*[-*|] |\s*\d+\. )|(?<=[^|])\|", prose):
        yield from re.split(r"(?<=[.!?:;])\s+", " ".join(block.split()))


def too_wide(text: str) -> list[str]:
    """Return the lines that are too long, outside of tables and code."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [
        line
        for line in outside.splitlines()
        if len(line) > _WIDE and not line.lstrip().startswith(("|", "<!--"))
    ]


def banned(text: str) -> Iterator[tuple[str, str]]:
    """Yield phrases that have a plainer form, with it."""
    for phrase, instead in _BANNED.items():
        for match in re.finditer(phrase, " ".join(text.split()), re.IGNORECASE):
            yield match[0], instead


def literals(path: Path) -> Iterator[str]:
    """Yield the texts of a module: docstrings and messages."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield re.sub(r"`[^`]*`", "code", node.value)


if __name__ == "__main__":
    sys.exit(main())
