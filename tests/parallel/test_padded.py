"""A step on padded sequences does not depend on how these are cut into micro-batches."""

import itertools
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from polyad.data.sequences.samples import SequenceBatch
from polyad.model.bert import BertConfig
from polyad.model.decoder import GPT2Config
from polyad.model.output import RoutingStats
from polyad.parallel import comm
from polyad.train.loop.losses import LossConfig, routing_loss
from polyad.train.tasks.distillation import cross_entropy
from tests.helpers import training
from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_near_state, assert_same_course
from tests.helpers.training import GLOBAL_BATCH, MODEL, Case, relative, tensors

LENGTHS = (16, 1, 9, 2, 3, 16, 5, 1)
"""Tokens of the sequences of every global batch."""


def padded_batches(step: int, world: comm.World, case: Case) -> list[SequenceBatch]:
    """This rank's sequences of a step, each micro-batch padded to its longest."""
    generator = torch.Generator().manual_seed(step)
    ids_BT = torch.randint(61, (GLOBAL_BATCH, max(LENGTHS)), generator=generator)
    labels_B = torch.randint(3, (GLOBAL_BATCH,), generator=generator)
    found = []
    for first in range(0, GLOBAL_BATCH, case.micro_batch):
        rows = slice(first, first + case.micro_batch)
        length_B1 = torch.tensor(LENGTHS[rows]).unsqueeze(1)
        longest = int(length_B1.max())
        mask_BT = torch.arange(longest) < length_B1
        own_BT = ids_BT[rows, :longest].where(mask_BT, 0)
        mask_B1T = mask_BT.unsqueeze(1)
        second_B1T = torch.zeros_like(mask_B1T)
        found.append(SequenceBatch(own_BT.unsqueeze(1), mask_B1T, second_B1T, labels_B[rows]))
    return found[world.data_parallel_rank :: world.data_parallel_size]


def class_losses(model: Any, batch: SequenceBatch) -> tuple[Tensor, tuple[RoutingStats, ...]]:
    """The loss of each sequence."""
    logits_BK, routing = model(batch.ids_BCT.flatten(0, 1), mask_BT=batch.mask_BCT.flatten(0, 1))
    return cross_entropy(logits_BK, batch.labels_B), routing


def train_on_padded(case: Case) -> dict[str, Any]:
    """Trains a case on them; see `train`."""
    ours = {"batches_of": padded_batches, "losses_of": lambda case: class_losses}
    with mock.patch.multiple(training, **ours):
        return training.train(case)


pytestmark = pytest.mark.distributed

HEAD = {"kind": "classification", "num_classes": 3}
SMOE = {"kind": "smoe", "num_experts": 4, "top_k": 2, "expert_hidden_size": 24}
SECTIONS = {
    "smoe": SMOE | {"balancing_rate": 0.01},
    "similarity": SMOE | {"graph": "similarity", "score": "cosine", "tau": 0.5},
    "attention": SMOE | {"graph": "attention"},
    "pools": SMOE | {"pool": "prefix", "pool_least": 3, "pool_most": 3},
    "pools of whole samples": SMOE
    | {"pool": "document", "pool_least": 3, "pool_most": 3, "graph": "similarity"},
    "emoe": {"kind": "emoe", "num_experts": 4, "top_k": 2, "hidden_size": 48},
    "mumoe": {"kind": "mumoe", "num_experts": [5], "rank": 8, "hidden_size": 24},
    "mxd": {"kind": "mxd", "num_experts": 12, "top_k": 3, "hidden_size": 24},
}
# Processes, tensor-parallel ones, expert-parallel ones, ZeRO stage, samples of a micro-batch.
LAYOUTS = [
    *((1, 1, 1, 1, size) for size in (1, 2, 4)),
    *((2, 1, 1, stage, size) for stage, size in itertools.product((1, 2), (1, 4))),
    *((2, 1, 2, stage, size) for stage, size in ((1, 1), (2, 2))),
    (2, 2, 1, 1, 1),
    (4, 2, 2, 1, 2),
    (4, 1, 4, 1, 1),
]


def model_of(kind, section):
    given = MODEL.model_dump() | {"feed_forward": SECTIONS[section], "head": HEAD}
    if kind == "gpt2":
        return GPT2Config.model_validate(given)
    sizes = {"num_layers": 2, "hidden_size": 36, "num_heads": 4, "vocab_size": 61}
    return BertConfig.model_validate(
        sizes | {"sequence_length": 17, "feed_forward": SECTIONS[section], "head": HEAD}
    )


@pytest.fixture(scope="module")
def whole(workers, tmp_path_factory):
    """A step of a single micro-batch, in one process."""

    @cache
    def make(kind, section):
        folder = tmp_path_factory.mktemp("whole")
        case = Case(
            optimizer="sgd", learning_rate=0.3, clip=0.0, last_step=2, micro_batch=8,
            model=model_of(kind, section), losses=LossConfig(
                router_z=0.5, sequence_balance=0.0 if section == "emoe" else 0.5
            ),
            save_to=str(folder),
        )  # fmt: skip
        result = workers(1).run(train_on_padded, case)[0]
        return case, result, tensors(folder / "step-00000002")

    return make


@everyday(
    ("kind", "section", "layout"),
    [
        (kind, section, layout)
        for kind, section, layout in itertools.product(["gpt2", "bert"], SECTIONS, LAYOUTS)
        # Pools are of a prefix in language models, and of whole samples elsewhere.
        if (kind, section) not in (("bert", "pools"), ("gpt2", "pools of whole samples"))
    ],
    keep=[
        ("bert", "similarity", (2, 1, 1, 2, 4)),
        ("bert", "pools of whole samples", (2, 1, 2, 1, 1)),
    ],
)
def test_any_micro_batches_give_one_gradient(workers, whole, tmp_path, kind, section, layout):
    case, expected, weights = whole(kind, section)
    size, tensor, expert, stage, micro_batch = layout
    case = case.but(
        tensor=tensor, expert=expert, stage=stage, micro_batch=micro_batch, save_to=str(tmp_path)
    )
    results = workers(size).run(train_on_padded, case)
    assert all(result["losses"] == results[0]["losses"] for result in results)
    assert_same_course(results[0], expected)
    ours = tensors(tmp_path / "step-00000002")
    assert max(relative(ours[key].double(), weights[key].double()) for key in weights) < 1e-5
    # These losses are of micro-batches; all else of a record is of the step's tokens.
    for record, theirs in zip(results[0]["routing"], expected["routing"], strict=True):
        assert record.keys() == theirs.keys()
        for key in record:
            if not key.endswith(("balance_loss", "importance_loss")):
                assert record[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), key


SPREAD = {"expert": 2, "stage": 2}


@everyday("over", ["layer", "model"], keep=["layer"])
@everyday(
    ("processes", "layout"),
    [(2, {}), (2, SPREAD), (4, SPREAD), (4, SPREAD | {"tensor": 2})],
    keep=[(2, {}), (2, SPREAD)],
    ids=str,
)
def test_counts_of_all_processes_weigh_these_by_their_tokens(
    workers, whole, tmp_path, processes, layout, over
):
    # Of two processes 30 tokens are on the first and 23 on the other; all of them are on one.
    case, _, _ = whole("bert", "pools of whole samples")
    losses = LossConfig(load_balance=0.5, load_balance_over=over)
    one = case.but(losses=losses, save_to=str(tmp_path / "one"))
    expected = workers(1).run(train_on_padded, one)[0]
    counted = losses.model_copy(update={"load_balance_counts": "all"})
    size = 8 * layout.get("tensor", 1) // processes
    many = one.but(losses=counted, micro_batch=size, save_to=str(tmp_path / "many"), **layout)
    result = workers(processes).run(train_on_padded, many)[0]
    assert_same_course(result, expected)
    assert_near_state(*(tmp_path / name / "step-00000002" for name in ("many", "one")))
    for record, theirs in zip(result["routing"], expected["routing"], strict=True):
        for key in (key for key in record if key.endswith("balance_loss")):
            assert record[key] == pytest.approx(theirs[key], rel=1e-5)
    alone = workers(processes).run(train_on_padded, many.but(losses=losses))[0]
    with pytest.raises(AssertionError):
        assert_same_course(alone, expected)


@pytest.mark.parametrize("name", ["load_balance", "importance", "load"])
def test_other_losses_of_tokens_weigh_micro_batches_by_their_tokens(name):
    field = {"load_balance": "balance_loss"}.get(name, f"{name}_loss")
    one = torch.ones(())
    losses = {field: torch.tensor(4.0)}
    stats = RoutingStats("", one, tokens=torch.tensor(30.0), losses=losses)
    both = stats._replace(losses=losses | {"similarity_loss": torch.tensor(7.0)})
    config = LossConfig(**{name: 0.5})
    # 0.5 x 4 x 30 tokens of 20 in the mean; what is of pairs of samples is not weighed.
    assert routing_loss((stats,), config, torch.tensor(20.0)) == pytest.approx(3.0)
    assert routing_loss((both,), config, torch.tensor(20.0)) == pytest.approx(10.0)
    assert routing_loss((both._replace(tokens=None),), config) == pytest.approx(9.0)
