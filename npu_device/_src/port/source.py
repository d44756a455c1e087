"""Scripts as files: reading them as they are, refusing what isn't Python 3, and writing by rename."""

from __future__ import annotations

import codecs
import io
import os
import re
import shutil
import tokenize
from collections.abc import Collection, Iterator
from pathlib import Path

_PYTHON_2 = re.compile(r"^\s*(print\s+[\"'\w%(]|exec\s+[\"'\w]|except\s+[\w.]+\s*,\s*\w+\s*:|raise\s+\w+\s*,)", re.M)
_MAGIC = re.compile(r"^\s*(%|!)\w", re.M)
_IS_MAIN = re.compile(r"^if\s+__name__\s*==\s*[\"']__main__", re.M)


class Refused(Exception):
    """A file that can't be ported, with the reason and the remedy."""


class Source:
    """The text of a file, with all that is needed to write it back.

    Raises:
        Refused: a notebook, or bytes that aren't text in the encoding that the file names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.suffix == ".ipynb":
            raise Refused(f"a notebook. Save it as a script first: jupyter nbconvert --to script {path.name}")
        raw = path.read_bytes()
        try:
            self._encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
            self._mark = codecs.BOM_UTF8 if raw.startswith(codecs.BOM_UTF8) else b""
            self.text = raw[len(self._mark) :].decode("utf-8" if self._mark else self._encoding)
        except (SyntaxError, UnicodeDecodeError) as error:
            raise Refused(f"not text: {error}. Save it as UTF-8, or name its encoding in the first line") from None
        if "\0" in self.text:
            raise Refused("it contains zero bytes: this isn't a script")

    def write(self, text: str, path: Path) -> None:
        """Write another text in the encoding and with the mode of this file; by rename, so that nothing is lost."""
        target = path.resolve()
        new = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with new.open("xb") as file:
                file.write(self._mark + text.encode("utf-8" if self._mark else self._encoding))
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(self.path, new)
            new.replace(target)
        finally:
            new.unlink(missing_ok=True)


def not_python(text: str, line: int, message: str) -> Refused:
    """Return why a text can't be parsed, and what to do."""
    if _PYTHON_2.search(text):
        return Refused("Python 2. Convert it first: 2to3 -w, with Python 3.12 or older")
    if _MAGIC.search(text):
        return Refused(f"line {line}: a command of IPython. Take the lines with % and ! out")
    return Refused(
        f"line {line}: a syntax error ({message.splitlines()[0]}). Fix it; python -m py_compile shows it, too"
    )


def scripts(folder: Path) -> Iterator[Path]:
    """Yield the scripts and notebooks of a folder, without hidden folders and virtual environments."""
    for where, folders, names in os.walk(folder):
        is_environment = "pyvenv.cfg" in names or "site-packages" in folders
        folders[:] = () if is_environment else sorted(each for each in folders if each[0] not in "._")
        yield from (
            Path(where, each) for each in sorted(names) if each.endswith((".py", ".ipynb")) and not is_environment
        )


def entries(sources: Collection[Source]) -> list[Path]:
    """Return the files with which a job may start: those that ask for it, and those that no other file imports."""
    lines = "\n".join(line for source in sources for line in source.text.splitlines() if re.search(r"\bimport\b", line))
    used = set(re.findall(r"\w+", lines))
    return [each.path for each in sources if _IS_MAIN.search(each.text) or each.path.stem not in used]
