"""The moving average of the weights: by hand, over layouts, over checkpoints."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from polyad.parallel.checkpoint.format import EMA, MASTER, Box
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.source import WeightsOnly
from polyad.parallel.zero import fragments
from tests.helpers.everyday import everyday
from tests.helpers.training import Case, build_engine, moe_model, poisoned, take_step, train


def averaged(case: Case) -> dict[str, Any]:
    """Trains, and after each step that is applied averages this process's masters by hand.

    Returns:
        The largest differences from the hand-kept averages, of averages from the masters, and which
        steps were applied.
    """
    engine, world = build_engine(case)
    held, decay = fragments(engine), case.average
    expected = {name: fragment.values[MASTER].double() for name, fragment in held.items()}
    started = [torch.equal(f.values[EMA], f.values[MASTER]) for f in held.values()]
    applied = []
    for step in range(case.last_step):
        with poisoned(engine, case, world) if step == case.poison_step else nullcontext():
            outcome = take_step(engine, world, case, step)
        applied.append(outcome.result.applied)
        if applied[-1]:
            for name, fragment in held.items():
                now = fragment.values[MASTER].double()
                expected[name] = decay * expected[name] + (1 - decay) * now
    pairs = [
        (f.values[EMA].double(), f.values[MASTER].double(), expected[n]) for n, f in held.items()
    ]
    return {
        "started": all(started),
        "wrong": max((average - by_hand).abs().max().item() for average, _, by_hand in pairs),
        "moved": max((average - master).abs().max().item() for average, master, _ in pairs),
        "applied": applied,
    }


pytestmark = pytest.mark.distributed

# Processes and what is trained: every stage, both precisions, experts and tensors that are cut.
ONE = Case(average=0.7, last_step=5)
CASES = {
    "stage 1": (1, ONE),
    "stage 1 in bf16 on two processes": (2, ONE.but(precision="bf16")),
    "stage 1, a skipped step": (2, ONE.but(stage=1, poison="loss", poison_step=2)),
    "stage 2 in bf16, experts": (2, ONE.but(stage=2, precision="bf16", expert=2,
                                            model=moe_model())),
    "stage 3, a skipped step": (2, ONE.but(stage=3, poison="gradient", poison_step=2)),
    "tensor parallel, experts, stage 1": (4, ONE.but(stage=1, tensor=2, expert=2,
                                                     model=moe_model())),
}  # fmt: skip


@everyday(("processes", "case"), CASES.values(), keep=["stage 3, a skipped step"], ids=CASES)
def test_the_average_is_that_of_the_masters_after_each_applied_step(workers, processes, case):
    for result in workers(processes).run(averaged, case):
        assert result["started"]  # as the weights
        assert result["wrong"] < 1e-6
        assert result["moved"] > 1e-3
        assert result["applied"] == [step != case.poison_step for step in range(5)]


def test_a_new_run_begins_its_average_with_the_weights_that_it_takes(workers, tmp_path):
    workers(2).run(train, ONE.but(save_to=str(tmp_path)))
    checkpoint = Checkpoint(tmp_path / "step-00000005")
    source, name = WeightsOnly(checkpoint), "token_embedding.weight"
    shape = checkpoint.shapes()[name]
    box = source.read(Box.whole(name, "ema", shape))
    assert torch.equal(box, checkpoint.whole(name, "master"))
    assert not torch.equal(box, checkpoint.whole(name, "ema"))
