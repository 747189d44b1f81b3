"""The moving average of the weights: by hand, over layouts, over checkpoints."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from polyad.parallel.checkpoint.format import EMA, MASTER, Box, CheckpointError
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.checkpoint.save import save
from polyad.parallel.source import WeightsOnly
from polyad.parallel.weights import load_model, open_weights
from polyad.parallel.zero import fragments
from polyad.train.loop.step import train_step
from polyad.train.tasks.language import text_losses
from tests.helpers.everyday import everyday
from tests.helpers.training import (
    Case,
    build_engine,
    model_yaml,
    moe_model,
    poisoned,
    resave,
    tensors,
    text_batches,
    train,
)


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


@pytest.fixture(scope="module")
def saved(workers, tmp_path_factory):
    """Three steps on two processes, with an average or without."""
    made = {}

    def save(average):
        if average not in made:
            folder = tmp_path_factory.mktemp("saved")
            case = Case(stage=1, average=average, last_step=3, save_to=str(folder))
            workers(2).run(train, case)
            made[average] = folder / "step-00000003"
        return made[average]

    return save


def test_an_average_begins_with_the_weights_of_a_checkpoint_without_one(workers, saved, tmp_path):
    case = Case(average=0.9, resume=str(saved(None)), first_step=3, save_to=str(tmp_path))
    workers(1).run(resave, case)
    before, after = tensors(saved(None)), tensors(tmp_path / "step-00000003")
    assert not any(field == "ema" for _, field in before)
    for name, field in after:
        source = "master" if field == "ema" else field
        assert torch.equal(after[name, field], before[name, source])
    assert any(field == "ema" for _, field in after)
    # A run without averages continues from a checkpoint with them, and drops them.
    case = Case(resume=str(saved(0.7)), first_step=3, save_to=str(tmp_path / "without"))
    workers(1).run(resave, case)
    assert tensors(tmp_path / "without" / "step-00000003").keys() == before.keys()


def test_a_new_run_begins_its_average_with_the_weights_that_it_takes(saved):
    checkpoint = Checkpoint(saved(0.7))
    source, name = WeightsOnly(checkpoint), "token_embedding.weight"
    shape = checkpoint.shapes()[name]
    box = source.read(Box.whole(name, "ema", shape))
    assert torch.equal(box, checkpoint.whole(name, "master"))
    assert not torch.equal(box, checkpoint.whole(name, "ema"))


def test_the_average_is_loaded_by_choice(saved):
    stored = tensors(saved(0.7))
    for choice, field in (("trained", "master"), ("ema", "ema")):
        for name, parameter in load_model(saved(0.7), choice=choice).named_parameters():
            assert torch.equal(parameter, stored[name, field])
    with pytest.raises(CheckpointError, match=r"has no moving average of its weights") as caught:
        open_weights(saved(None), "ema")
    assert "\n" not in str(caught.value)
