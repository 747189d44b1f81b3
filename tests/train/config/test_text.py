"""`polyad schema`: what an editor takes for right is, and the shipped files say where it lies."""

import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from polyad.launch.cli import run as polyad
from polyad.launch.commands.runs import schema_text
from polyad.train.config.run import build_config

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
FILES = {"run": "polyad.schema.json", "study": "study.schema.json"}
SHIPPED = sorted(set(CONFIGS.glob("*/*.yaml")) - set(CONFIGS.glob("launch/*")))
SCHEMAS = {kind: Draft202012Validator(json.loads(schema_text(kind))) for kind in FILES}
QUICKSTART = CONFIGS / "quickstart" / "gpt2-smoe.yaml"


@pytest.mark.parametrize("kind", FILES)
def test_schemas_are_schemas_and_lie_beside_the_configurations(kind, capfd):
    Draft202012Validator.check_schema(json.loads(schema_text(kind)))
    assert polyad(["schema", kind]) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    assert captured.out == schema_text(kind)
    # If this differs: polyad schema KIND > configs/NAME
    assert (CONFIGS / FILES[kind]).read_text() == captured.out


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_shipped_files_are_valid_and_name_their_schema(path):
    kind = "study" if path.parent.name == "studies" else "run"
    first = path.read_text().splitlines()[0]
    place = first.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / place).resolve() == CONFIGS / FILES[kind]
    assert list(SCHEMAS[kind].iter_errors(yaml.safe_load(path.read_text()))) == []


REFUSED = [
    ("trian", {}), ("train.stps", 3), ("train.steps", "many"), ("train.steps", 0),
    ("model.kind", "gpt3"), ("model.feed_forward.kind", "moe"), ("model.dropout", 1.5),
    ("model.feed_forward.score", "cosin"), ("log.trackers", ["mlflow"]),
    ("optimizer.betas", [0.9]), ("parallel.zero_stage", 4), ("data.path", 7),
]  # fmt: skip
TAKEN = [
    ("model.feed_forward.placement", [1]), ("model.feed_forward.placement", 2),
    ("log.trackers", []), ("log.trackers", ["wandb", "trackio"]), ("train.ema", 0.99),
    ("checkpoint.keep_last", None), ("optimizer.betas", [0.9, 0.99]), ("model.dropout", 0),
    ("model", {"vocab_size": 100}), ("data", {"path": "x"}),
    ("model.feed_forward", {"kind": "mumoe", "num_experts": [8, 2], "rank": "match-dense"}),
    ("model.feed_forward", {"kind": "mumoe", "num_experts": [8], "rank": 12}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), REFUSED + TAKEN)
def test_an_editor_takes_of_a_key_what_a_run_takes(key, value):
    tree = place = yaml.safe_load(QUICKSTART.read_text())
    *sections, last = key.split(".")
    for section in sections:
        place = place.setdefault(section, {})
    place[last] = value
    if (key, value) in TAKEN:
        assert list(SCHEMAS["run"].iter_errors(tree)) == []
        build_config(tree, origin="x")
    else:
        assert list(SCHEMAS["run"].iter_errors(tree))
        with pytest.raises(ValueError, match=last[:3]):
            build_config(tree, origin="x")


def test_every_key_says_what_it_means():
    silent = [
        f"{name}.{key}"
        for name, section in json.loads(schema_text("run"))["$defs"].items()
        for key, about in section.get("properties", {}).items()
        if not about.get("description") and "$ref" not in json.dumps(about)
    ]
    assert silent == []
