"""Graph breaks: where a compiler would return from a step to Python."""

from functools import partial
from unittest import mock

from torch import _dynamo, nn

from polyad.model.build import compile_model
from polyad.parallel import parallelize
from tests.helpers.training import Case, build_engine, take_step


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
    assert take_step(engine, world, case, 0).result.applied
    assert _dynamo.utils.counters["stats"]["unique_graphs"] >= 3
    return list(_dynamo.utils.counters["graph_break"])
