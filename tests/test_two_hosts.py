"""Ranks on two hosts: each host reduces in shared memory, and one rank per host communicates with the other."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import job
import launcher
import pytest
from mpi_ranks import mpiexec, run_under

from npu_device._src.testing.hosts import address, can_be_made, hosts, name, on_host

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_be_made(), reason="needs root, ip and tc to make two hosts"),
]

SSH = Path(__file__).parents[1] / "benchmarks" / "ssh_to_host"
FOUR = pytest.param(4, marks=pytest.mark.full)

SCRIPT = """
import os, zlib
import numpy as np, tensorflow as tf
import npu_device as npu
from hccl.manage.api import create_group
from npu_device.distribute import hccl_ops
from npu_device._src.collectives.engine_text import open_ports
from npu_device._src.collectives.job import current
rank, size = npu.open().worker_id, npu.open().workers_num
ports = open_ports(current())
assert ("ENGINE" == "auto") == ("without the job secret" in ports and "=tcp does without" in ports), ports
assert "ENGINE" != "auto" or all(host in ports for host in os.environ["HOSTS"].split()), ports

def values(r):
    return np.random.default_rng(r).standard_normal(1000).astype(np.float32)

def check(found, expected):
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-6)

mine, everybody = tf.constant(values(rank)), [values(r) for r in range(size)]
expected = [sum(everybody), sum(everybody) / size, np.max(everybody, 0), [(size - 1) / 2], np.concatenate(everybody)]

def several():
    return [
        npu.distribute.all_reduce(mine, "sum"),
        npu.distribute.all_reduce([mine, None], "mean", compression=None)[0],
        npu.distribute.all_reduce(mine, "max"),
        npu.distribute.all_reduce(tf.constant([rank]), "mean"),
        hccl_ops.allgather(mine, size),
        *(hccl_ops.broadcast([mine], root)[0] for root in range(size)),
    ]

for call in (several, tf.function(several, autograph=False)):
    for found, right in zip(call(), [*expected, *everybody]):
        check(found, right)

large = tf.fill([100_000], 60000.0)
np.testing.assert_allclose(npu.distribute.all_reduce(large, "sum", compression="fp16"), size * 60000.0, rtol=2**-10)
check(npu.distribute.all_reduce(tf.cast(large, tf.float16), "mean"), 60000.0)
if rank < 3:
    create_group("three", 3, [0, 1, 2])  # two ranks of one host and one of the other
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
        whole = (np.arange(-256, 256) * 117.0).astype(dtype.as_numpy_dtype)
        mean = npu.distribute.all_reduce(tf.constant(whole), "mean", group="three")
        assert mean.dtype == dtype and (np.asarray(mean) == whole).all(), dtype
    check(npu.distribute.all_reduce(large, "mean", group="three", compression="fp16"), 60000.0)
    total = npu.distribute.all_reduce(large * (rank + 1), "sum", group="three", compression="bf16")
    np.testing.assert_allclose(total, 360000.0, rtol=2**-7)
    check(npu.distribute.all_reduce(tf.constant([2_000_000_001]), "mean", group="three"), 2_000_000_001.0)
bits = npu.distribute.all_reduce(mine, "sum").numpy().tobytes()
gathered = hccl_ops.allgather(tf.constant([zlib.crc32(bits) >> 1]), size).numpy()
assert len(set(gathered)) == 1
print("checked", flush=True)

def sent():
    return int(open("/sys/class/net/eth0/statistics/tx_bytes").read())

big = tf.ones([1_000_000])
npu.distribute.all_reduce(big, "sum")
npu.distribute.all_reduce(tf.constant(1.0), "sum")
before = sent()
for _ in range(3):
    assert float(npu.distribute.all_reduce(big, "sum")[0]) == size
npu.distribute.all_reduce(tf.constant(1.0), "sum")
print("ENGINE sent", (sent() - before) / 3 / 4e6, flush=True)

def sent_by_steps(shard_optimizer):
    kernels = []
    for _ in range(24):
        layer = tf.keras.layers.Dense(250, use_bias=False, kernel_initializer="ones")
        layer.build([None, 200])
        kernels.append(layer.kernel)
    optimizer = tf.keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer = npu.distribute.DistributedOptimizer(optimizer, shard_optimizer=shard_optimizer)

    @tf.function
    def step():
        optimizer.apply_gradients([(tf.ones([200, 250]), kernel) for kernel in kernels])

    step()
    npu.distribute.all_reduce(tf.constant(1.0), "sum")
    before = sent()
    for _ in range(4):
        step()
    npu.distribute.all_reduce(tf.constant(1.0), "sum")
    return sent() - before

# The engine of TensorFlow divides no updates.
if "ENGINE" != "auto":
    ratio = sent_by_steps(True) / sent_by_steps(False)
    # One write, which the lines of other ranks do not cut.
    os.write(1, f"ENGINE divided {ratio:.4f}\\n".encode())
"""


# The two ranks of a host, for one engine after the other: forks of a process that has imported TensorFlow for all.
RANKS_OF_A_HOST = """
import os, sys, traceback
import tensorflow
script, port = sys.argv[1:]
for engine in ("auto", "tcp"):
    ranks = []
    for device in ("0", "1"):
        if rank := os.fork():
            ranks.append(rank)
            continue
        os.environ.update(ASCEND_DEVICE_ID=device, CM_CHIEF_PORT=port, NPU_DEVICE_BACKEND=engine)
        try:
            exec(compile(open(script).read().replace("ENGINE", engine), script, "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.exit()
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    if any(codes):
        sys.exit(f"exit codes {codes}")
    port = str(int(port) + 1)
"""


@pytest.mark.parametrize("count", [3, FOUR])
def test_hosts_send_what_one_rank_each_needs(tmp_path: Path, count: int) -> None:
    """Through TensorFlow's collectives, which ``auto`` takes, and TCP."""
    script, ranks = tmp_path / "script.py", tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    ranks.write_text(RANKS_OF_A_HOST)
    common = {"CM_CHIEF_IP": address(0), "CM_CHIEF_DEVICE": "0", "NPU_DEVICE_SECRET": "ours"}
    common |= {"CM_WORKER_SIZE": str(2 * count)}
    commands = [
        on_host(host, [sys.executable, str(ranks), str(script), "29700"]) for host in range(count)
    ]
    with hosts(count, gbit=1.0):
        common["HOSTS"] = " ".join(f"{address(host)}:" for host in range(count))
        environments = [{**common, "CM_WORKER_IP": address(host)} for host in range(count)]
        results = job.run_anew(commands, environments, timeout=60 * count)
    assert [result.code for result in results] == [0] * count, results
    output = "".join(result.output for result in results)
    _assert_sent(output, ("auto", "tcp"), count)
    assert output.count("are open to everyone who can connect") == 1, output
    # The script sends float16 once, through each engine; only Python's conversion may take longer than it saves.
    assert output.count('compression="fp16" through tcp takes') == 1, output


@pytest.mark.parametrize("count", [2, FOUR])
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py")
def test_mpi_between_hosts(tmp_path: Path, count: int) -> None:
    script = launcher.script(tmp_path, SCRIPT.replace("ENGINE", "mpi"))
    names = [name(rank // 2) for rank in range(2 * count)]
    remote = [
        "-launcher",
        "ssh",
        "-launcher-exec",
        str(SSH),
        "-localhost",
        address(0),
        "-hosts",
        ",".join(names),
    ]
    command = [*mpiexec("MPICH"), *remote, "-n", str(2 * count), sys.executable, script]
    # MPICH would otherwise find that these hosts share memory after all.
    settings = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0", "HCCL_SOCKET_IFNAME": "eth0"}
    with hosts(count, gbit=1.0):
        result = run_under(on_host(0, command), **settings)
    assert result.returncode == 0, result.stdout
    _assert_sent(result.stdout, ("mpi",), count)


def _assert_sent(output: str, engines: tuple[str, ...], count: int) -> None:
    """Assert that all ranks have come to the end, and each host has sent the tensor once if they are two."""
    assert output.count("checked") == len(engines) * 2 * count, output
    for engine in engines:
        most = max(float(found) for found in re.findall(rf"{engine} sent ([0-9.]+)", output))
        ring = 2 * (count - 1) / count
        assert 0.95 * ring < most < 1.15 * ring, (engine, most)
        divided = re.findall(rf"{engine} divided ([0-9.]+)", output)
        assert len(divided) == 2 * count * (engine != "auto"), output
        # The ranks own the same number of variables.
        assert all(float(ratio) < 1.02 for ratio in divided), divided
