"""XLA, which Keras 3 turns on by itself on a GPU: collectives in compiled functions are refused, and nothing hangs."""

from __future__ import annotations

from test_xla import REMEDY, body_compiled_functions, body_fit

from gpu.conftest import Way


def test_compiled_functions(way: Way) -> None:
    for found in way.pool(2, "3").run(body_compiled_functions, timeout=60):
        assert found.pop("afterwards") == "[2.0, 4.0]"
        refused = found.pop("in a function that has been traced")  # by TensorFlow itself; the second is on a GPU
        assert "unsupported operations" in refused or "Trying to access resource" in refused
        assert all(text.startswith("RuntimeError") and REMEDY in text for text in found.values())


def test_keras_3_turns_xla_on(way: Way) -> None:
    ranks = way.pool(2, "3")
    for result, _ in ranks.run(body_fit, "auto", False, False):
        assert (REMEDY in result) if way.on_gpu else result == "trained"
    for broadcast, replicate in ((True, False), (False, True)):
        found = ranks.run(body_fit, "auto", broadcast, replicate)
        assert [result for result, _ in found] == ["trained"] * 2
        assert ["XLA can't compile" in note for _, note in found] == [way.on_gpu and broadcast, False]
