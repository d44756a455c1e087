"""The tutorials do what they show: their scripts run as they stand there, and print these lines."""

from __future__ import annotations

import os
import re
from pathlib import Path

import job
import pytest
from launcher import npurun
from ranks import free_port

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "tutorials"
NUMBER = re.compile(r"\d+\.\d+")


def scripts(page: str) -> list[str]:
    """Return the page's whole scripts."""
    found = re.findall(r"```python\n(.*?)```", (FOLDER / f"{page}.md").read_text(), re.DOTALL)
    return [script for script in found if script.startswith("import ")]


def shown(page: str, command: str) -> list[str]:
    """Return the lines that the page shows after a command."""
    for console in re.findall(
        r"```console\n(.*?)```", (FOLDER / f"{page}.md").read_text(), re.DOTALL
    ):
        for part in re.split(r"^\$ ", console, flags=re.MULTILINE):
            if part.startswith(command + "\n"):
                return part.splitlines()[1:]
    raise LookupError(f"{page} doesn't show {command}")


def same(printed: str, lines: list[str]) -> None:
    """Assert that each line was printed, with nearly these numbers."""
    for line in lines:
        words, numbers = NUMBER.sub("…", line), [float(number) for number in NUMBER.findall(line)]
        alike = [found for found in printed.splitlines() if NUMBER.sub("…", found) == words]
        values = [[float(number) for number in NUMBER.findall(found)] for found in alike]
        assert any(value == pytest.approx(numbers, abs=0.02) for value in values), (
            f"{line!r} is not in\n{printed}"
        )


@pytest.mark.parametrize("page", ["fit", "custom_loop"])
def test_scripts_print_what_is_shown(tmp_path: Path, page: str) -> None:
    first, last = scripts(page)[0], scripts(page)[-1]
    [alone] = job.outputs(tmp_path, 1, first)
    # Without the lines that TensorFlow prints where there is no GPU.
    main, other = job.outputs(tmp_path, 2, last, TF_CPP_MIN_LOG_LEVEL="3")
    same(alone, shown(page, "python train.py"))
    lines = [line.removeprefix("[0] ") for line in shown(page, "npurun -n 2 train.py")]
    same(main.replace("2 on here", "2 on node0"), lines)
    assert other == ""


def test_two_machines(tmp_path: Path) -> None:
    """What a job prints on two hosts is what it prints on one, but for the names of hosts and the open ports; the
    command of the page starts a rank on each.
    """
    engine, command = "NPU_DEVICE_BACKEND=tcp", "npurun --hosts hostA:1,hostB:1 train.py"
    differs = re.compile(r"ranks \(|are open to everyone")
    of_two = {
        line for line in shown("two_machines", f"{engine} {command}") if not differs.search(line)
    }
    assert of_two <= set(shown("fit", "npurun -n 2 train.py"))
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    (tmp_path / "train.py").write_text(
        "import os; print(os.environ['RANK_ID'], 'of', os.environ['RANK_SIZE'])"
    )
    meeting = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    variables = {
        "NPU_DEVICE_SSH": str(ssh),
        "PATH": os.environ["PATH"],
        "NPU_DEVICE_BACKEND": "tcp",
    }
    done = npurun(*command.split()[1:-1], *meeting, "train.py", cwd=tmp_path, **variables)
    printed = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, printed
    assert "[0] 0 of 2" in printed and "[1] 1 of 2" in printed, printed
