"""The decisions on which GPU a rank takes, and on NCCL, and the road of tensors with NCCL. They need no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import job
import numpy as np
import pytest
from gpu import bodies
from pool import Pool

from npu_device._src.collectives import gpu_choice
from npu_device._src.collectives.gpu_choice import Device

MIG_A, MIG_B = (
    "MIG-11111111-2222-3333-4444-555555555555",
    "MIG-66666666-7777-8888-9999-000000000000",
)
OLD_MIG = "MIG-GPU-8f6b4f2e-1111-2222-3333-444444444444/1/0"

CPU = Device("CPU", "TensorFlow sees no GPU")
GPU0 = Device("GPU 0", "NVIDIA H100", "a0", "0000:01", True)
GPU1 = Device("GPU 1", "NVIDIA H100", "a1", "0000:02", True)
MIG0 = Device(MIG_A, "NVIDIA H100 MIG 1g.10gb", "b0", "0000:01", True)
MIG1 = Device(MIG_B, "NVIDIA H100 MIG 1g.10gb", "b1", "0000:01", True)
NO_NCCL = Device("GPU 1", "", "a1", "0000:02", False)


def test_cuda_visible_devices() -> None:
    for cuda, names in (
        (None, None),
        ("-1", ()),
        ("NoDevFiles", ()),  # Slurm, in a step without GPUs
        ("3,1", ("3", "1")),
        (" 3 , 1 ", ("3", "1")),
        ("0,-1,2", ("0",)),
        ("GPU-8f6b4f2e,GPU-11", ("GPU-8f6b4f2e", "GPU-11")),
        (f"{MIG_A},{MIG_B}", (MIG_A, MIG_B)),
        (OLD_MIG, (OLD_MIG,)),
    ):
        assert gpu_choice.visible_names(cuda) == names


@pytest.mark.parametrize(
    ("cuda", "nvidia", "instances"),
    [
        (None, None, (None, None, None)),
        (MIG_A, None, (None, None, None)),  # the launcher has chosen
        (f"{MIG_A},{MIG_B}", None, (MIG_A, MIG_B, MIG_A)),
        (None, f"{MIG_A},{MIG_B}", (MIG_A, MIG_B, MIG_A)),
        ("0", f"{MIG_A},{MIG_B}", (None, None, None)),  # CUDA's variable counts
        ("", f"{MIG_A},{MIG_B}", (None, None, None)),
        (None, "all", (None, None, None)),
        (None, "0:0,0:1", (None, None, None)),  # numbers that CUDA doesn't take
        (f"{MIG_A},0", None, (None, None, None)),
    ],
)
def test_each_rank_puts_its_own_mig_instance_first(
    cuda: str | None, nvidia: str | None, instances: tuple[str | None, ...]
) -> None:
    assert tuple(gpu_choice.own_instance(cuda, nvidia, device) for device in range(3)) == instances


def test_a_gpu_and_the_reason_for_none_are_named() -> None:
    assert gpu_choice.name_of(None, 2) == "GPU 2"
    assert gpu_choice.name_of("GPU-8f,GPU-11", 1) == "GPU-11"
    assert gpu_choice.name_of("6", 1) == "GPU 1"  # set after CUDA had started
    assert gpu_choice.why_none("", "all") == "CUDA_VISIBLE_DEVICES is ''"
    assert gpu_choice.why_none("0", "none") == "NVIDIA_VISIBLE_DEVICES is 'none'"
    assert gpu_choice.why_none(None, None) == "TensorFlow sees no GPU"


@pytest.mark.parametrize(
    ("devices", "hosts", "engine", "why"),
    [
        ((GPU0, GPU1), "aa", "auto", ""),
        ((GPU0, GPU0), "ab", "auto", ""),  # GPU 0 of two hosts
        ((GPU0, GPU1), "aa", "tensorflow", "NPU_DEVICE_BACKEND is tensorflow"),
        ((CPU, CPU), "aa", "tensorflow", "no rank has a GPU"),
        ((GPU0, CPU), "aa", "auto", "rank 1 has no GPU"),
        ((GPU0, GPU1, GPU0), "aaa", "nccl", "ranks 0, 2 share a GPU of host a"),
        ((MIG0, MIG1), "aa", "auto", "ranks 0, 1 share a GPU of host a"),
        ((GPU0, NO_NCCL), "aa", "auto", "the TensorFlow of rank 1 is built without NCCL"),
    ],
)
def test_nccl_needs_a_gpu_for_each_rank(
    devices: tuple[Device, ...], hosts: str, engine: str, why: str
) -> None:
    assert gpu_choice.why_no_nccl(devices, hosts, engine) == why


def test_sharing_is_of_memory_not_of_chips() -> None:
    devices, hosts = (MIG0, MIG1, MIG0, CPU, CPU, MIG0), "aaaaab"
    assert gpu_choice.sharing(devices, hosts) == [[0, 2]]
    assert gpu_choice.sharing(devices, hosts, chips=True) == [[0, 1, 2]]


def test_the_statement_shortens_many_hosts() -> None:
    assert gpu_choice.statement((CPU, CPU), "aa", "no rank has a GPU") == []
    text = "\n".join(gpu_choice.statement((GPU0, GPU1), "aa", ""))
    assert "2 ranks; floating-point tensors go through NCCL" in text
    assert "  host a: rank 0: GPU 0 (NVIDIA H100); rank 1: GPU 1 (NVIDIA H100)\n" in text
    text = "\n".join(gpu_choice.statement((GPU0, GPU0, CPU), "aab", "rank 2 has no GPU"))
    assert "go through host memory (rank 2 has no GPU)" in text
    assert (
        "rank 0: GPU 0 (NVIDIA H100), shared, memory grows as needed; rank 1: GPU 0 (NVIDIA H100), shared"
        in text
    )
    assert "host b: rank 2: CPU (TensorFlow sees no GPU)" in text
    many = gpu_choice.statement((GPU0,) * 100, [str(host) for host in range(100)], "")
    assert len(many) < 12 and "  and 92 more hosts" in many


@pytest.mark.slow
def test_choosing_a_device_makes_no_devices(tmp_path: Path) -> None:
    """TensorFlow would take the memory of all GPUs when it makes its devices."""
    script = """
from npu_device._src import compat
from npu_device._src.cluster.description import Cluster
from npu_device._src.collectives import resources
device = resources.choose_device(Cluster(1, 1, ("a", "a"), ("127.0.0.1",) * 2, "test"))
assert not compat.context_is_initialized()
print(device.name, device.detail, device.is_gpu)
gpus = [resources.tf.config.PhysicalDevice(f"/physical_device:GPU:{number}", "GPU") for number in range(4)]
resources.tf.config.get_visible_devices, resources.tf.config.set_visible_devices = lambda _: gpus, lambda *_: None
print(resources.choose_device(Cluster(5, 5, ("a",) * 6, ("127.0.0.1",) * 6, "test")).name)
"""
    [output] = job.outputs(tmp_path, 1, script)
    assert output.splitlines()[-2:] == ["CPU CUDA_VISIBLE_DEVICES is '-1' False", "GPU 1"]


def body_roads_of_nccl() -> Any:
    """Reduce and exchange on the road that tensors take with NCCL, between CPUs instead of GPUs."""
    import tensorflow as tf

    from npu_device._src.collectives.engines.tensorflow.kernels import Kernels
    from npu_device._src.collectives.hosts_of_job import NCCL_DTYPES, JobHosts
    from npu_device._src.collectives.job import current

    running = current()
    world, rank, size = running.world_group, running.cluster.rank, running.cluster.world_size
    before = JobHosts.uses_nccl, Kernels._device
    JobHosts.uses_nccl = lambda _, dtype: dtype in NCCL_DTYPES  # type: ignore[method-assign]
    Kernels._device = lambda *_: running.device("CPU")  # type: ignore[method-assign]
    try:
        rows = tf.reshape(tf.range(3.0 * size), [size, 3]) + 100.0 * rank
        return bodies.numbers(), running.engines.tensorflow.kernels.all_to_all(
            rows, world
        ).numpy().tolist()
    finally:
        JobHosts.uses_nccl, Kernels._device = before  # type: ignore[method-assign]


@pytest.mark.parametrize("tensorflow_ranks", [3], indirect=True)
def test_values_that_nccl_cannot_move_take_tensorflows_ring(tensorflow_ranks: Pool) -> None:
    """TensorFlow's NCCL has no bfloat16, and its all-to-all doesn't exchange anything (seen on an H200)."""
    size = tensorflow_ranks.size
    for rank, (found, rows) in enumerate(tensorflow_ranks.run(body_roads_of_nccl)):
        for mode, results in found.items():
            for place, (result, right) in enumerate(zip(results, bodies.expected_numbers(size))):
                np.testing.assert_allclose(
                    result, right, rtol=1e-2, err_msg=f"{mode}, result {place}"
                )
        assert rows == [
            [100.0 * sender + 3 * rank + column for column in range(3)] for sender in range(size)
        ]
