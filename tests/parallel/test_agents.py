"""What the agent of a host does otherwise than torch's."""

import inspect
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api

from polyad.parallel.agents import watch_workers


def test_workers_that_start_again_are_killed_after_the_time_that_was_asked_for(monkeypatch):
    """torch's agent has it, and takes its 30 seconds where it does not end itself."""
    watched(monkeypatch)
    told: list[dict[str, object]] = []
    agent = SimpleNamespace(_shutdown_timeout=7, _shutdown=lambda **options: told.append(options))
    LocalElasticAgent._stop_workers(agent, None)  # type: ignore[arg-type]
    assert told == [{"timeout": 7}]
    if "shutdown_timeout" in inspect.signature(LocalElasticAgent).parameters:
        assert _agent()._shutdown_timeout == 7  # the name that torch has for it
    del agent._shutdown_timeout  # as in torch 2.11
    LocalElasticAgent._stop_workers(agent, None)  # type: ignore[arg-type]
    assert told == [{"timeout": 7}, {}]


def watched(monkeypatch: pytest.MonkeyPatch, ended: list[int] | None = None) -> None:
    """Changes torch's agent until the end of a test."""
    for name in ("_start_workers", "_monitor_workers", "_stop_workers"):
        monkeypatch.setattr(LocalElasticAgent, name, getattr(LocalElasticAgent, name))
    monkeypatch.setattr(api, "_terminate_process_handler", api._terminate_process_handler)
    watch_workers(end=(ended or []).append, is_stop=lambda status: status in (143, -15))


@pytest.mark.parametrize(
    ("status", "left"), [(1, 3), (137, 3), (2, 0), (143, 0), (-15, 0)], ids=str
)
def test_what_ended_by_bad_input_or_a_signal_is_not_started_again(monkeypatch, status, left):
    failed = RunResult(WorkerState.FAILED, failures={0: SimpleNamespace(exitcode=status)})  # type: ignore[dict-item]
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: failed)
    watched(monkeypatch)
    agent = SimpleNamespace(_remaining_restarts=3)
    assert LocalElasticAgent._monitor_workers(agent, None) is failed  # type: ignore[arg-type]
    assert agent._remaining_restarts == left


def _agent() -> LocalElasticAgent:
    """One of torch's own, which starts nothing."""
    spec = SimpleNamespace(role="x", max_restarts=0, local_world_size=1, rdzv_handler=None)
    return LocalElasticAgent(spec, logs_specs=None, shutdown_timeout=7)  # type: ignore[arg-type]
