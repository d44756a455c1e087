"""What callbacks remember in a ``fit`` that ``FitCheckpoint`` resumes."""

from __future__ import annotations

from pathlib import Path

import callback_bodies as bodies
import pytest
from pool import Pool
from rank_comparison import same_bits

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("keras", ["3", pytest.param("2", marks=pytest.mark.full)], indirect=True)
@pytest.mark.parametrize(
    "resumed",
    [["within"], pytest.param(["within", "between", "ended"], marks=pytest.mark.full)],
    ids=len,
)
def test_a_resumed_fit_stops_where_an_undisturbed_one_does(
    keras_two_ranks: Pool, tmp_path: Path, resumed: list[str]
) -> None:
    results = keras_two_ranks.run(bodies.body, str(tmp_path / "fit"), *resumed)
    assert results[0]["whole"]["table"].count("\n") == 6 and results[0]["whole"]["board"]
    for ran in results:
        whole = ran.pop("whole")
        assert whole["epochs"] == [0, 1, 2, 3, 4] and whole["stopped"] == 4
        assert whole["steps"] == 25
        rates = whole["history"].get("learning_rate") or whole["history"]["lr"]
        assert len(set(rates)) > 1
        for name, result in ran.items():
            same_bits(whole["values"], result.pop("values"))
            for key, value in result.items():
                assert value == whole[key], (name, key)
