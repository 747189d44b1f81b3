"""A moving average of weights, beside one that is kept by hand; called in worker processes."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from polyad.parallel.checkpoint.box import EMA, MASTER
from polyad.parallel.checkpoint.writing import save
from polyad.parallel.zero import fragments
from polyad.train.loop.step import train_step
from polyad.train.tasks.language import text_losses
from tests.helpers.training import Case, build_engine, model_yaml, poisoned, text_batches


def averaged(case: Case) -> dict[str, Any]:
    """Trains, and after each step that is applied averages this process's masters by hand.

    Returns:
        The largest differences from the hand-kept averages, of averages from the masters, and which
        steps were applied.
    """
    engine, world = build_engine(case)
    held, decay = fragments(engine), case.average
    assert decay is not None
    expected = {name: fragment.values[MASTER].double() for name, fragment in held.items()}
    started = [torch.equal(f.values[EMA], f.values[MASTER]) for f in held.values()]
    applied = []
    for step in range(case.last_step):
        batches = list(text_batches(step, world, case.model))
        with poisoned(engine, case, world) if step == case.poison_step else nullcontext():
            outcome = train_step(
                engine, text_losses, iter(batches), len(batches), case.learning_rate
            )
        applied.append(outcome.result.applied)
        if applied[-1]:
            for name, fragment in held.items():
                now = fragment.values[MASTER].double()
                expected[name] = decay * expected[name] + (1 - decay) * now
    if case.save_to:
        save(engine, Path(case.save_to), case.last_step, state={}, config_yaml=model_yaml(case))
    pairs = [
        (f.values[EMA].double(), f.values[MASTER].double(), expected[n]) for n, f in held.items()
    ]
    return {
        "started": all(started),
        "wrong": max((average - by_hand).abs().max().item() for average, _, by_hand in pairs),
        "moved": max((average - master).abs().max().item() for average, master, _ in pairs),
        "applied": applied,
    }
