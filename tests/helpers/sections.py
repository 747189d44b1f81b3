"""Configurations of a feed-forward, and what is said of a bad one."""

from polyad.train.config.run import RunConfig, parse_config

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
