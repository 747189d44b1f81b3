"""Figures in documents that follow from a configuration are those that the code computes."""

import re
from pathlib import Path

from polyad.train.config.adaptation import model_of, trained_line
from polyad.train.config.rules import validate
from polyad.train.config.run import load_config
from polyad.train.describe import describe
from tests.configs.test_shipped import MUMOE_SIZES

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "configs" / "quickstart"


def test_the_quickstart_of_the_readme_has_the_size_of_its_model() -> None:
    config = load_config(QUICKSTART / "gpt2-smoe.yaml", ["model.vocab_size=8192"])
    model = describe(config, validate(config, 2))["model"]
    row = f"{model['parameters']:,} parameters, {model['active_parameters']:,} active per token"
    assert re.search(rf"\n    model +{re.escape(row)}\n", (ROOT / "README.md").read_text())


def test_the_line_about_adapters_is_that_of_its_command() -> None:
    text = (ROOT / "docs" / "lora.md").read_text()
    overrides = re.search(r"adapt\.lora=\"(.*?)\"", text)
    assert overrides
    keys = ("model.vocab_size=8192", f"adapt.lora={overrides[1]}", "checkpoint.init_from=x")
    config = load_config(QUICKSTART / "gpt2.yaml", keys)
    assert f"\n    {trained_line(model_of(config))}\n" in text


def test_the_sizes_of_a_study_in_its_page_are_those_that_are_asserted() -> None:
    text = (ROOT / "docs" / "findings" / "mumoe.md").read_text()
    rows = re.findall(r"^\| (dense|CP|ring)(?:, 64 experts)? \| ([\d,]+) \|", text, re.M)
    variants = {"dense": "dense", "CP": "mumoe-cp", "ring": "mumoe-tr"}
    assert dict(rows) == {row: f"{MUMOE_SIZES[name]:,}" for row, name in variants.items()}
