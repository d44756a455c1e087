"""``npu.run`` in a real kernel: the example, a second run, errors, and an interrupt."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import job
import pytest
from caught_messages import error_of
from pool import Pool
from ranks import PYTHONPATH

import npu_device as npu
from npu_device._src.pools import by_value

nbformat = pytest.importorskip("nbformat", reason="the extra 'test' has it")
nbclient = pytest.importorskip("nbclient", reason="the extra 'test' has it")

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "notebook.ipynb"

SUMS = """
class Sum:
    def __init__(self, value):
        self.value = value

@tf.function
def doubled(tensor):
    if tf.reduce_sum(tensor) > 0:
        tensor = tensor * 2
    return tensor

doubled(tf.constant(1.0))
large = np.arange(2_000_000.0)

def sums(scale):
    print("rank", npu.distribute.rank())
    total = npu.distribute.all_reduce(doubled(tf.constant(large[3] * scale)), "sum")
    return Sum(float(total)), large.flags.writeable

def show(scale):
    results = npu.run(sums, scale)
    print([(isinstance(one, Sum), one.value, writeable) for one, writeable in results])
"""
HOROVOD = """
import atexit, tempfile, threading
from npu_device import horovod

def write(name):
    with open(name, "w") as file:
        file.write("whole")

def place(base, step):
    import npu_device.horovod.tensorflow as hvd
    hvd.init()
    hvd.allreduce(1.0)
    threading.Timer(0.5, write, [f"thread{hvd.rank()}"]).start()
    atexit.register(write, f"exit{hvd.rank()}")
    write(os.path.join(tempfile.gettempdir(), f"temporary{hvd.rank()}"))
    print("a bar", end="\\rits end\\n")
    names = "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"
    return base + step * hvd.rank(), os.environ["COLOUR"], [os.environ[f"HOROVOD_{name}"] for name in names]

os.environ["COLOUR"] = "blue"
os.environ["HOROVOD_TIMELINE"] = "timeline"
os.environ["TMPDIR"], tempfile.tempdir = os.getcwd(), None
print(horovod.run(place, (10,), {"step": 5}, np=2))
del os.environ["HOROVOD_TIMELINE"], os.environ["TMPDIR"]
tempfile.tempdir = None
"""
FAIL = """
class BadLabel(ValueError):
    pass

def fail():
    if npu.distribute.rank() == 1:
        raise BadLabel("a bad label")
    npu.distribute.barrier()

try:
    npu.run(fail)
except BadLabel as error:
    caught = error
raise caught
"""
END = """
def end():
    npu.distribute.rank() and os._exit(3)
    npu.distribute.barrier()

npu.run(end)
"""
WAIT = """
import time

def wait():
    with open("begun", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(1000)

npu.run(wait)
"""
FORKING = """
import multiprocessing, os, sys, time
import npu_device as npu

os.environ.update(NPU_DEVICE_STALL_WARNING="7", TF_CPP_MIN_LOG_LEVEL="1")

def levels():
    return os.environ["NPU_DEVICE_STALL_WARNING"], os.environ["TF_CPP_MIN_LOG_LEVEL"]

npu.run(levels, ranks=1)
child = os.fork()
if child == 0:
    sys.exit()
os.waitpid(child, 0)
print(npu.run(levels, ranks=1))
# At exit, multiprocessing ends this child later than the package ends its processes.
multiprocessing.get_context("fork").Process(target=time.sleep, args=[1000], daemon=True).start()
"""
COLOUR = re.compile(r"\x1b\[[\d;]*m")


class Kernel:
    """A kernel that runs cells, one after the other."""

    def __init__(self, client: nbclient.NotebookClient) -> None:
        self._client = client

    def run(self, source: str) -> tuple[str, str]:
        """Run a cell; return its text and what it shows, or its error."""
        cell = nbformat.v4.new_code_cell(source)
        self._client.nb.cells.append(cell)
        error = ""
        try:
            self._client.execute_cell(cell, len(self._client.nb.cells) - 1)
        except nbclient.exceptions.CellExecutionError as caught:
            error = f"{caught.ename}: {caught.evalue}"
        texts = [output.get("text", "") for output in cell.outputs]
        texts += [COLOUR.sub("", "\n".join(output.get("traceback", ()))) for output in cell.outputs]
        shown = [kind for output in cell.outputs for kind in output.get("data", ())]
        return "".join(texts), error or " ".join(shown)


def interrupt_when(file: Path, pid: int) -> threading.Thread:
    """Interrupt the kernel, as Jupyter does, when a file has content."""

    def wait() -> None:
        while not (file.exists() and file.read_text()):
            time.sleep(0.02)
        os.killpg(os.getpgid(pid), signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.fixture(params=["0", pytest.param("1", marks=pytest.mark.full)], ids=["keras3", "keras2"])
def kernel(request: Any, tmp_path: Path, monkeypatch: Any) -> Iterator[Kernel]:
    from jupyter_core.utils import ensure_event_loop

    monkeypatch.setenv("TF_USE_LEGACY_KERAS", request.param)
    client = nbclient.NotebookClient(nbformat.v4.new_notebook(), timeout=300, kernel_name="python3")
    with client.setup_kernel(cwd=str(tmp_path)):
        yield Kernel(client)
    ensure_event_loop().close()  # nbclient keeps its own for the next notebook


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_cells_run_on_ranks(kernel: Kernel, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    kernel.run(f"import os; os.environ['PYTHONPATH'] = {PYTHONPATH!r}")  # for the ranks alone
    cells = nbformat.read(EXAMPLE, 4).cells
    texts = []
    for cell in cells:
        if cell.cell_type == "code":
            text, shown = kernel.run(cell.source)
            assert "Error" not in shown, (shown, text)
            texts.append((text, shown))
    trained, plotted, predicted = texts[-3:]
    assert "[0] Epoch 10/10\n" in trained[0] and "[1] Epoch" not in trained[0]
    assert "image/png" in plotted[1] and predicted[1] == "text/plain"
    # A second run in the same kernel, with a class, a traced function and a large array of the notebook.
    printed, error = kernel.run(SUMS + "show(2.0)")
    assert "[0] rank 0\n" in printed and "[1] rank 1\n" in printed and not error
    assert printed.endswith("[(True, 24.0, False), (True, 24.0, False)]\n")
    printed, error = kernel.run(HOROVOD)
    # As npurun --horovod sets them: the rank, the local one and the host, each with its number.
    placed = [
        (10 + 5 * rank, "blue", [str(rank), "2", str(rank), "2", "0", "1"]) for rank in range(2)
    ]
    assert printed.endswith(f"{placed}\n") and "[1] its end\n" in printed and not error
    # What has outlived the function, and what it has put into a temporary folder, is there when the call returns.
    late = {f"{kind}{rank}" for kind in ("thread", "exit", "temporary") for rank in range(2)}
    assert {*late, "timeline", "timeline.trace"} <= {*os.listdir(tmp_path)}
    shown, error = kernel.run(FAIL)
    assert error == "BadLabel: a bad label"
    assert re.search(
        r"RankError: rank 1 of 2:\nTraceback .*\n  File .*, in fail\n    raise BadLabel\(.*\n.*BadLabel: a bad label\n",
        shown,
    ), shown
    _, error = kernel.run(END)
    assert error == "RankError: rank 1 of 2:\nits process ended with exit code 3"
    _, error = kernel.run("batches = tf.data.Dataset.range(3)\nnpu.run(lambda: list(batches))")
    assert error.startswith(
        "TypeError: npu.run: the variable 'batches', which <lambda> uses, can't"
    )
    _, error = kernel.run("file = open('text', 'w')\nnpu.run(print, file)")
    assert error.startswith("TypeError: npu.run: argument 1 can't be sent")
    pid = int(kernel.run("print(os.getpid())")[0])
    thread = interrupt_when(tmp_path / "begun", pid)
    _, error = kernel.run(WAIT)
    thread.join()
    assert error.startswith("KeyboardInterrupt")
    assert not Path("/proc", (tmp_path / "begun").read_text()).exists()
    assert "[(True, 36.0, False), (True, 36.0, False)]" in kernel.run("show(3.0)")[0]
    # No call has left files.
    left = "from npu_device._src.pools import forked; print(os.listdir(forked._directory()))"
    assert kernel.run(left)[0] == "[]\n"


@pytest.mark.slow
def test_a_script_with_forked_children_ends_and_keeps_its_settings(tmp_path: Path) -> None:
    [output] = job.outputs(tmp_path, 1, FORKING, timeout=60)
    assert "[('7', '1')]\n" in output


def body_inside_a_job() -> Any:
    return error_of(npu.run, len), error_of(npu.run, len, ranks=0), error_of(npu.run, "len")


def test_a_rank_starts_no_ranks(two_ranks: Pool) -> None:
    for inside, none, word in two_ranks.run(body_inside_a_job):
        assert inside.startswith("RuntimeError: npu.run was called in a job")
        assert none == "ValueError: ranks=0: expected a whole number from 1"
        assert word == "TypeError: npu.run takes a function first, not a str"


def test_cloudpickle_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'npu_device[notebook]'")):
        by_value.sent(max, (1, 2))
