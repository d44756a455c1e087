"""``npurun port``: makes a script of ordinary TensorFlow run on many ranks."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

_ABOUT = """Port a script of ordinary TensorFlow, so that it runs on many ranks: print a unified diff, and a report to
stderr. What isn't sure isn't touched. Exit code 0: ported, or nothing to do; 1: questions are open, or a file was
refused; 2: usage."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run with these arguments; by default, as ``npu-port``, with those of the process."""
    name = "npurun port"
    if arguments is None:
        name = "npu-port"
    options = _options(arguments, name)
    # Imported only here, so that the usage can be shown without LibCST.
    try:
        from npu_device._src.port import port_report
    except ModuleNotFoundError:
        print(
            f'{name} needs LibCST, of the extra "port": pip install "npu_device[port]"',
            file=sys.stderr,
        )
        return 2
    files = _port_all(options)
    if not files:
        print(f"{name}: no .py or .ipynb files in {options.root}", file=sys.stderr)
        return 2
    if options.json:
        print(port_report.as_json(files))
    else:
        if not options.write and not options.output:
            # Flushed, so that the diff comes before the report on stderr if both go to one terminal.
            print("".join(file.diff for file in files), end="", flush=True)
        print(port_report.text(files), file=sys.stderr)
    if options.report:
        formats = {".json": port_report.as_json, ".html": port_report.page}
        write = formats.get(options.report.suffix, port_report.text)
        options.report.write_text(write(files), "utf-8")
    if options.html:
        options.html.write_text(port_report.page(files), "utf-8")
    return max((file.code for file in files), default=0)


def _options(arguments: Sequence[str] | None, name: str) -> argparse.Namespace:
    """Parse the command line; ``root`` is the script or folder."""
    parser = argparse.ArgumentParser(
        name, f"{name} [options] SCRIPT_OR_FOLDER", _ABOUT, allow_abbrev=False
    )
    add = parser.add_argument
    distributions = ("tf_strategy", "horovod")
    add("path", nargs="?", type=Path, metavar="SCRIPT_OR_FOLDER")
    add(
        "-i",
        "--input",
        type=Path,
        metavar="PATH",
        help="the script or folder, as in the tool of Ascend",
    )
    add("--write", action="store_true", help="change the files in place")
    add("-o", "--output", type=Path, metavar="DIR", help="write into a new folder")
    add("-r", "--report", type=Path, metavar="FILE", help="write the report (.txt, .json or .html)")
    add("--json", action="store_true", help="print the report with the diffs as JSON")
    add("--html", type=Path, metavar="FILE", help="write the report as one page with the diffs")
    add("-m", "--main", metavar="MAIN.py", help="the file in the folder with which the job starts")
    add(
        "-d",
        "--distribution",
        choices=distributions,
        help="what the script is distributed with (default: what it imports)",
    )
    add("-c", "--compat", action="store_true", help="run TensorFlow 1 calls as tf.compat.v1")
    options = parser.parse_args(arguments)
    options.root = options.input or options.path
    problem = _problem(options)
    if problem:
        parser.error(problem)
    return options


def _problem(options: argparse.Namespace) -> str:
    """Return why the options can't be used, or ""."""
    root = options.root
    output = options.output
    if root is None:
        return "the script or folder is missing"
    if options.write and output:
        return "--write and -o exclude each other"
    if not root.exists():
        return f"no such file or folder: {root}"
    if output and (output.is_file() or (output.is_dir() and any(output.iterdir()))):
        return f"{output} has files already; nothing is overwritten. Name a new folder"
    # A folder inside the sources would be copied into itself.
    if output and root.is_dir() and root.resolve() in output.resolve().parents:
        return f"{output} is in {root}. Name a folder beside it"
    folder = root.parent
    if root.is_dir():
        folder = root
    if options.main and not folder.joinpath(options.main).is_file():
        return f"-m: there is no {options.main} in {root}"
    return ""


def _port_all(options: argparse.Namespace) -> list:
    from npu_device._src.port.port_report import PortedFile, diff
    from npu_device._src.port.porting import Refused, Source, entries, port_text, scripts

    root = options.root
    sources = {}
    files = []
    folder = root.parent
    paths: Iterable[Path] = [root]
    if root.is_dir():
        folder = root
        paths = scripts(root)
    for path in paths:
        try:
            sources[path] = Source(path)
        except Refused as error:
            files.append(PortedFile(str(path), refused=str(error)))
    # Only all files together show which of them a job may start with.
    starts = entries(sources.values())
    if options.main and root.is_dir():
        starts = [root.joinpath(options.main)]
    _make_output(options)
    for path, source in sources.items():
        try:
            ported, findings = port_text(
                source.text, path in starts, options.distribution or "", options.compat
            )
        except Refused as error:
            files.append(PortedFile(str(path), refused=str(error)))
            continue
        files.append(PortedFile(str(path), diff(source.text, ported, str(path)), findings))
        if options.output:
            source.write(ported, options.output / path.relative_to(folder))
        elif options.write and ported != source.text:
            source.write(ported, path)
    return sorted(files, key=lambda file: file.path)


def _make_output(options: argparse.Namespace) -> None:
    """Make the folder for the ported files, with all other files of the original folder."""
    if not options.output:
        return
    if options.root.is_dir():
        # Links stay links: a dataset behind one isn't copied.
        shutil.copytree(options.root, options.output, symlinks=True, dirs_exist_ok=True)
    else:
        options.output.mkdir(parents=True, exist_ok=True)


if __name__ == "__main__":
    sys.exit(main())
