"""Whole scripts in the manner of ported ones, unedited on one process and on two: two ranks train what one does.

The scripts are in ``scripts/``; each leaves what it has to say in ``result``.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compared import same_bits
from pool import Pool

import npu_device as npu
from npu_device._src.gradients import split_strategy


def body_script(name: str, *arguments: str) -> Any:
    before = sys.argv
    sys.argv = [name, *arguments]
    try:
        return runpy.run_path(str(Path(__file__).parent / "scripts" / name), run_name="__main__")["result"]
    finally:
        sys.argv = before
        split_strategy._strategies.clear()  # a script ends with its process, but for the ones here
        assert npu.open().worker_id == int(os.environ.get("RANK_ID", "0"))


BERT = "bert_pretraining.py --overflow_at 3"


@pytest.mark.parametrize("command", [BERT, "transformer.py", "evaluate_on_first.py"])
def test_two_ranks_train_what_one_process_does(keras_single: Pool, keras_two_ranks: Pool, command: str) -> None:
    [alone] = keras_single.run(body_script, *command.split())
    ranks = keras_two_ranks.run(body_script, *command.split())
    same_bits(*(rank["weights"] for rank in ranks))
    for rank in ranks:
        for mine, its in zip(rank["weights"], alone["weights"]):
            np.testing.assert_allclose(mine, its, rtol=1e-3, atol=1e-4)
    if command == "transformer.py":
        for rank in ranks:
            np.testing.assert_allclose(rank["norms"], alone["norms"], rtol=1e-4)
    elif command == "evaluate_on_first.py":
        np.testing.assert_allclose(ranks[0]["scores"], alone["scores"], rtol=1e-4)
        assert [rank["checkpoints"] for rank in ranks] == [3, 0]
    else:
        assert [(rank["skipped"], rank["loss_scale"]) for rank in (alone, *ranks)] == [([3], 2.0**14)] * 3
