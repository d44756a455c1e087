"""Tests of training.py on 1, 2 and 3 ranks: ``pytest examples/testing``."""

import numpy as np
import pytest
from training import accuracy, make_dataset, make_model, make_samples, train

import npu_device as npu
from npu_device import testing
from npu_device.testing import faults


@pytest.mark.ranks(1, 2, 3)
def test_every_sample_is_read_once(samples, npu_ranks):
    mine = np.concatenate([x for x, _ in make_dataset(samples)])
    everybody = np.concatenate(npu.distribute.gather_object(mine))
    assert len(mine) == len(everybody) / npu_ranks
    np.testing.assert_array_equal(np.sort(everybody, axis=0), np.sort(samples[0], axis=0))


@pytest.mark.ranks(2, 3)
def test_the_metric_counts_all_samples(samples):
    def model(x):
        return x[:, :1]

    x, y = samples
    found = accuracy(model, make_dataset(samples))
    testing.same_on_all_ranks(found)
    assert found == pytest.approx(np.mean((x[:, :1] > 0) == (y > 0)))


def test_fit_trains_as_in_one_process():
    testing.equal_to_one_process(make_model, make_samples(), ranks=[2])


def test_a_killed_rank_costs_nothing(tmp_path):
    whole = testing.run(train, str(tmp_path / "whole"), ranks=2)
    killed = testing.run(
        train,
        str(tmp_path / "killed"),
        8,
        faults.step_done,
        ranks=2,
        faults=[faults.kill(rank=1, step=5)],
        restarts=1,
    )
    for first, second in zip(whole[0], killed[0]):
        np.testing.assert_array_equal(first, second)
