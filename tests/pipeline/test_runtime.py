"""Ray, started or joined: which of the two, with which settings."""

import os
import signal
from typing import Any

import pytest
import ray

from askmany.engine.errors import AskmanyError, ConfigError
from askmany.pipeline.config import WorkersConfig
from askmany.pipeline.interrupt import interrupts_as_exceptions
from askmany.pipeline.runtime import cluster


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `ray.init` is called with, while nothing is started."""
    calls: list[dict[str, Any]] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: calls.append(options))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return calls


def test_without_an_address_a_run_has_a_ray_of_its_own_whatever_else_runs_here(started: list[dict[str, Any]]) -> None:
    with cluster(WorkersConfig()):
        pass
    assert [(call["address"], call["_node_ip_address"], call["include_dashboard"]) for call in started] == [("local", "127.0.0.1", False)]


def test_an_address_is_joined_and_the_setting_wins_over_the_environment(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1111")
    with cluster(WorkersConfig()), cluster(WorkersConfig(address="127.0.0.1:2222")):
        pass
    assert [call["address"] for call in started] == ["127.0.0.1:1111", "127.0.0.1:2222"]
    assert all("_node_ip_address" not in call for call in started)


def test_ray_leaves_the_handler_of_sigterm_alone(started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", lambda **options: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    before = signal.getsignal(signal.SIGTERM)
    with interrupts_as_exceptions(), cluster(WorkersConfig()), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_ray_that_does_not_start_is_one_line(started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**options: Any) -> None:
        raise Exception("the node timed out during startup")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(AskmanyError, match="could not be started on this machine: the node timed out"), cluster(WorkersConfig()):
        pass


def test_a_cluster_that_does_not_answer_is_named(started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(ray, "init", refuse)
    with (
        pytest.raises(ConfigError, match=r"workers\.address: no Ray cluster answers at 127\.0\.0\.1:9: nobody there"),
        cluster(WorkersConfig(address="127.0.0.1:9")),
    ):
        pass
