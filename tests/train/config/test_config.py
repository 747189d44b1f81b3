"""Configuration: precedence, and errors that name the key, the value and what is allowed."""

import re
from pathlib import Path

import pytest

from polyad.parallel.config import LayoutError
from polyad.parallel.source import described_config
from polyad.train.config.rules import refuse_changes, validate
from polyad.train.config.run import data_overrides, load_config, parse_config
from polyad.train.config.text import GONE
from polyad.train.errors import ConfigError
from tests.helpers.refusals import line_of

SMALLEST = """
run: {folder: runs/x}
model: {kind: gpt2, num_layers: 2, hidden_size: 32, num_heads: 4, sequence_length: 16}
data: {path: data/x}
train: {steps: 10, global_batch_size: 8, micro_batch_size: 2}
"""


def parse(*overrides, text=SMALLEST):
    return parse_config(text, overrides, origin="run.yaml")


def error(*overrides, text=SMALLEST):
    return line_of(ConfigError, parse, *overrides, text=text)


def test_old_names_of_values_are_read_in_run_folders_alone(tmp_path):
    old = "model.feed_forward={kind: smoe, num_experts: 4, top_k: 1, combine: normalized}"
    assert "'normalized' is not allowed" in error(old)
    path = tmp_path / "config.yaml"
    path.write_text(parse(old.replace("normalized", "sum_to_one")).to_yaml())
    path.write_text(path.read_text().replace("combine: sum_to_one", "combine: normalized"))
    with pytest.raises(ConfigError, match=r"combine: 'normalized' is not allowed"):
        load_config(path)
    assert described_config(path.read_text(), path).feed_forward.combine == "sum_to_one"
    (tmp_path / "environment.json").touch()
    assert {load_config(each).model.feed_forward.combine for each in (path, tmp_path)} == {
        "sum_to_one"
    }


def test_overrides_win_over_the_file_and_the_file_over_defaults():
    config = parse("train.steps=20", "optimizer.learning_rate=3e-4")
    assert config.train.steps == 20
    assert config.optimizer.learning_rate == 3e-4
    assert config.train.global_batch_size == 8
    assert config.parallel.zero_stage == 1


# A change of one key, and how that key is named.
NAMED = [
    ("model.hiden_size=64", "the nearest is model.hidden_size"),
    ("trian.steps=4", "unknown key trian; the nearest is train"),
    ("model.feed_forward={kind: smoe, num_expert: 3}", "model.feed_forward.num_experts"),
    ("train.learning_rate=1", "unknown key train.learning_rate; the nearest is optimizer.learning"),
    *(
        (f"{key}={value}", f"{key}: ")
        for key, values in {
            "train.steps": ("many", "1.5", "0", "1_000", '"7"', 10**30),
            "train.precision": ("fp16", "some words " * 100),
            "parallel.zero_stage": ("4",),
            "seed": ("true",),
            "model.hidden_size": ("30",),
            "model.kind": ("t5",),
            "model.feed_forward.kind": ("mlp",),
            "optimizer.learning_rate": (".inf", "1e308", "1e-300"),
            "model": ("7",),
            "model.bias": ("yes",),
            "loss.variance": ("0.0",),
            "run.folder": ("", "null", "0012"),
            "loss.sample_similarity.same": ("0",),
            "loss.sample_similarity.different": ("0",),
        }.items()
        for value in values
    ),
    ("model.feed_forward.num_experts=8", "model.feed_forward.num_experts: is a key of another"),
    ("foo=1", "unknown key foo; there are adapt, checkpoint, data"),
    ("model.num_layers.x=1", "num_layers has no keys below it"),
    ("train.steps", "key=value"),
    ("train.steps=[1", "YAML"),
    (f"train.steps={'9' * 5000}", "digits"),
    ('run.folder="a\\0b"', "control character"),
]


@pytest.mark.parametrize(("override", "named"), NAMED)
def test_a_bad_value_is_one_line_that_names_its_key(override, named):
    line = error(override)
    assert named in line
    assert len(line) < 500


def of_file(before, after):
    assert before in SMALLEST
    return SMALLEST.replace(before, after)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (of_file("{folder: runs/x}", "{}"), "run.folder: is missing"),
        ("\n".join(SMALLEST.splitlines()[:-1]), "train: is missing"),
        ("seed: 1" + SMALLEST + "seed: 2\n", "line 6: key 'seed' appears twice"),
        (
            of_file("train: {", "train: &t {") + "data_: {}\n",
            "unknown key data_; the nearest is data",
        ),
        (of_file("{path: data/x}", "{<<: {path: data/y}}"), "line 4: a key must be a string, not"),
        *((text, "run.yaml: ") for text in ("[1, 2]", "just words", "a: [", "\t- x", "[" * 5000)),
    ],
    ids=range(10),
)
def test_a_bad_file_is_one_line(text, said):
    assert said in error(text=text)


@pytest.mark.parametrize(
    "folder", ["12e4b9", "'1234567'", '"0012"', "1_000", "'true'", "2001-01-01", "yes"]
)
def test_a_folder_may_be_called_anything_and_keeps_its_name(folder):
    config, name = parse(f"run.folder={folder}", f"data.path={folder}"), folder.strip("'\"")
    assert (config.run.folder, config.data.path) == (name, name)
    assert parse_config(config.to_yaml(), origin="again") == config
    assert parse(text=SMALLEST.replace("runs/x", folder)).run.folder == name
    mixture = parse(f"data={{mixture: [{{path: {folder}, weight: 1, name: {folder}}}]}}")
    assert mixture.data.mixture[0].path == mixture.data.mixture[0].label == name


def test_batches_that_do_not_divide_are_refused():
    with pytest.raises(LayoutError, match=r"global_batch_size: 8 .*micro_batch_size.*2 x 3 = 6"):
        validate(parse(), 3)
    assert validate(parse(), 2).data_parallel_size == 2


EXPERTS = "model.feed_forward={kind: smoe, num_experts: 4, expert_hidden_size: 32}"
DENSE = "model.feed_forward={kind: dense}"
SMOE = "model.feed_forward={kind: smoe, num_experts: 4, router_noise: 1.0}"
MIXTURE = ("model={kind: mixture, num_classes: 3}", "data={kind: images, path: data/x}")
MUMOE = "model.feed_forward={kind: mumoe, num_experts: [4], rank: 4}"
HEAD = "model.head={kind: mumoe, num_experts: [4], rank: 4}"
VIT = (
    "model={kind: vit, num_layers: 2, hidden_size: 32, num_heads: 4, image_size: 8, patch_size: 4,"
    " num_classes: 3}",
    "data={kind: images, path: data/x}",
)
MICRO = "train.micro_batch_size=2"
SIMILARITY = "loss.sample_similarity={same: 1.0e-6, different: 0.01, of: layer_input}"
FLUCTUATION = ("log.fluctuation=true", "checkpoint.every=2")
MUON = "optimizer.kind=muon"
GRAPH = ("train.cuda_graph=true", "train.precision=bf16")
LOSSES = [
    ["loss.load=0.1"],
    ["loss.sequence_balance=0.1"],
    ["loss.load_balance_over=model", "loss.load_balance=0.1"],
]
# Changes, of which the first has the key that is named; how many processes.
MISFITS = [
    (["schedule.warmup_steps=11", "schedule.decay_steps=10"], 1),
    (["evaluation.stride=17"], 1),
    (["monitor.spike_warmup=600"], 1),
    *(([*losses, DENSE], 1) for losses in LOSSES),
    ([*FLUCTUATION, DENSE], 1),
    ([FLUCTUATION[0], "checkpoint.every=0", EXPERTS], 1),
    (["log.fluctuation_tokens=0", *FLUCTUATION, EXPERTS], 1),
    *(
        (["parallel.tensor_parallel_size=4", *changes], processes)
        for changes, processes in (
            (["model.num_heads=2", "model.hidden_size=6"], 8),
            (["model.num_heads=8"], 6),
            (["model.feed_forward.hidden_size=30"], 8),
        )
    ),
    (["parallel.sequence_parallel=true"], 2),
    (["parallel.sequence_parallel=true", "parallel.tensor_parallel_size=2", *VIT], 2),
    (["parallel.expert_parallel_size=2"], 2),
    (["train.micro_batch_size=1", SIMILARITY, EXPERTS], 2),
    (["loss.sample_similarity.of=input", SIMILARITY, EXPERTS, MICRO], 2),
    *((["loss.sample_similarity", SIMILARITY, *more, DENSE, MICRO], 2) for more in ([], VIT)),
    (["parallel.tensor_parallel_size=2", SIMILARITY, MUMOE, MICRO], 2),
    (["parallel.expert_parallel_size=3", EXPERTS], 6),
    (["parallel.expert_parallel_size=2", EXPERTS], 3),
    (["parallel.expert_parallel_size=4", EXPERTS, "parallel.tensor_parallel_size=2"], 4),
    (["parallel.tensor_parallel_size=2", EXPERTS, "model.feed_forward.expert_hidden_size=9"], 2),
    (
        ["parallel.tensor_parallel_size=2", EXPERTS, "model.feed_forward.placement=2",
         "model.feed_forward.dense_hidden_size=5"],
        2,
    ),
    *(
        ([*GRAPH, *changes], 2)
        for changes in (
            *([EXPERTS], ["train.precision=fp32"], ["model.recompute=block"]),
            *(["adapt.lora={rank: 4}", "checkpoint.init_from=base"], ["parallel.zero_stage=3"]),
            ["parallel.tensor_parallel_size=2"],
            ["model={kind: decoder, hidden_size: 32, num_heads: 4}"],
            [*VIT, "model.feed_forward={kind: mumoe, num_experts: [4], gate_norm: batch}"],
        )
    ),
    *(
        ([change, MUON, "checkpoint.init_from=base"], 2)
        for change in ("parallel.zero_stage=3", "parallel.tensor_parallel_size=2",
                       "adapt.lora={rank: 2}")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "processes"), MISFITS)
def test_keys_that_do_not_fit_each_other_are_one_line(overrides, processes):
    named, *_ = overrides[0].partition("=")
    changes = [each for each in (*overrides[1:], overrides[0]) if "=" in each]
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        validate(
            parse("train.global_batch_size=12", "train.micro_batch_size=1", *changes), processes
        )
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    "overrides",
    [
        *([SMOE, *losses] for losses in LOSSES), [SMOE, *FLUCTUATION], [*MIXTURE, *FLUCTUATION],
        [EXPERTS, SIMILARITY], [EXPERTS, SIMILARITY, "parallel.tensor_parallel_size=2"],
        [MUMOE, SIMILARITY], [*VIT, EXPERTS, SIMILARITY, "loss.sample_similarity.of=input"],
        [*VIT, HEAD, SIMILARITY, "loss.sample_similarity.distance=batch_maximum"],
        ["parallel.sequence_parallel=true", "parallel.tensor_parallel_size=2"],
        ["parallel.sequence_parallel=true", "parallel.tensor_parallel_size=2",
         "model={kind: decoder, hidden_size: 32, num_heads: 4}"],
        GRAPH, [*GRAPH, "model.compile=true", MUMOE], [MUON, "parallel.zero_stage=2"],
    ],
)  # fmt: skip
def test_what_fits_is_allowed(overrides):
    assert validate(parse(*overrides), 2).world_size == 2


@pytest.mark.parametrize(
    ("there", "here", "key"),
    [
        *(
            ("train.steps=10", change, change.partition("=")[0])
            for change in ("seed=2", "model.num_layers=3", "train.global_batch_size=16",
                           "optimizer.kind=sgd", "train.precision=bf16")
        ),
        (EXPERTS, EXPERTS.replace("4", "8"), "num_experts: 4"),
        (MUMOE, MUMOE.replace("}", ", gate: softmax}"), "gate: 'entmax15'"),
    ],
)  # fmt: skip
def test_what_makes_another_run_is_named(tmp_path, there, here, key):
    with pytest.raises(ConfigError, match=key):
        refuse_changes(parse(there), parse(here), tmp_path)


def test_a_run_may_change_other_keys(tmp_path):
    allowed = parse(
        "train.steps=99", "optimizer.learning_rate=1e-3", "schedule.warmup_steps=3", "log.every=5",
        "parallel.zero_stage=3", "train.micro_batch_size=4", "model.recompute=block",
    )  # fmt: skip
    refuse_changes(parse(), allowed, tmp_path)


def test_a_run_goes_on_whatever_its_start_was_scaled_by(tmp_path):
    # Files that do not name the key began runs when its default was another.
    mumoe = "model.feed_forward={kind: mumoe, num_experts: [8], scale_residual_init: %s}"
    refuse_changes(parse(mumoe % "true"), parse(mumoe % "false"), tmp_path)


def test_other_data_stand_in_the_place_of_a_mixture():
    mixture = "data={mixture: [{path: a, weight: 1}, {path: b, weight: 2}]}"
    config = parse(mixture)
    found = parse_config(config.to_yaml(), data_overrides(config, "c"), origin="run.yaml")
    assert (found.data.path, found.data.mixture) == ("c", None)


def test_configurations_that_come_with_polyad_have_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("gpt2").mkdir()
    Path("gpt2/124m.yaml").write_text("run: {folder: mine}\n")
    for name in ("gpt2/124m", "gpt2/355m.yaml", "configs/gpt2/124m.yaml"):
        assert load_config(Path(name)).run.folder.startswith("runs/gpt2-")
    for wrong, said in (
        ("gpt2/124m.yaml", r"^gpt2/124m\.yaml: .* is missing"),  # a file comes first
        ("gpt2/358m", r"^gpt2/358m: .* the nearest is gpt2/355m$"),
        ("vit/../gpt2/124m", "there is no such file"),
        (str(tmp_path / "gpt2" / "125m"), "there is no such file"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config(Path(wrong))


def test_a_key_that_went_is_said_to_be_gone():
    of_runs = {key: what for key, what in GONE.items() if not key.startswith("study.")}
    for key, what in of_runs.items():
        dotted = key if "." in key else f"model.feed_forward.{key}"
        mixture = ["model.kind=mixture"] if "expert.kind" in key or "network.kind" in key else []
        said = f"run.yaml: {dotted}: went with {what}; see CHANGELOG"
        assert error(*mixture, f"{dotted}=1").startswith(said)
