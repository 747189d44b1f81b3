"""Configurations of a feed-forward, and what is said of a bad one."""

import pytest

from polyad.train.config.run import RunConfig, parse_config
from polyad.train.errors import ConfigError

KEY = "model.feed_forward."


def run_of(kind: str, *overrides: str) -> RunConfig:
    """A run of a GPT-2 of four blocks with a kind of feed-forward."""
    text = f"""
      run: {{folder: runs/x}}
      model: {{kind: gpt2, num_layers: 4, hidden_size: 32, num_heads: 4, sequence_length: 16,
        feed_forward: {{kind: {kind}}}}}
      data: {{path: data/x}}
      train: {{steps: 10, global_batch_size: 8, micro_batch_size: 2}}
    """
    return parse_config(text, overrides, origin="run.yaml")


def section_of(kind: str, *overrides: str) -> RunConfig:
    """The same with keys of its feed-forward."""
    return run_of(kind, *(f"{KEY}{override}" for override in overrides))


def assert_refused(kind: str, overrides: list[str], expected: str) -> None:
    """Checks that keys are refused in one line that names them once."""
    with pytest.raises(ConfigError) as caught:
        section_of(kind, *overrides)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"run.yaml: {KEY}{expected}")
    assert line.count(KEY + expected.split(":")[0]) == 1
