"""Pretrain mixture-of-experts transformers at scale, and see what the experts do.

    import polyad

    run = polyad.load("runs/quickstart/run")
    print(run.experts("def main():"))       # the experts of every token, layer by layer
    run.show("def main():", interventions=["layer=1,expert=3"])   # a table in a notebook
    run.evaluate()["perplexity"], run.generate("def "), run.model

Training is started by the command `polyad`; the packages below are what it is made of.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyad.train.experts.view import TextView
    from polyad.train.loading import LayerExperts, Run, TextExperts, load

__all__ = ["LayerExperts", "Run", "TextExperts", "TextView", "load"]

_HOME = {
    "LayerExperts": "polyad.train.loading",
    "Run": "polyad.train.loading",
    "TextExperts": "polyad.train.loading",
    "TextView": "polyad.train.experts.view",
    "load": "polyad.train.loading",
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for: the command starts without torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'polyad' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
