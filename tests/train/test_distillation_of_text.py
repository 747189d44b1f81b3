"""Teachers of text and of labelled sequences: the loss by hand, layouts, and what does not fit."""

import shutil

import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy, kl_div

from polyad.data.text.prepare import prepare
from polyad.data.text.samples import TrainingData
from polyad.parallel.weights import load_model
from polyad.train.config.run import load_config
from tests.helpers import sequences as made
from tests.helpers.bert import prepare_pieces
from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_two_train_as_one
from tests.helpers.runs import QUIET, records, refusal, run, run_and_listen, write_config

pytestmark = pytest.mark.distributed

SPARSE = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 16}
STUDENT = {"model__num_layers": 1, "model__hidden_size": 16, "model__feed_forward": SPARSE}
BERT = {"kind": "bert", "num_layers": 1, "hidden_size": 16, "num_heads": 2, "sequence_length": 32}
STILL = ("optimizer.learning_rate=1.0e-12", "train.steps=1")
"""One step whose checkpoint has the weights that it began with."""


def small_run(folder, data, **changes):
    """A configuration for a run of one process."""
    given = QUIET | {"train__micro_batch_size": 8}
    return write_config(folder / "config.yaml", data, **given | changes)


@pytest.fixture(scope="module")
def teacher(run_of):
    """A run with so much dropout that a teacher which was not in evaluation mode would show."""
    return run_of(train__steps=20, train__micro_batch_size=8, model__dropout=0.5, **QUIET)


@pytest.fixture
def student(tmp_path, prepared_path):
    return small_run(tmp_path / "student", prepared_path, **STUDENT)


def loss_by_hand(run_folder, teacher, weight, t):
    """The loss of the first step, from whole logits; the run stood still."""
    config = load_config(run_folder / "config.yaml")
    samples = TrainingData.open(config.data).samples(32, config.seed)
    tokens_BT1 = torch.stack([samples[number] for number in range(8)])
    ids_BT, targets_BT = tokens_BT1[:, :-1], tokens_BT1[:, 1:]
    with torch.inference_mode():
        ours, theirs = (load_model(each)(ids_BT).logits for each in (run_folder, teacher))
    task = cross_entropy(ours.flatten(0, 1), targets_BT.flatten())
    log_q, p = (ours / t).log_softmax(-1), (theirs / t).softmax(-1)
    kl_BTV = kl_div(log_q, p, reduction="none")
    return (1 - weight) * task + weight * t**2 * kl_BTV.sum(-1).mean()


@everyday(("weight", "temperature"), [(0.75, 2.0), (1.0, 1.0)], keep=[(0.75, 2.0)])
def test_the_loss_of_text_is_that_by_hand(workers, student, teacher, weight, temperature):
    words = (
        f"distill={{teacher: {teacher}, weight: {weight}, temperature: {temperature}}}", *STILL
    )  # fmt: skip
    assert workers(1).run(run, student, *words) == [1]
    folder = student.parent / "run"
    expected = float(loss_by_hand(folder, teacher, weight, temperature))
    assert records(folder)[0]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_another_teacher_than_before_is_told(workers, student, teacher, tmp_path):
    """A run that still trains has other weights when its student goes on."""
    place = tmp_path / "teacher"
    shutil.copytree(teacher, place)
    words = (student, f"distill.teacher={place}")
    workers(1).run(run, *words, "train.steps=1")
    workers(1).run(run, place / "config.yaml", f"run.folder={place}", "train.steps=21")
    told = "the teacher is at step 21, it was at 20"
    assert told in workers(1).run(run_and_listen, *words, "train.steps=2")[0][1]
    assert told not in workers(1).run(run_and_listen, *words, "train.steps=3")[0][1]


@everyday(
    ("section", "layout"),
    [
        (SPARSE, ()),
        ({"kind": "dense"}, ("parallel.zero_stage=3",)),
        (SPARSE, ("parallel.expert_parallel_size=2", "parallel.zero_stage=2")),
    ],
    keep=[(SPARSE, ())],
)
def test_two_processes_learn_from_a_teacher_what_one_learns(
    workers, student, teacher, section, layout
):
    words = (
        f"distill={{teacher: {teacher}, temperature: 2.0}}", "train.steps=2", "optimizer.kind=sgd",
        "optimizer.learning_rate=0.1", "train.micro_batch_size=2", f"model.feed_forward={section}",
    )  # fmt: skip
    assert_two_train_as_one(workers, student, words, layout)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model.sequence_length=64",), "has model.sequence_length: 32"),
        (("model.vocab_size=500",), "has model.vocab_size: 400, not 500"),
        (("distill.teacher=nowhere",), "distill.teacher: nowhere: there is no such folder"),
        (("parallel.tensor_parallel_size=2",), "parallel.tensor_parallel_size: 2 is not allowed"),
        (("data.path={words}",), "their token ids mean different things"),
        pytest.param(
            ("data.path={pieces}", "data.kind=masked_text", f"model={BERT}"),
            "data.kind: masked_text is not allowed with distill.teacher", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_teacher_of_text_that_does_not_fit_is_refused(
    workers, student, teacher, texts, tmp_path, words, message
):
    if "pieces" in words[0]:
        prepare_pieces(texts, tmp_path / "pieces")
    elif "words" in words[0]:
        prepare(str(texts), "train:500", tmp_path / "words")
    words = (
        f"distill.teacher={teacher}",
        words[0].replace("{", f"{tmp_path}/").replace("}", ""),
        *words[1:],
    )
    processes = 2 if "tensor" in words[1] else 1
    text = refusal(workers(processes), student, *words)
    assert "distill.teacher" in text
    assert message in text


@pytest.fixture(scope="module")
def sequences(workers, tmp_path_factory):
    """The configuration of a run that classifies sequences, and that run, which may teach."""
    root = tmp_path_factory.mktemp("sequences")
    made.byte_tokenizer(root)
    made.folder_of(root / "table")
    tree = yaml.safe_load(small_run(root, root / "table", train__steps=12).read_text())
    tree["model"] |= {"sequence_length": 64, "head": {"kind": "classification"}}
    tree["data"] |= {"kind": "sequences", "tokenizer": str(root / "tokenizer.json")}
    (root / "config.yaml").write_text(yaml.safe_dump(tree))
    assert workers(1).run(run, root / "config.yaml") == [12]
    return root / "config.yaml", root / "run"


@pytest.mark.slow
def test_the_loss_of_sequences_has_the_share_of_the_teacher(workers, tmp_path, sequences):
    """Padded rows of different lengths: alone, as its own teacher, and as that of another."""
    config, teacher = sequences

    def losses(name, weight, *words):
        words += (f"distill={{teacher: {teacher}, weight: {weight}}}",)
        workers(1).run(run, config, *words, f"run.folder={tmp_path / name}")
        return [record["loss"] for record in records(tmp_path / name)]

    begun = (f"checkpoint.init_from={teacher}", *STILL)
    (alone,), (own,) = (losses(f"own-{weight}", weight, *begun) for weight in (0.0, 0.75))
    assert own == pytest.approx(0.25 * alone, rel=1e-5)  # a KL of 0
    # It comes nearer to the teacher, too.
    learned = losses("learns", 1.0, "train.steps=30")
    assert learned[0] > 1e-3
    assert sum(learned[-5:]) < 0.5 * sum(learned[:5])


@pytest.mark.slow
def test_a_teacher_of_sequences_that_does_not_fit_is_refused(workers, tmp_path, sequences, teacher):
    config, own = sequences
    for seed, split in enumerate(("train", "dev")):
        made.write(tmp_path / "two" / f"{split}.csv", made.rows(20, seed, ("good", "odd")))
    for words, message in (
        ((own, f"data.path={tmp_path / 'two'}"), "has model.head.num_classes: "),
        ((teacher,), "the distill.teacher was trained with"),
        ((own, "model.sequence_length=99"), "has model.sequence_length:"),
    ):
        words = (f"distill.teacher={words[0]}", *words[1:], f"run.folder={tmp_path / 'run'}")
        assert message in refusal(workers(1), config, *words)
