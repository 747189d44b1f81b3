"""Every shipped file, spoiled in thousands of ways, is valid or refused in one line, and at once.

Files, command lines and studies, in one process and the same at every run: texts are changed by a
generator with a seed. `test_config_fuzz.py` has trees and texts of no origin.
"""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyad.train.config.rules import validate
from polyad.train.config.run import RunConfig, config_of, parse_config, read_tree, shipped_configs
from polyad.train.config.text import flatten, keys
from polyad.train.errors import one_line
from polyad.train.study import load_study, plan_text, results_of
from tests.helpers.everyday import everyday

ROOT = Path(__file__).resolve().parents[2]
ALL_STUDIES = sorted((ROOT / "configs" / "studies").glob("*.yaml"))
# Those of many tasks take a second to read, and are alike.
STUDIES = [path for path in ALL_STUDIES if not path.name.startswith(("glue-", "sst5-"))]
FILES = sorted(set(shipped_configs()) - set(ALL_STUDIES))
NAMES = [str(path.relative_to(ROOT / "configs")) for path in FILES]
SECONDS = 2.0
"""Of this process, for one file of a few kilobytes. Most take a hundredth of that."""

VALUES = [
    "12e4b9", "2e4data", "1e-3; rm", "2001-99-99", "2001-01-01", "12:30:45", "0x_", "0x1F", "0o17",
    "012", "1_000", "yes", "off", "true", "TRUE", "null", "~", "", "''", '""', "=", "<<", "-", "?",
    '!!int ""', "!!bool maybe", "!!timestamp x", "!!float 1", "!!str 1", "!!set {a}", "!x y", "!",
    "!!python/object/apply:os.system [true]", "!!binary x", "!!null x", "!!omap [a]", "&a b", "*a",
    "&a [*a]", "9" * 5000, "-" * 300, "0." + "1" * 5000, "1e308", "-1e308", "1e999", "1e-320",
    "1e-300", ".inf", "-.inf", ".nan", "0", "-1", "1", "2", "1.5", str(2**31), str(2**63),
    str(10**30), "x" * 5000, "word " * 400, "a/" * 3000, '"a\\0b"', '"\\e[31m"', '"\\ud800"',
    '"\\UFFFFFFFF"', "\x1b[31m", "\0", "\x07", "\ufeff", "\u2028", "\x85", "\u202e", "é🙂", "\t",
    "\t- x", "[", "]", "{", "}", "[1, [2]]", "{a: {b: 1}}", "{a: 1, a: 2}", "[" * 500, "{a: " * 300,
    "? [a]", "{1: x}", "{null: x}", "{? [a] : b}", "{<<: {a: 1}}", "{<<: [*a, *a]}", "|", ">", "@x",
    "`x", "%x", "# x", "a: b", "- a", "a b", ",", "x\n---\ny", "x\n...\n", "%YAML 1.1", "'", '"',
    "{kind: smoe, num_experts: 4}", "{kind: smoe, sigma: 1e-300}", "{kind: mumoe}", "{kind: dense}",
    "[{path: a, weight: 1e308}, {path: b, weight: 1}]", "[{path: a, weight: 1}]", "[0.9, 1e308]",
]  # fmt: skip
LINES = [
    "---", "...", "%YAML 1.2", "%TAG ! x", "? [a]", ": x", "1: x", "null: x", "<<: *a",
    "&a b: 1", "*a : 1", "\tx: 1", "lr: 1", "[]", "- 1", "{", '"', "seed: 1", "train:",
]  # fmt: skip


def spoiled(text: str, chance: random.Random) -> str:
    """A text with one to three changes."""
    lines = text.split("\n")
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.randrange(len(lines))
        line = lines[at]
        indent = line[: len(line) - len(line.lstrip())]
        key = line.strip().partition(":")[0]
        place = chance.randrange(len(line) + 1)
        change = chance.randrange(10)
        if change < 4:
            lines[at] = f"{indent}{key}: {chance.choice(VALUES)}"
        elif change == 4:
            lines.insert(at, indent * chance.randrange(2) + chance.choice(LINES))
        elif change == 5:
            lines[at] = line[:place] + chance.choice(VALUES) + line[place:]
        elif change == 6:
            lines[at] = line[:place] + line[place + 1 :]
        elif change == 7:
            lines[at] = " " * chance.randrange(9) + line.lstrip()
        elif change == 8:
            lines[at] = indent + key[: chance.randrange(len(key) + 1)] + line.strip()[len(key) :]
        else:
            del lines[at]
            lines = lines or [""]
    return "\n".join(lines)


def outcome(work: Callable[[], Any], what: str) -> bool:
    """Whether it is valid; if not, then refused as it has to be."""
    started = time.process_time()
    refused = None
    try:
        work()
    except ValueError as error:
        refused = error
    seconds = time.process_time() - started
    assert seconds < SECONDS, f"{what!r} took {seconds:.1f} s"
    if refused is None:
        return True
    line = one_line(refused)  # as it is printed
    assert getattr(refused, "exit_status", None) == 2, f"{what!r}: {refused!r}"
    assert len(line) < 700, f"{what!r}: {line}"
    assert one_line(line).isprintable(), what
    return False


def bare(path: Path) -> str:
    """A file without its comments, which take longest to read."""
    text: str = yaml.safe_dump(yaml.safe_load(path.read_text()), sort_keys=False)
    return text


def check_file(text: str) -> None:
    config = parse_config(text, origin="file.yaml")
    assert parse_config(config.to_yaml(), origin="again") == config
    check_rules(config)


def check_rules(config: RunConfig) -> None:
    parallel = config.parallel
    validate(config, parallel.tensor_parallel_size * parallel.expert_parallel_size)


def try_files(path: Path, times: int) -> None:
    chance, text = random.Random(path.name), bare(path)
    assert outcome(lambda: check_file(text), "as it is")
    valid = 0
    for _ in range(times):
        changed = spoiled(text, chance)
        valid += outcome(lambda: check_file(changed), changed)  # noqa: B023
    assert valid < times


def try_overrides(path: Path, times: int) -> None:
    chance, tree = random.Random(path.name), read_tree(path)
    now = flatten(config_of(tree, origin="file.yaml").model_dump(mode="json"))
    known = sorted({*keys(RunConfig), *now, "data.mixture.0.path", "a.b", ""})
    valid = 0
    for _ in range(times):
        words = []
        for _ in range(chance.choice((1, 1, 2))):
            key = chance.choice(known if chance.random() < 0.5 else list(now))
            values = [json.dumps(now[key])] if key in now and chance.random() < 0.2 else VALUES
            word = f"{key}={chance.choice(values)}"
            words.append(spoiled(word, chance) if chance.random() < 0.2 else word)

        def check() -> None:
            check_rules(config_of(tree, words, origin="file.yaml"))  # noqa: B023

        valid += outcome(check, str(words))
    assert 0 < valid < times


def try_studies(path: Path, times: int, folder: Path) -> None:
    chance, tree = random.Random(path.name), yaml.safe_load(path.read_text())
    tree |= {"base": str(ROOT / tree["base"]), "folder": str(folder / "study")}
    text = yaml.safe_dump(tree, sort_keys=False)
    file = folder / "study.yaml"

    def check(text: str) -> None:
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
        study = load_study(file)
        plan_text(study, results_of(study))

    assert outcome(lambda: check(text), "as it is")
    valid = sum(
        outcome(lambda: check(changed), changed)  # noqa: B023
        for changed in (spoiled(text, chance) for _ in range(times))
    )
    assert 0 < valid < times


@everyday(
    "path",
    FILES,
    keep=[
        "bert/small.yaml",
        "gpt2/124m-smoe-16.yaml",
        "mixer/s16-mumoe-tr-64x2.yaml",
        "mixture/digits-distilled.yaml",
        "wikitext103/xmoe-medium.yaml",
    ],
    ids=NAMES,
)
def test_a_spoiled_file(path: Path) -> None:
    try_files(path, 15)
    try_overrides(path, 120)


@everyday(
    "path",
    STUDIES,
    keep=["attention.yaml"],
    ids=lambda path: path.name,
)
def test_a_spoiled_study(path: Path, tmp_path: Path) -> None:
    try_studies(path, 80, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_file_spoiled_in_many_ways(path: Path) -> None:
    try_files(path, 500)
    try_overrides(path, 2000)


@pytest.mark.slow
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.name)
def test_a_study_spoiled_in_many_ways(path: Path, tmp_path: Path) -> None:
    try_studies(path, 1500, tmp_path)
