"""Single environment variables: defaults, forms, errors, and the page that is made of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tables

from npu_device._src import environment
from npu_device._src.environment import Variable

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("variable", environment.ALL, ids=lambda variable: variable.name)
def test_unset_and_empty_give_the_default(
    variable: Variable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable.name, raising=False)
    assert (variable.raw(), variable.is_set(), variable.get()) == (None, False, variable.default)
    monkeypatch.setenv(variable.name, "")
    assert (variable.raw(), variable.is_set(), variable.get()) == (None, False, variable.default)


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        (environment.RANK_SIZE, "8", 8),
        (environment.RANK_ID, " 3 ", 3),
        (environment.ASCEND_DEVICE_ID, "07", 7),
        (environment.HCCL_CONNECT_TIMEOUT, "0.5", 0.5),
        (environment.CM_WORKER_IP, "FD00:0:0::1", "fd00::1"),
        (environment.RANK_TABLE_FILE, "/a b/8p.json", "/a b/8p.json"),
        (environment.NPU_DEVICE_LOG_LEVEL, "info", "INFO"),
        (environment.NPU_DEVICE_PREEMPT_SIGNAL, "USR1", "SIGUSR1"),
        (environment.PET_NNODES, "2:4", 4),
        (environment.JAX_COORDINATOR_ADDRESS, "[::1]:77", ("::1", 77)),
    ],
)
def test_values(
    variable: Variable, text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable.name, text)
    assert variable.get() == value
    assert type(variable.get()) is type(value)


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        (environment.RANK_SIZE, "four", "a whole number of at least 1"),
        (environment.RANK_ID, "-1", "a whole number of at least 0"),
        (environment.DEVICE_ID, "1_0", "a whole number of at least 0"),
        (environment.CM_CHIEF_PORT, "65521", "a whole number from 1 to 65520"),
        (environment.CM_CHIEF_IP, "chief.example", "an IPv4 or IPv6 address"),
        (environment.HCCL_CONNECT_TIMEOUT, "0", "a number above 0, at most 7200"),
        (environment.HCCL_CONNECT_TIMEOUT, "nan", "a number above 0, at most 7200"),
        (environment.NPU_DEVICE_LOG_LEVEL, "loud", "one of DEBUG, INFO, WARNING, ERROR, CRITICAL"),
        (
            environment.NPU_DEVICE_PREEMPT_SIGNAL,
            "KILL",
            "one of SIGTERM, SIGUSR1, SIGUSR2, with or without SIG",
        ),
        (environment.PET_NNODES, "2:", "a number of nodes, or MIN:MAX"),
        (
            environment.JAX_COORDINATOR_ADDRESS,
            "::1:77",
            '"host:port", or "[address]:port" for IPv6',
        ),
    ],
)
def test_malformed_values_name_variable_found_and_expected(
    variable: Variable, text: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(ValueError) as raised:
        variable.get()
    message = str(raised.value)
    assert "EI0001" in message and "What to do:" in message
    assert f"{variable.name} is {text!r}; expected {expected}" in message


def test_the_pages_of_variables_and_options_are_up_to_date() -> None:
    for page, text in tables.filled().items():
        assert page.read_text(encoding="utf-8") == text, "run: python tests/tools/tables.py"
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert all(f"| `{variable.name}` |" in page for variable in environment.ALL)


def test_the_packages_own_variables_are_checked_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NPU_DEVICE_AUDT", "off")
    environment.check_own_variables(warns=False)
    assert not caplog.records
    environment.check_own_variables(warns=True)
    assert "NPU_DEVICE_AUDT: did you mean NPU_DEVICE_AUDIT?" in caplog.text
    monkeypatch.setenv("NPU_DEVICE_STALL_TIMEOUT", "soon")
    with pytest.raises(
        ValueError, match="EI0001: the environment variable NPU_DEVICE_STALL_TIMEOUT is 'soon'"
    ):
        environment.check_own_variables(warns=True)
