"""Imports the libraries that a run needs at one point, so that their time can be measured."""

from importlib import import_module

from polyad.data.text.indexed import indexed_dataset, quick_import, sample_index_helpers
from polyad.parallel.zero import import_deepspeed

LATE = ("torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer")
"""Modules that optimizers of torch and DeepSpeed import only when they are constructed."""


def import_libraries() -> None:
    """Imports what reading data, building an engine and the first step would import later."""
    import_engine()
    indexed_dataset()
    sample_index_helpers()


def import_engine() -> None:
    """Imports what building an engine and its first step would import later.

    DeepSpeed's Muon, which nothing here uses, would bring torch's compiler; see `quick_import`.
    """
    with quick_import():
        import_deepspeed()
        for name in LATE:
            import_module(name)
