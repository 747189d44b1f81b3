"""Graph breaks: where a compiler would return from a step to Python."""

from functools import partial
from unittest import mock

from torch import _dynamo, nn

from polyad.model.build import compile_model
from polyad.parallel import parallelize
from polyad.train.loop.profiling import Prefetch
from polyad.train.loop.step import train_step
from tests.helpers.training import Case, batches_of, build_engine, losses_of


def places_of_weights(case: Case) -> tuple[bool, bool]:
    """Builds an engine.

    Returns:
        Whether the compiler was told that weights may be unaligned, and whether one is.
    """
    told = []

    def note(model: nn.Module, *, placed_anywhere: bool) -> None:
        told.append(placed_anywhere)

    model = case.model.model_copy(update={"compile": True})
    with mock.patch.object(parallelize, "compile_model", note):
        engine, _ = build_engine(case.but(model=model))
    (anywhere,) = told
    weights = engine.module.parameters()
    return anywhere, any(p.storage_offset() * p.element_size() % 16 for p in weights)


def breaks_of_a_step(case: Case) -> list[str]:
    """Runs a step of a model that is traced but not compiled, which would be slow.

    Returns:
        Reasons for graph breaks.
    """
    _dynamo.reset()
    _dynamo.utils.counters.clear()
    traced = partial(compile_model, backend="aot_eager")
    model = case.model.model_copy(update={"compile": True})
    with mock.patch.object(parallelize, "compile_model", traced):
        engine, world = build_engine(case.but(model=model))
    batches = batches_of(0, world, case)
    losses = losses_of(case)
    ahead = Prefetch(iter(batches), world.device)
    assert train_step(engine, losses, ahead, len(batches), case.learning_rate).result.applied
    assert _dynamo.utils.counters["stats"]["unique_graphs"] >= 3
    return list(_dynamo.utils.counters["graph_break"])
