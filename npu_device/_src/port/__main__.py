"""``npurun port``: makes a script of ordinary TensorFlow run on many ranks."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ABOUT = """Port a script of ordinary TensorFlow, so that it runs on many ranks: print a unified diff, and a report to
stderr. What isn't sure isn't touched. Exit code 0: ported, or nothing to do; 1: questions are open, or a file was
refused; 2: usage."""


def main(arguments: Sequence[str] | None = None, name: str = "npu-port") -> int:
    parser = argparse.ArgumentParser(name, f"{name} [options] SCRIPT_OR_FOLDER", _ABOUT, allow_abbrev=False)
    add, kinds = parser.add_argument, ("tf_strategy", "horovod")
    add("path", nargs="?", type=Path, metavar="SCRIPT_OR_FOLDER")
    add("-i", "--input", type=Path, metavar="PATH", help="the script or folder, as in the tool of Ascend")
    add("--write", action="store_true", help="change the files in place")
    add("-o", "--output", type=Path, metavar="DIR", help="write into a new folder")
    add("-r", "--report", type=Path, metavar="FILE", help="write the report (.txt, .json or .html)")
    add("--json", action="store_true", help="print the report with the diffs as JSON")
    add("--html", type=Path, metavar="FILE", help="write the report as one page with the diffs")
    add("-m", "--main", metavar="MAIN.py", help="the file in the folder with which the job starts")
    add("-d", "--distribution", choices=kinds, help="what the script is distributed with (default: what it imports)")
    add("-c", "--compat", action="store_true", help="run TensorFlow 1 calls as tf.compat.v1")
    given = parser.parse_args(arguments)
    root, output = given.input or given.path, given.output
    if root is None or (given.write and output):
        parser.error("the script or folder is missing" if root is None else "--write and -o exclude each other")
    if not root.exists():
        parser.error(f"no such file or folder: {root}")
    if output and (output.is_file() or (output.is_dir() and any(output.iterdir()))):
        parser.error(f"{output} has files already; nothing is overwritten. Name a new folder")
    if output and root.is_dir() and root.resolve() in output.resolve().parents:
        parser.error(f"{output} is in {root}. Name a folder beside it")
    if given.main and not (root if root.is_dir() else root.parent).joinpath(given.main).is_file():
        parser.error(f"-m: there is no {given.main} in {root}")
    try:
        from npu_device._src.port import port_report as report
    except ModuleNotFoundError:
        print(f'{name} needs LibCST, of the extra "port": pip install "npu_device[port]"', file=sys.stderr)
        return 2
    results = _port_all(given, root)
    if given.json:
        print(report.as_json(results))
    else:
        print("" if given.write or output else "".join(result.diff for result in results), end="", flush=True)
        print(report.text(results), file=sys.stderr)
    forms = {".json": report.as_json, ".html": report.page}
    for path in filter(None, (given.report, given.html)):
        path.write_text(forms.get(".html" if path is given.html else path.suffix, report.text)(results), "utf-8")
    return max((result.code for result in results), default=0)


def _port_all(given: argparse.Namespace, root: Path) -> list[Any]:
    from npu_device._src.port.port_report import Result, diff
    from npu_device._src.port.porting import Refused, Source, entries, port_text, scripts

    sources, results = {}, []
    for path in [root] if root.is_file() else scripts(root):
        try:
            sources[path] = Source(path)
        except Refused as error:
            results.append(Result(str(path), refused=str(error)))
    starts = [root.joinpath(given.main)] if given.main and root.is_dir() else entries(sources.values())
    if given.output and root.is_dir():
        shutil.copytree(root, given.output, symlinks=True, dirs_exist_ok=True)
    elif given.output:
        given.output.mkdir(parents=True, exist_ok=True)
    for path, source in sources.items():
        try:
            ported, findings = port_text(source.text, path in starts, given.distribution or "", given.compat)
        except Refused as error:
            results.append(Result(str(path), refused=str(error)))
            continue
        results.append(Result(str(path), diff(source.text, ported, str(path)), findings))
        if given.output:
            source.write(ported, given.output / (path.relative_to(root) if root.is_dir() else path.name))
        elif given.write and ported != source.text:
            source.write(ported, path)
    return sorted(results, key=lambda result: result.path)


if __name__ == "__main__":
    sys.exit(main())
