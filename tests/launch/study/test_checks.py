"""Studies that cannot be: each is one line, status 2, and nothing is written or started."""

import json
from pathlib import Path
from typing import Any

import pytest

from polyad.launch.cli import run
from polyad.launch.study.folder import record_of
from polyad.train.config.run import config_of
from polyad.train.study.reading import load_study
from polyad.train.study.study import Variant, changed_key
from tests.launch.study.conftest import CP, WriteStudy

INIT = "checkpoint.init_from"
RATES = {"optimizer.learning_rate": [0.1, 0.2]}


def refused(path: Path, capfd: pytest.CaptureFixture[str], *options: str) -> str:
    """The line that a study is refused with."""
    capfd.readouterr()
    assert run(["study", str(path), *options]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("polyad: error: ")
    return lines[0]


def variants(**own: Any) -> dict[str, Any]:
    """Two variants, the second with these keys, __ for the dot."""
    return {"dense": None, "b": {key.replace("__", "."): value for key, value in own.items()}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seeds": None}, ["seeds: is missing"]),
        ({"seeds": []}, ["seeds: [] is not allowed", "at least one"]),
        ({"seeds": [1, 2, 1]}, ["seeds: [1, 2, 1]", "appears twice"]),
        ({"seeds": [-1]}, ["seeds.0: -1", "greater than or equal to 0"]),
        ({"seeds": ["one"]}, ["seeds.0: 'one'", "integer"]),
        ({"question": " "}, ["question: is empty", "give text, or null"]),
        ({"question": ["Is it?"]}, ["question: ['Is it?']", "string"]),
        ({"not_shown": []}, ["not_shown: is empty"]),
        ({"not_shown": ["a", ""]}, ["not_shown: is empty"]),
        ({"baseline": "dens"}, ["baseline: 'dens' is not a variant; variants: dense, cp"]),
        ({"variants": {}}, ["variants: {} is not allowed"]),
        (
            {"variants": {"../dense": {}}, "baseline": "../dense"},
            ["variants: '../dense'", "letters"],
        ),
        (
            {"variants": {"x" * 256: {}}, "baseline": "x" * 256},
            ["variants: 'xxx", "…", "at most 255 bytes"],
        ),
        ({"base": "a\0b"}, ["control character '\\x00' in a string"]),
        ({"base": "x" * 256}, ["base: 'xxx", "a name of 256 bytes is too long"]),
        ({"folder": "x" * 256}, ["folder: 'xxx", "a name of 256 bytes is too long"]),
        ({"folder": "ab/" * 1275}, ["variants.dense: ", "run.folder: 'ab/", "too long"]),
        ({"folder": "/dev/null/study"}, ["folder: /dev/null/study: /dev/null is a file"]),
        ({"data": {"path": "x" * 256}}, ["data.path: 'xxx", "a name of 256 bytes is too long"]),
        ({"common": {"seed=3 #": 1}}, ["common: 'seed=3 #' is not a dotted key"]),
        ({"common": {"optimizer.learning_rate": 1e308}}, ["learning_rate: 1e+308"]),
        ({"common": {"train.lr": 1e-3}}, ["the nearest is optimizer.learning_rate"]),
        ({"seeds": [10**30]}, ["seeds.0: 1000", "equal to 9223372036854775807"]),
        ({"variants": {"dense": 3}}, ["variants.dense: 3", "dictionary"]),
        ({"split": "train"}, ["split: 'train'", "'validation' or 'test'"]),
        ({"sedes": [1]}, ["unknown key sedes; the nearest is seeds"]),
        ({"data": {"pth": "x"}}, ["data.path: is missing"]),
        ({"data": {"path": "x", "source": "python-stdlib"}}, ["data.tokenizer: is missing"]),
        ({"data": {"path": "/no/such/text"}}, ["data.path", "/no/such/text"]),
        ({"base": "/no/such.yaml"}, ["base: /no/such.yaml", "no such file"]),
        ({"common": {"train.stps": 3}}, ["common: ", "unknown key train.stps", "train.steps"]),
        ({"common": {"seed": 3}}, ["common: seed", "see seeds"]),
        ({"common": {"run.folder": "x"}}, ["common: run.folder", "the study sets run"]),
        ({"variants": variants(data__path="x")}, ["variants.b: data.path", "the study sets data"]),
        (
            {"variants": variants(model__num_layer=3)},
            ["variants.b: ", "unknown key model.num_layer", "model.num_layers"],
        ),
        ({"variants": variants(model__num_heads=5)}, ["variants.b: ", "model.num_heads", "5"]),
        ({"variants": variants(model={"kind": "gpt3"})}, ["variants.b: ", "model"]),
        (
            {"variants": variants(model__feed_forward=CP | {"num_experts": [900]})},
            ["variants.b: ", "match-dense is not allowed", "900"],
        ),
        ({"variants": variants(model__vocab_size=10)}, ["variants.b: ", "model.vocab_size: 10"]),
        (
            {"variants": variants(train__global_batch_size=5)},
            ["variants.b: ", "train.global_batch_size: 5 is not divisible by"],
        ),
        ({"attack": {"rate": 1.5}}, ["attack.rate: 1.5", "less than or equal to 1"]),
        ({"attack": {"seed": 0}}, ["attack.rate: is missing"]),
        ({"attack": {"rate": 0.1, "seed": -1}}, ["attack.seed: -1", "equal to 0"]),
        (
            {"grid": RATES, "variants": variants(optimizer__learning_rate=0.5)},
            [
                "variants.b: optimizer.learning_rate: is not allowed, because a grid sets it and "
                "0.5 would"
            ],
        ),
        (
            {"grids": {"cp": {"optimizer.learning_rate": None}}},
            ["grids.cp.optimizer.learning_rate: None is not allowed"],
        ),
        # A grid, and tasks.
        (
            {"grid": {"optimizer.learning_rate": []}},
            ["grid.optimizer.learning_rate: []", "at least"],
        ),
        ({"grid": {"seed": [1]}}, ["grid: seed: is not allowed, the study sets seed itself"]),
        (
            {"grid": {"optimizer.learning_rat": [1]}},
            ["variants.dense at ", "optimizer.learning_rat"],
        ),
        (
            {"grid": {"optimizer.learning_rate": [0.01, -1]}},
            ["variants.dense at learning_rate=-1: ", "optimizer.learning_rate: -1 is not"],
        ),
        (
            {"grid": {"optimizer.learning_rate": [0.01, 0.01]}},
            ["grid: learning_rate=0.01 is given twice"],
        ),
        (
            {"grids": {"c": {"train.tf32": [True]}}},
            ["grids: 'c' is not a variant; variants: dense, cp"],
        ),
        (
            {"grid": {"train.steps": [4, 5]}},
            ["variants.dense/steps=5: train.steps: 5 differs from"],
        ),
        ({"grid_seeds": 2}, ["grid_seeds: 2 is not allowed with 1 seeds"]),
        ({"tasks": {"a/b": {}}, "data": None}, ["tasks: 'a/b' is not allowed; a name has letters"]),
        ({"tasks": {"a": {"data.path": "x"}}}, ["data: is not allowed together with tasks"]),
        ({"tasks": {"a": {"seed": 1}}, "data": None}, ["tasks.a: seed: is not allowed"]),
        (
            {"tasks": {"a": {"data.pth": "x"}}, "data": None},
            ["tasks.a: ", "unknown key data.pth; the nearest is data.path"],
        ),
        (
            {
                "tasks": {
                    "a": {"data.path": "x"},
                    "b": {"data": {"kind": "sequences", "path": "x"}},
                },
                "data": None,
                "variants": {"dense": {"model.head": {"kind": "classification"}}},
            },
            [
                "tasks.b: data.kind: sequences differs from a's text, so their scores cannot be "
                "averaged"
            ],
        ),
        # Runs that begin with those of other variants.
        (
            {"from_runs": {"c": {INIT: "dense"}}},
            ["from_runs: 'c' is not a variant; variants: dense, cp"],
        ),
        (
            {"from_runs": {"cp": {INIT: "dens"}}},
            [f"from_runs.cp: {INIT}: 'dens' is not a variant; variants: dense, cp"],
        ),
        ({"from_runs": {"cp": {INIT: "cp"}}}, ["from_runs: cp from cp is a cycle"]),
        (
            {"from_runs": {"cp": {INIT: "dense"}, "dense": {"distill.teacher": "cp"}}},
            ["from_runs: ", " from cp", " is a cycle, so none of these runs can start"],
        ),
        (
            {"from_runs": {"cp": {"train.steps": "dense"}}},
            [
                "from_runs.",
                "'train.steps' is not allowed",
                "'checkpoint.init_from' or 'distill.teacher'",
            ],
        ),
        (
            {
                "from_runs": {"b": {INIT: "dense"}},
                "variants": variants(checkpoint__init_from="runs/x"),
            },
            [f"from_runs.b: {INIT}: is not allowed, b sets {INIT} itself"],
        ),
        # What experts are for.
        ({"knockout": {"tokens": 0}}, ["knockout.tokens: 0 is not allowed", "1"]),
        ({"knockout": {"layers": [-1]}}, ["knockout.layers.0: -1 is not allowed"]),
        (
            {"knockout": {"layers": [2]}},
            ["knockout.layers: 2 is not allowed: blocks with experts in cp are 0, 1"],
        ),
        (
            {"knockout": {}, "variants": {"dense": None}},
            ["knockout: no variant has experts"],
        ),
        # These would be runs, but not pairs of runs.
        (
            {"variants": variants(train__steps=5)},
            ["variants.b: train.steps: 5 differs from dense's 4"],
        ),
        (
            {"variants": variants(train__global_batch_size=8)},
            ["variants.b: train.global_batch_size: 8 differs from dense's 4", "under common"],
        ),
        (
            {"variants": variants(model__sequence_length=16)},
            ["variants.b: model.sequence_length: 16 differs from dense's 32", "same batches"],
        ),
        (
            {"variants": variants(evaluation__stride=8)},
            ["variants.b: evaluation.stride: 8 differs from dense's None"],
        ),
    ],
)
def test_a_wrong_study_is_one_line_that_names_the_key(
    changes: dict[str, Any],
    words: list[str],
    write_study: WriteStudy,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = write_study(**changes)
    line = refused(path, capfd)
    for word in words:
        assert word in line
    assert not (path.parent / "study" / "runs").exists()


def test_a_name_that_stands_twice_is_refused(
    write_study: WriteStudy, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_study()
    path.write_text(path.read_text().replace("  dense: null\n", "  dense: null\n  dense: {}\n"))
    assert "key 'dense' appears twice" in refused(path, capfd)


@pytest.mark.parametrize("text", ["", "- a list\n", "seeds: [1\n"])
def test_a_file_that_is_no_study_is_refused(
    text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(text)
    assert str(path) in refused(path, capfd)
    assert "there is no such file" in refused(tmp_path / "none.yaml", capfd)


def test_text_too_short_for_the_model_is_found_before_anything_starts(
    write_study: WriteStudy, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_study(common={"model.sequence_length": 1000000})
    assert "one sample" in refused(path, capfd)
    assert not (path.parent / "study" / "runs").exists()


def test_a_split_without_text_is_found_before_anything_starts(
    write_study: WriteStudy, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--tokenizer", "train:400", "--test-fraction", "0", "--output", str(tmp_path / "t")]
    assert run(["prepare", "--source", str(text), *options]) == 0
    path = write_study(data={"path": str(tmp_path / "t")}, split="test")
    assert "split: test has no text" in refused(path, capfd)


def test_a_folder_of_something_else_is_refused_and_left(
    write_study: WriteStudy, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_study()
    folder = path.parent / "study"
    folder.mkdir()
    (folder / "thesis.txt").write_text("precious")
    assert "holds thesis.txt, but no study" in refused(path, capfd)
    assert [entry.name for entry in folder.iterdir()] == ["thesis.txt"]


def test_what_a_study_asks_and_does_not_show_changes_no_result(write_study: WriteStudy) -> None:
    plain = load_study(write_study())
    assert (plain.config.question, plain.config.not_shown) == (None, None)
    texts = {"question": "Is cp better?", "not_shown": ["Nothing at 124M.", "Nothing of speed."]}
    asked = load_study(write_study(**texts))
    assert (asked.config.question, asked.config.not_shown) == tuple(texts.values())
    assert record_of(asked, "x") == record_of(plain, "x")


def test_a_damaged_record_is_refused(
    write_study: WriteStudy, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_study()
    folder = path.parent / "study"
    folder.mkdir()
    for text, word in (("{", "is not JSON"), ("{}", "has no split")):
        (folder / "study.json").write_text(text)
        assert word in refused(path, capfd)


def test_a_dry_run_says_what_would_be_trained_and_writes_nothing(
    write_study: WriteStudy, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_study(seeds=[1, 2])
    assert run(["study", str(path), "--dry-run"]) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    assert "4 runs (2 variants, seeds 1, 2) of 4 steps of 128 tokens" in captured.out
    assert "0 finished, 0 to continue, 4 to start" in captured.out
    assert run(["study", str(path), "--dry-run", "--json", "-"]) == 0
    plan = json.loads(capfd.readouterr().out)
    order = [(run["seed"], run["variant"]) for run in plan["runs"]]
    assert order == [(1, "dense"), (1, "cp"), (2, "dense"), (2, "cp")]
    # Dense: 400 x 32 + 32 x 32 embeddings, 64 of the last LayerNorm, 2 blocks of 12 D^2 + 13 D.
    dense = 400 * 32 + 32 * 32 + 64 + 2 * (12 * 32**2 + 13 * 32)
    assert plan["variants"]["dense"]["parameters"] == dense
    # Gate 4 x 32; each rank 4 + 4 + 33 + 128 + 129 + 32 = 330; the MLP's 8,352 less 128 is 24.9.
    cp = dense + 2 * (128 + 25 * 330 - 8352)
    assert plan["variants"]["cp"]["parameters"] == cp
    assert not (path.parent / "study").exists()


def test_a_dry_run_before_the_text_is_prepared_takes_the_wanted_vocabulary(
    write_study: WriteStudy, tmp_path: Path, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = {"path": str(tmp_path / "none"), "source": str(text), "tokenizer": "train:500"}
    path = write_study(data=wanted)
    assert run(["study", str(path), "--dry-run", "--json", "-"]) == 0
    plan = json.loads(capfd.readouterr().out)
    dense = 500 * 32 + 32 * 32 + 64 + 2 * (12 * 32**2 + 13 * 32)
    assert plan["variants"]["dense"]["parameters"] == dense
    path = write_study(data=wanted | {"tokenizer": "words"})
    assert "the size of the vocabulary" in refused(path, capfd, "--dry-run")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--figure", "page.png"), "--figure: page.png: a file that ends in .svg is needed"),
        (("--figure", "none/page.svg"), "there is no folder none"),
        (("--figure", "page.svg", "--dry-run"), "--figure: page.svg is not allowed with --dry-run"),
        (("--page", "page.svg"), "--page: page.svg: a file that ends in .html is needed"),
        (("--page", "none/page.html"), "--page: none/page.html: there is no folder none"),
        (("--page", "folder.html"), "--page: folder.html: it is a folder"),
        (("--page", "page.html", "--dry-run"), "--page: page.html is not allowed with --dry-run"),
    ],
)
def test_where_a_figure_or_a_page_cannot_be_is_found_before_anything_starts(
    options: tuple[str, ...],
    words: str,
    write_study: WriteStudy,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_study()
    (tmp_path / "folder.html").mkdir()
    monkeypatch.chdir(tmp_path)
    assert words in refused(path, capfd, *options)
    assert not (path.parent / "study").exists()


def test_how_images_are_read_is_part_of_a_study_and_where_they_are_is_not() -> None:
    def variant(**data: Any) -> Variant:
        tree = {
            "run": {"folder": "r"},
            "model": {"kind": "vit", "image_size": 8, "patch_size": 4, "num_heads": 2},
            "data": {"kind": "images", "path": "a"} | data,
            "train": {"steps": 2, "global_batch_size": 8, "micro_batch_size": 4},
        }
        config = config_of(tree, (), origin="study")
        return Variant(group="a", point="", overrides=(), config=config)

    recorded = json.loads(json.dumps(variant().defining_keys()))
    moved = variant(path="b", num_workers=2)
    assert changed_key(moved.read_keys(recorded), moved.defining_keys()) is None
    other = variant(label_smoothing=0.3)
    changed = changed_key(other.read_keys(recorded), other.defining_keys())
    assert changed == "data.label_smoothing: 0.0 there, 0.3 here"
    # Earlier versions recorded nothing of the data.
    earlier = {key: value for key, value in recorded.items() if not key.startswith("data.")}
    half = variant(normalization="half")
    assert changed_key(half.read_keys(earlier), half.defining_keys()) is None
