"""Commands that a reader is told to type can be typed, in the order in which they stand."""

import re
from pathlib import Path

import pytest

from polyad.launch.command import UsageError
from polyad.launch.commands import COMMANDS
from polyad.train.config.adaptation import model_of
from polyad.train.config.rules import validate
from polyad.train.config.run import load_config, shipped_configs
from polyad.train.describe import check_without_data
from tests.helpers.written import (
    BENCHMARK,
    PAGES,
    ROOT,
    World,
    Written,
    commands_of_config,
    documents,
    from_data,
    help_commands,
    inline_commands,
    parsed,
    parser_of,
    polyad_words,
)

SEQUENCES = {"documents": documents(), **help_commands()}
NO_COMMANDS = ("COMMAND", "help", "--help", "--version", "cp", "tr")
"""What stands behind `polyad` in a text and is no command: the last two are rows of a table."""
GROUPS = {name.rpartition(" ")[0] for name in COMMANDS if " " in name}
CONFIGS = shipped_configs()


@pytest.mark.parametrize("name", SEQUENCES)
def test_every_path_of_a_command_was_made_by_one_before_it(name: str) -> None:
    world = World()
    for command in SEQUENCES[name]:
        try:
            world.follow(command)
        except (AssertionError, ValueError) as error:
            pytest.fail(f"{command}\n{error}")


def test_commands_are_found_wherever_they_stand() -> None:
    assert len(SEQUENCES["documents"]) > 30
    assert len(SEQUENCES["polyad COMMAND --help"]) > 30
    places = list(dict.fromkeys(command.place for command in SEQUENCES["documents"]))
    pages = [page for page in PAGES if page in places]
    assert len(pages) > 10
    assert places[: len(pages) + 1] == ["README.md", *pages]
    assert "BENCHMARKS.md" in places


@pytest.mark.parametrize(
    ("commands", "words"),
    [
        (["polyad convert gpt2 x --to polyad"], "gpt2: no command before"),
        (["polyad train configs/quickstart/gpt2.yaml"], "runs/quickstart/data: no command before"),
        (["make quickstart", "polyad evaluate runs/quickstart/dense"], "runs/quickstart/dense"),
        (
            ["make quickstart", "polyad report runs/quickstart/run/checkpoints/step-00000150"],
            "step-00000150: no command before",
        ),
        (["tensorboard --logdir runs/two/tensorboard"], "runs/two/tensorboard: no command before"),
        (["polyad generate x"], "--prompt"),
        (["make quickstart", "make quickstart"], "runs/quickstart/data is there"),
    ],
)
def test_what_nothing_made_is_found(commands: list[str], words: str) -> None:
    world = World()
    for text in commands[:-1]:
        world.follow(Written("here", text))
    with pytest.raises((AssertionError, UsageError), match=re.escape(words)):
        world.follow(Written("here", commands[-1]))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_of_a_configuration_s_head_are_of_this_file(path: Path) -> None:
    own = str(path.relative_to(ROOT))
    started = []
    for command in commands_of_config(path):
        words = polyad_words(command.words)
        if words is not None:
            _, _, options = parsed(words)
            started += [str(vars(options).get(key)) for key in ("config", "study")]
    assert own in started
    assert set(started) <= {own, "None"}


def test_runs_that_are_written_down_are_valid() -> None:
    checked = set()
    for command in (one for commands in SEQUENCES.values() for one in commands):
        words = polyad_words(command.words)
        if words is None or words[0] not in ("train", "launch"):
            continue
        name, _, options = parsed(words)
        processes = 1
        if name == "launch":
            processes = (options.nodes or 1) * options.processes_per_node
        for option in ("--nnodes", "--nproc-per-node"):  # of torchrun
            if option in command.words:
                processes *= int(command.words[command.words.index(option) + 1])
        path = ROOT / options.config
        given = [*from_data(path, 8192), *options.overrides]
        if (case := (path, processes, *given)) in checked:
            continue
        # Nothing is opened: neither the data nor the weights that a command before makes.
        try:
            config = load_config(path, given)
            validate(config, processes)
            check_without_data(config)
            model_of(config)
        except ValueError as error:
            pytest.fail(f"{command}\n{error}")
        checked.add(case)
    assert len(checked) > 5


def test_options_that_are_mentioned_exist() -> None:
    known = 0
    for command in inline_commands():
        if command.place == "CHANGELOG.md":  # which names what has gone, too
            continue
        words = polyad_words(re.sub(r"[()\[\]|,]", " ", command.text).split()) or []
        if words[0] in NO_COMMANDS or " ".join(words) in GROUPS:
            continue
        _, parser, rest = parser_of(words)
        options = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert options <= parser._option_string_actions.keys(), str(command)
        known += len(options)
    assert known > 10


def test_measurements_name_commands_that_can_be_typed() -> None:
    found = [polyad_words(one.words) for one in inline_commands() if "..." not in one.text]
    measured = [words for words in found if words and words[0].startswith(BENCHMARK)]
    for words in measured:
        parsed(words)
    assert len(measured) > 10
