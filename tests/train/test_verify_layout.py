"""A layout beside one process: what is compared, and that a wrong gradient is found."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polyad.model.build import build_model, count_parameters
from polyad.model.decoder import DecoderConfig
from polyad.model.smoe.config import SparseMoEConfig
from polyad.train.config.adaptation import model_of
from polyad.train.config.run import RunConfig, load_config
from polyad.train.reading import config_at
from polyad.train.verify_layout import KINDS, small_config, trials_alone
from tests.helpers.decoders import theirs
from tests.helpers.everyday import everyday
from tests.helpers.layouts import compared

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("bert", "decoder", "gpt2", "mixer", "vit")
CONFIGS = sorted(path for folder in FOLDERS for path in (ROOT / "configs" / folder).glob("*.yaml"))
CUT_IN_ALL_WAYS = ("tensor_parallel_size=2", "expert_parallel_size=2", "sequence_parallel=true")
SPARSE = ROOT / "configs" / "gpt2" / "124m-smoe-16.yaml"


def small(path: Path, processes: int, *overrides: str) -> RunConfig:
    return small_config(load_config(path, overrides), processes)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_small_models_are_small_and_of_the_same_kind(path: Path) -> None:
    given = load_config(path, ["train.global_batch_size=512", "train.micro_batch_size=4"])
    sparse = isinstance(given.model.known_feed_forward(), SparseMoEConfig)
    degrees = ["parallel.expert_parallel_size=4"] if sparse else []
    if given.model.kind in ("gpt2", "decoder", "bert"):
        heads = given.model.model_dump()["num_heads"]
        degrees.append(f"parallel.tensor_parallel_size={5 if heads % 2 else 2}")
    both = ["train.global_batch_size=512", "train.micro_batch_size=4", *degrees]
    config = small_config(load_config(path, both), 20 if "=5" in "".join(degrees) else 8)
    assert count_parameters(build_model(config.model)) < 3_000_000
    ours, theirs = config.model.known_feed_forward(), given.model.known_feed_forward()
    assert ours.kind == theirs.kind
    for name in ("graph", "score", "pool", "capacity_factor", "factorization", "gate", "gate_norm"):
        assert getattr(ours, name, None) == getattr(theirs, name, None)
    of_blocks = [config.model.block_feed_forwards(), given.model.block_feed_forwards()]
    kinds = [{each.kind for each in blocks} for blocks in of_blocks]
    assert kinds[0] == kinds[1]
    assert config.model.dropout == 0
    if isinstance(given.model, DecoderConfig):
        small_features, features = map(features_of, (config.model, given.model))
        assert small_features == features


def test_pools_of_a_small_model_have_one_size() -> None:
    # Each process would draw others, and with counts of all another loss than one process has.
    given = ["model.vocab_size=50257", "model.end_of_text_id=50256"]
    config = small(SPARSE.parent / "124m-emo.yaml", 8, *given)
    section: Any = config.model.known_feed_forward()
    least, most = section.pool_bounds()
    assert section.top_k <= least == most < section.num_experts
    assert config.loss.load_balance_counts == "process"


def features_of(model: DecoderConfig) -> dict[str, object]:
    """What layouts treat in their own way, of a model of any size."""
    latent, experts = model.latent_attention, model.feed_forward
    assert isinstance(experts, SparseMoEConfig)
    width = model.num_heads * model.known_head_size()
    return {
        "grouped": latent is None and model.known_key_value_heads() < model.num_heads,
        "one group": model.known_key_value_heads() == 1,
        "wider than the stream": latent is None and width != model.hidden_size,
        "latent": latent is not None,
        "latent queries": latent is not None and latent.query_rank is not None,
        "windows": {model.sliding_window is not None and model.slides(block)
                    for block in range(model.num_layers)},
        "shared": experts.shared_hidden_size is not None,
        "groups of experts": experts.num_groups > 1,
        **{key: getattr(model, key) for key in (
            "attention_sinks", "attention_bias", "mlp_bias", "query_key_norm", "norm",
            "tied_embeddings", "embedding_multiplier", "residual_multiplier", "logits_divisor")},
        "padding": model.pad_id is not None,
    }  # fmt: skip


def test_patterns_that_name_a_block_suit_fewer_blocks(tmp_path: Path) -> None:
    lora = "adapt.lora={rank: 16, targets: [blocks.11.feed_forward.up.input_factor]}"
    start = f"checkpoint.init_from={tmp_path}"
    config = small(ROOT / "configs/gpt2/124m-mumoe-tr.yaml", 2, lora, start)
    adapted = [name for name, _ in model_of(config).named_parameters() if name.endswith("lora.A")]
    assert len(adapted) == 2


def test_losses_of_a_micro_batch_are_left_out_beside_gates_over_all_samples() -> None:
    pairs = "loss.sample_similarity={same: 1.0e-6, different: 0.01}"
    path = ROOT / "configs/mixer/s16-mumoe-cp.yaml"
    assert small(path, 2, pairs).loss.sample_similarity is None
    layer = [f"model.{name}_feed_forward.gate_norm=layer" for name in ("token", "channel")]
    assert small(path, 2, pairs, *layer).loss.sample_similarity is not None


@pytest.mark.distributed
@everyday(
    ("name", "degrees"),
    [
        ("gpt2/124m-smoe-64", ("tensor_parallel_size=2", "expert_parallel_size=2")),
        ("gpt2/124m-mumoe-tr", ("tensor_parallel_size=2", "sequence_parallel=true")),
        ("gpt2/124m", ("zero_stage=3",)),
        ("bert/base", ("tensor_parallel_size=2",)),
        ("mixer/s16-mumoe-cp", ("zero_stage=2",)),
        ("vit/vmoe-b16-attention", ("expert_parallel_size=4",)),
        ("decoder/small", ("tensor_parallel_size=4", "expert_parallel_size=1")),
        ("decoder/olmoe-1b-7b", ("tensor_parallel_size=2", "expert_parallel_size=2")),
        ("decoder/granite-3.1-3b-a800m", ("zero_stage=2", "expert_parallel_size=4")),
        ("decoder/deepseek-v2-lite", CUT_IN_ALL_WAYS),
        ("decoder/gpt-oss-20b", CUT_IN_ALL_WAYS),
    ],
    keep=[],
)
def test_layouts_that_are_right_are_equal(workers, tmp_path, name, degrees):
    keys = [f"parallel.{key}" for key in degrees]
    keys += ["train.global_batch_size=512", "train.micro_batch_size=4", "model.compile=false"]
    config = small(ROOT / "configs" / f"{name}.yaml", 4, *keys)
    ranks = 4 // config.parallel.tensor_parallel_size
    theirs = workers(1).run(trials_alone, config, ranks, tmp_path / "one")[0]
    result = workers(4).run(compared, config, theirs, tmp_path / "four")[0]
    assert {each.kind for each in result} == set(KINDS)
    assert not [each for each in result if each.is_wrong]
    assert max(each.relative for each in result if each.kind == "gradient") < 1e-5
    names = {each.name for each in result if each.kind == "gradient"}
    assert names == {name for name, _ in build_model(config.model).named_parameters()}


def two_beside_one(workers, tmp_path, *overrides: str, **fault: Any) -> list[Any]:
    """What differs where two processes with a fault are compared with one."""
    keys = ["parallel.expert_parallel_size=2", "train.micro_batch_size=4", "model.compile=false"]
    config = small(SPARSE, 2, *keys, "train.global_batch_size=64", *overrides)
    theirs = workers(1).run(trials_alone, config, 2, tmp_path / "one")[0]
    result = workers(2).run(compared, config, theirs, tmp_path / "two", **fault)[0]
    # The loss of the first step is right: it alone would not have told.
    assert not next(each for each in result if each.kind == "loss").is_wrong
    return [each for each in result if each.is_wrong]


@pytest.mark.distributed
@everyday(
    ("part", "factor"),
    [("router", 1.01), ("experts.up", 1.001), ("blocks.1.attention_norm", 0.5)],
    keep=[],
)
def test_a_gradient_that_is_wrong_on_one_process_is_named(workers, tmp_path, part, factor):
    found = two_beside_one(workers, tmp_path, spoiled=part, factor=factor)
    wrong = [each for each in found if each.kind == "gradient"]
    assert wrong
    assert all(part in each.name for each in wrong), wrong
    assert abs(factor - 1) / 4 < wrong[0].relative < abs(factor - 1) * 1.1
    if part == "experts.up":  # rank 1 has the second half of the experts
        assert all(each.expert is not None and each.expert >= 2 for each in wrong)


@pytest.mark.distributed
@everyday(
    ("part", "decay"),
    [("experts.up", 0.0), ("experts.up", 0.1), ("router", 0.0), ("experts.down", 0.1)],
    keep=[("experts.up", 0.0)],
)
def test_weights_that_an_optimizer_does_not_move_are_named(workers, tmp_path, part, decay):
    found = two_beside_one(workers, tmp_path, f"optimizer.weight_decay={decay}", still=part)
    weights = [each for each in found if each.kind == "weight"]
    still = {each.name for each in weights if each.relative == pytest.approx(1, abs=1e-3)}
    assert still  # nothing of the movement is left
    assert all(part in name for name in still), still
    assert "gradient" not in {each.kind for each in found}


def test_a_folder_is_tried_as_a_run_that_goes_on_from_it(tmp_path: Path) -> None:
    theirs("qwen2_moe").save_pretrained(tmp_path)
    given: Any = config_at(tmp_path, ["parallel.tensor_parallel_size=2"], 2)
    assert (given.checkpoint.init_from, given.train.precision) == (str(tmp_path), "bf16")
    model: Any = small_config(given, 2).model
    assert features_of(model) == features_of(given.model)
    assert model.vocab_size != given.model.vocab_size


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("folder", [False, True])
def test_the_command_compares_and_writes_json(tmp_path: Path, folder: bool) -> None:
    """A configuration, or a folder of weights as a run that goes on from it."""
    source, tensor = SPARSE, "parallel.tensor_parallel_size=1"
    keys = [f"run.folder={tmp_path / 'run'}", "parallel.expert_parallel_size=2"]
    keys += ["train.global_batch_size=64", "train.micro_batch_size=4"]
    if folder:
        source, keys = tmp_path / "folder", ["parallel.expert_parallel_size=1"]
        theirs("gpt_oss odd").save_pretrained(source)

    def command(*overrides: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "polyad.launch", "verify-layout", str(source)]
        words += ["--processes", "2", "--json", "-", *overrides]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)

    if folder:
        done = command("parallel.tensor_parallel_size=2")
        assert done.returncode == 2
        assert "2 neither divides model.num_key_value_heads: 3" in done.stderr
    done = command(*keys, tensor)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["equal"], result["expert_parallel_size"]) == (True, 1 if folder else 2)
    assert result["differences"]["gradient"]["compared"] > 10
    assert result["differences"]["weight"]["largest_difference"] < 1e-3
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "--processes: 1"),
        (["--processes", "3", "parallel.expert_parallel_size=2"], "does not divide the 3"),
        (["--processes", "2", "parallel.tensor_parallel_size=5"], "5 does not divide"),
    ],
)
def test_layouts_that_cannot_be_are_one_line(words: list[str], why: str, refused: Any) -> None:
    assert why in refused("verify-layout", SPARSE, *words)
