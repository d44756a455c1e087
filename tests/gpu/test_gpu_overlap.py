"""Segments travel while backward still computes, and a trace shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu import bodies
from gpu.conftest import Way
from npu_device._src.trace.records import read


def test_the_first_segment_travels_during_backward(way: Way, tmp_path: Path) -> None:
    if way.apart:
        pytest.skip("on several hosts the ranks compare their clocks, once per job, and a pool repeats a body")
    way.pool(2, "3").run(bodies.traced_loop, str(tmp_path))
    ranks = read(tmp_path)
    assert len(ranks) == 2
    for rank in ranks:
        assert len(rank.segments) == 4
        later = rank.iterations[3:]
        assert later
        early = [one for one in later if one.allreduce[0][0] < one.bp_end]
        assert len(early) > len(later) / 2, [(one.allreduce, one.bp_end) for one in later]
