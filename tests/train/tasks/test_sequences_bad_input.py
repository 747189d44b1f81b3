"""What a person may get wrong in fine-tuning, by the command line: one line, status 2, no run."""

import pytest

from tests.helpers import sequences as made
from tests.helpers.runs import run as train
from tests.helpers.runs import write_config
from tests.train.tasks.conftest import SPARSE

ROWS = made.rows(12, 0)
LABELLED = {"train.csv": ROWS}
HEAD = "text,label\n"
CASES = {
    "a row without a label": ({"train.csv": f"{HEAD}a,x\nb,\nc,y\n"}, (), "row 2: "),
    "another label": (LABELLED | {"dev.csv": f"{HEAD}a,god\n"}, (), "(did you mean 'good'?)"),
    "no training rows": ({"test.csv": ROWS}, (), "has no split 'train'"),
    "longer than the model": (LABELLED, ("data.max_length=65",), "data.max_length: 65"),
    "no path": (LABELLED, ("data.path=nowhere.csv",), "nowhere.csv: "),
    "no tokenizer": (LABELLED, ("data.tokenizer=null",), "data.tokenizer: "),
    "another tokenizer": (LABELLED, ("data.tokenizer=missing.json",), "missing.json"),
    "next token": (LABELLED, ("model.head=null",), "model.head.kind: None"),
    "images": (LABELLED, ("model={kind: vit}",), "model.kind: vit"),
    "classes": (LABELLED, ("model.head.num_classes=4",), "model.head.num_classes: 4"),
    "patience": (LABELLED, ("evaluation.every=0", "evaluation.patience=2"), "evaluation.patience"),
    "benchmark": (LABELLED, ("data.benchmark=glue/sst",), "data.benchmark"),
    "none held out": (LABELLED, ("checkpoint.keep_best=true",), "checkpoint.keep_best"),
}


@pytest.fixture
def config(tmp_path):
    made.byte_tokenizer(tmp_path)
    model = {"kind": "gpt2", "num_layers": 1, "hidden_size": 16, "num_heads": 2}
    model |= {"sequence_length": 64, "head": {"kind": "classification"}, "feed_forward": SPARSE}
    return write_config(
        tmp_path / "config.yaml", tmp_path / "table", train__steps=1, data__kind="sequences",
        data__tokenizer=str(tmp_path / "tokenizer.json"), checkpoint={}, evaluation={}, model=model,
    )  # fmt: skip


def written(folder, files):
    for name, content in files.items():
        if isinstance(content, str):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
        else:
            made.write(folder / name, content)


@pytest.mark.parametrize("command", ["validate", "train"])
@pytest.mark.parametrize("name", CASES)
def test_a_start_ends_with_one_line_and_leaves_no_run(config, tmp_path, refused, name, command):
    files, keys, said = CASES[name]
    written(tmp_path / "table", files)
    assert said in refused(command, config, *keys)
    assert not (tmp_path / "run").exists()


@pytest.mark.distributed
@pytest.mark.slow
def test_data_that_a_checkpoint_cannot_be_scored_on_is_one_line(workers, config, tmp_path, refused):
    written(tmp_path / "table", LABELLED)
    workers(1).run(train, config)
    for name, files, said in (
        ("unknown", {"dev.csv": f"{HEAD}a,fine\n"}, "the label 'fine' is not among the 3"),
        ("unlabelled", {"dev.csv": "text\na\n"}, "no column 'label'"),
        ("hidden", {"test.jsonl": '{"text": "a", "label": -1}\n'}, "has no split 'validation'"),
        ("empty", {"dev.csv": HEAD}, "has no rows"),
    ):
        written(tmp_path / name, files)
        for command in ("evaluate", "report"):
            line = refused(command, tmp_path / "run", "--data", tmp_path / name)
            assert said in line, (command, line)
    assert not (tmp_path / "run" / "report.html").exists()
