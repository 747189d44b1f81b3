"""What the agent of a host does otherwise than torch's."""

import inspect
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from polyad.parallel.agents import watch_workers


def test_workers_that_start_again_are_killed_after_the_time_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's agent has it, and takes its 30 seconds where it does not end itself."""
    for name in ("_monitor_workers", "_stop_workers"):  # put back afterwards
        monkeypatch.setattr(LocalElasticAgent, name, getattr(LocalElasticAgent, name))
    told: list[dict[str, object]] = []
    agent = SimpleNamespace(_shutdown_timeout=7, _shutdown=lambda **options: told.append(options))
    watch_workers()
    LocalElasticAgent._stop_workers(agent, None)  # type: ignore[arg-type]
    assert told == [{"timeout": 7}]
    if "shutdown_timeout" in inspect.signature(LocalElasticAgent).parameters:
        assert _agent()._shutdown_timeout == 7  # the name that torch has for it
    del agent._shutdown_timeout  # as in torch 2.11
    LocalElasticAgent._stop_workers(agent, None)  # type: ignore[arg-type]
    assert told == [{"timeout": 7}, {}]


def _agent() -> LocalElasticAgent:
    """One of torch's own, which starts nothing."""
    spec = SimpleNamespace(role="x", max_restarts=0, local_world_size=1, rdzv_handler=None)
    return LocalElasticAgent(spec, logs_specs=None, shutdown_timeout=7)  # type: ignore[arg-type]
