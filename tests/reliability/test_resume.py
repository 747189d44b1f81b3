"""Going on exactly: bitwise on the same layout, and with the same global batches on any other.

The data has 7 and a bit global batches an epoch, so that runs cross the end of several.
"""

import hashlib
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from polyad.data.text.prepare import prepare
from polyad.parallel import comm
from polyad.train.tasks import language
from polyad.train.train import main
from tests.data.test_sampler import permutation
from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_equal_state
from tests.helpers.runs import FEED_FORWARDS, records, run, write_config

pytestmark = pytest.mark.distributed


def digest(row_T: torch.Tensor) -> str:
    """Returns a digest of a sample's token ids."""
    return hashlib.sha256(row_T.numpy().tobytes()).hexdigest()[:16]


def run_and_note(config: Path, notes: Path, *overrides: str) -> int:
    """Runs `polyad train`; each data-parallel rank writes digests of its micro-batches, in
    order."""
    losses = language.text_losses
    taken: list[list[str]] = []

    def noting(model, batch, *others):
        tokens_BT1 = torch.cat([batch.input_ids_BT[:, :1], batch.target_ids_BT], 1)
        taken.append([digest(row) for row in tokens_BT1])
        return losses(model, batch, *others)

    with mock.patch.object(language, "text_losses", noting):
        steps = main(config, overrides).step
    notes.mkdir(exist_ok=True)
    (notes / f"{comm.rank():03d}").write_text(json.dumps(taken))
    return steps


def global_batches(notes: Path, global_batch_size: int) -> list[list[str]]:
    """The samples of each step: micro-batch j of a step is that of rank j % D."""
    ranks = [json.loads(path.read_text()) for path in sorted(notes.iterdir())]
    flat = [sample for turn in zip(*ranks, strict=True) for micro in turn for sample in micro]
    return [flat[i : i + global_batch_size] for i in range(0, len(flat), global_batch_size)]


T, B, SEED, STEPS = 32, 8, 3, 14
KEYS = ("step", "loss", "grad_norm", "validation_loss", "tokens", "samples")


@pytest.fixture(scope="session")
def small_data(tmp_path_factory, texts):
    """Some 50 samples."""
    folder = tmp_path_factory.mktemp("small")
    lines = texts.read_text().splitlines()
    short = [json.dumps({"text": json.loads(line)["text"][:70]}) for line in lines]
    (folder / "texts.jsonl").write_text("\n".join(short))
    prepare(
        str(folder / "texts.jsonl"), "train:300", folder / "data", validation_fraction=0.1,
    )  # fmt: skip
    return folder / "data"


def naive_samples(data, epochs):
    """Digests of all samples in their order, by cutting the file and shuffling."""
    tokens = np.fromfile(data / "train.bin", np.uint16).astype(np.int64)
    count = (len(tokens) - 1) // T
    rows = torch.from_numpy(np.stack([tokens[i * T : (i + 1) * T + 1] for i in range(count)]))
    orders = [permutation(count, f"{SEED}/{epoch}") for epoch in range(epochs)]
    return [digest(rows[i]) for order in orders for i in order], count


@everyday(
    ("kind", "stage", "precision"),
    [
        *[("dense", stage, "bf16") for stage in (1, 2, 3)],
        *[("smoe", 1, "fp32"), ("cp", 3, "bf16")],
        *[("smoe", 1, "bf16"), ("smoe", 2, "bf16"), ("tr", 2, "fp32"), ("tr", 1, "bf16")],
    ],
    keep=[("dense", 1, "bf16")],
)
def test_a_run_in_pieces_is_bitwise_the_run_in_one(
    workers, small_data, tmp_path, kind, stage, precision
):
    """With accumulation and dropout; cut within an epoch, and around the batch across its end."""
    configs = {}
    for name in ("whole", "pieces"):
        configs[name] = write_config(
            tmp_path / name / "config.yaml", small_data, train__steps=STEPS, seed=SEED,
            checkpoint__every=0, evaluation__every=4, log__trackers=[],
            monitor__spike_warmup=8, monitor__spike_window=8,
            model__feed_forward=FEED_FORWARDS[kind], model__dropout=0.2,
            train__precision=precision, parallel__zero_stage=stage,
        )  # fmt: skip
    assert workers(2).run(run, configs["whole"]) == [STEPS] * 2
    for steps in (3, 7, 8, STEPS):
        assert workers(2).run(run, configs["pieces"], f"train.steps={steps}") == [steps] * 2
    whole, pieces = tmp_path / "whole" / "run", tmp_path / "pieces" / "run"
    ours, theirs = records(pieces), records(whole)
    # A piece validates at its end too.
    for mine, other in zip(ours, theirs, strict=True):
        assert {k: mine[k] for k in KEYS if k in other} == {k: other[k] for k in KEYS if k in other}
    last = f"checkpoints/step-{STEPS:08d}"
    assert_equal_state(pieces / last, whole / last)


def test_every_layout_takes_the_same_global_batches_none_twice(workers, small_data, tmp_path):
    """Over 2, 1 and 4 processes in turn, cut anywhere; a loader worker is some batches ahead."""
    config = write_config(
        tmp_path / "config.yaml", small_data, seed=SEED, checkpoint__every=0, evaluation__every=0,
        log__trackers=[],
    )  # fmt: skip
    taken = []
    for number, (processes, micro, steps) in enumerate([(2, 2, 5), (1, 8, 8), (4, 1, 20)]):
        notes = tmp_path / f"notes-{number}"
        options = [f"train.steps={steps}", f"train.micro_batch_size={micro}"]
        options += ["data.num_workers=1"] * (processes == 1)
        assert set(workers(processes).run(run_and_note, config, notes, *options)) == {steps}
        taken += global_batches(notes, B)
    samples, count = naive_samples(small_data, 5)
    assert (count // B, count % B > 0) == (7, True)  # a batch lies across the end of an epoch
    assert taken == [samples[i * B : (i + 1) * B] for i in range(20)]
    # In words: each sample of the first epoch once.
    first = [sample for batch in taken for sample in batch][:count]
    assert sorted(first) == sorted(samples[:count])
