"""Each rank sees one GPU, ranks that share one share its memory, and all know which way tensors go."""

from __future__ import annotations

from gpu import bodies
from gpu.conftest import NCCL, Way


def test_each_rank_has_its_device(way: Way) -> None:
    found = way.pool(2, "3").run(bodies.devices)
    assert found[0]["reduced"] == found[1]["reduced"]
    for one in found:
        assert ("GPU" if way.on_gpu else "CPU") in one["scope"]
        assert one["visible"] == one["logical"] == (1 if way.on_gpu else 0)
        assert one["names"] == found[0]["names"]
    if not way.on_gpu:
        assert found[0]["no nccl"] == "no rank has a GPU"
    elif way.name == NCCL:
        assert [one["no nccl"] for one in found] == ["", ""]
        assert (found[0]["unit"] == found[1]["unit"]) == way.apart
    else:
        assert "share a GPU" in found[0]["no nccl"]
        assert found[0]["unit"] == found[1]["unit"]
        assert [one["grows"] for one in found] == [[True], [True]]
