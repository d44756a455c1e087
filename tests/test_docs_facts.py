"""What the pages name is there: pages and headings behind links, files, options of commands, names of the package."""

from __future__ import annotations

import os
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import prose
import pytest

from npu_device._src.port import __main__ as port
from npu_device._src.report import __main__ as report
from npu_device.launch import arguments, speed, verify

ROOT = Path(__file__).resolve().parents[1]
PAGES = prose.pages()
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAME = re.compile(
    r"\bnpu\.((?:distribute|train|callbacks|errors|testing)\.[A-Za-z_]+(?:\.[A-Za-z_]+)*)"
)
FILE = re.compile(r"`((?:examples|tests|benchmarks|docs)/[\w./]+\.\w+)`")
OPTION = re.compile(r"--[a-z][a-z-]+")
COMMANDS: dict[str, Callable[[list[str]], object]] = {
    "": arguments.parse,
    "check": lambda words: arguments.parse(["--check", *words]),
    "speed": speed.main,
    "verify": verify.main,
    "port": port.main,
    "trace": report.main,
}


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        target = Path(os.path.normpath(page.parent / path)) if path else page
        is_made = target.parent.name == "reference"  # by the site
        assert target.exists() or is_made, f"{page.name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {link}"


def test_files_and_names_are_there() -> None:
    texts = {page.name: page.read_text() for page in PAGES}
    missing = [
        f"{page}: {file}"
        for page, text in texts.items()
        for file in FILE.findall(text)
        if not (ROOT / file).exists()
    ]
    names = {name for text in texts.values() for name in NAME.findall(text)}
    assert len(names) > 20
    for name in sorted(names):
        try:
            pkgutil.resolve_name(f"npu_device.{name}")
        except (ImportError, AttributeError):
            missing.append(name)
    assert not missing


def used_options(text: str) -> Iterator[tuple[str, str]]:
    """Yield the options before the script of each ``npurun`` in code, with the command that they are given to."""
    for line in re.findall(r"\bnpurun ([^`\n#|]*)", text):
        words = line.split()
        command = words.pop(0) if words and words[0] in COMMANDS else ""
        for word in words:
            if word.endswith((".py", "/", "./train.sh")) or word in ("sh", "python", "-m", "--"):
                break
            if option := OPTION.match(word):
                yield command, option[0]


def test_options_of_commands_are_in_their_help(capsys: pytest.CaptureFixture[str]) -> None:
    helps = {}
    for command, call in COMMANDS.items():
        with pytest.raises(SystemExit):
            call(["--help"])
        helps[command] = set(OPTION.findall(capsys.readouterr().out))
    used = {pair for page in PAGES for pair in used_options(page.read_text())}
    assert len(used) > 15
    assert not sorted(f"npurun {c} {option}" for c, option in used if option not in helps[c])


def defaults(help_text: str) -> dict[str, str]:
    """Return the defaults of options that the help of a command tells as a number."""
    found = {}
    for option in re.split(r"\n(?=  -)", help_text):
        name, number = (
            OPTION.search(option),
            re.search(r"\(default (\d+)", " ".join(option.split())),
        )
        if name and number:
            found[name[0]] = number[1]
    return found


def test_defaults_of_options_are_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    compared = 0
    for command, pages in (("", PAGES), ("speed", ["speed"]), ("verify", ["verify"])):
        with pytest.raises(SystemExit):
            COMMANDS[command](["--help"])
        known = defaults(capsys.readouterr().out)
        for page in [page for page in PAGES if page in pages or page.stem in pages]:
            text = page.read_text()
            told = re.findall(r"`(--[a-z-]+)(?: [A-Z]+)?`(?: seconds)? \((\d+)\)", text)
            for row in re.findall(r"^\|.*`.*--.*", text, re.MULTILINE):
                number = re.search(r"\(default (\d+)|\| (\d+) \|$", row)
                if number and (command or page.stem == "launching"):
                    told.append((OPTION.findall(row)[0], number[1] or number[2]))
            for option, default in told:
                if option in known:
                    compared += 1
                    assert default == known[option], f"{page.name}: {option} {default}"
    assert compared > 8
