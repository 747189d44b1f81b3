"""Pretrain mixture-of-experts transformers at scale, and see what the experts do.

    import polyad

    polyad.prepare("python-stdlib", "train:8192", "runs/stdlib")
    run = polyad.train("quickstart/gpt2-smoe", data__path="runs/stdlib", run__folder="runs/first")
    run = polyad.load("runs/first")         # or a folder of weights, or a name on the hub
    print(run.experts("def main():"))       # the experts of every token, layer by layer
    run.show("def main():", interventions=["layer=1,expert=3"])   # a table in a notebook
    run.evaluate()["perplexity"], run.generate("def "), run.atlas()["experts"], run.model

Several processes, on one or many hosts, are started by the command `polyad launch`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyad.data.text.prepare import prepare
    from polyad.launch.commands.runs import run_study as study
    from polyad.train.experts.view import TextView
    from polyad.train.loading import LayerExperts, Run, TextExperts, load, train

__all__ = ["LayerExperts", "Run", "TextExperts", "TextView", "load", "prepare", "study", "train"]

_HOME = {
    "LayerExperts": ("polyad.train.loading", "LayerExperts"),
    "Run": ("polyad.train.loading", "Run"),
    "TextExperts": ("polyad.train.loading", "TextExperts"),
    "TextView": ("polyad.train.experts.view", "TextView"),
    "load": ("polyad.train.loading", "load"),
    "prepare": ("polyad.data.text.prepare", "prepare"),
    "study": ("polyad.launch.commands.runs", "run_study"),
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for: the command starts without torch."""
    from importlib import import_module

    if name == "train":  # a package that can be called
        return import_module("polyad.train")
    if name not in _HOME:
        raise AttributeError(f"module 'polyad' has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
