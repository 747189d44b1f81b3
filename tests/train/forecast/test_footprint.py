"""A step on shapes alone exchanges and holds what real processes do."""

from pathlib import Path

import pytest

from polyad.parallel.plan.devices import DEVICES
from polyad.parallel.plan.traffic import Amount
from polyad.train.config.rules import validate
from polyad.train.config.run import load_config
from polyad.train.forecast.forecast import Machines, predicted_time, with_libraries
from polyad.train.forecast.layouts import tried
from polyad.train.forecast.step import footprint
from polyad.train.layout.small import small_config
from polyad.train.tasks.random_input import flops_of_unit, random_batch, training_flops
from tests.helpers.everyday import everyday
from tests.helpers.footprints import measured_rise, save_start, second_step

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("no_process_group")]


def vocabulary_of(file: str) -> tuple[str, ...]:
    """What the data would decide, and no compiler."""
    if file.startswith("decoder") and "small" not in file:
        return ("model.compile=false",)  # these say their vocabulary
    is_text = file.startswith(("bert", "decoder", "gpt2", "wikitext103"))
    decided = "model.vocab_size=61" if is_text else "model.num_classes=11"
    return decided, "model.compile=false"


KINDS = ("cp", "tr")
CUT_IN_ALL_WAYS = (
    "parallel.tensor_parallel_size=2",
    "parallel.expert_parallel_size=2",
    "parallel.sequence_parallel=true",
)
LAYOUTS = [
    *(("gpt2/124m.yaml", 2, (f"parallel.zero_stage={stage}",)) for stage in range(4)),
    ("gpt2/124m.yaml", 4, ("parallel.tensor_parallel_size=2",)),
    ("gpt2/124m.yaml", 2, ("parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true")),
    ("gpt2/124m-smoe-16.yaml", 4, ("parallel.expert_parallel_size=2",)),
    (
        "gpt2/124m-smoe-16.yaml",
        4,
        ("parallel.expert_parallel_size=2", "parallel.tensor_parallel_size=2"),
    ),
    ("gpt2/124m-smoe-16.yaml", 2, ("parallel.expert_parallel_size=2",)),
    *((f"gpt2/124m-mumoe-{kind}.yaml", 2, ("parallel.tensor_parallel_size=2",)) for kind in KINDS),
    ("gpt2/124m-mumoe-cp.yaml", 2, ("parallel.zero_stage=3",)),
    ("wikitext103/smoe-medium-attention.yaml", 2, ("parallel.tensor_parallel_size=2",)),
    ("bert/base.yaml", 4, ("parallel.tensor_parallel_size=2",)),
    ("mixer/s16-mumoe-cp-64x2.yaml", 2, ()),
    ("mixer/s16.yaml", 4, ("parallel.tensor_parallel_size=2",)),
    ("vit/vmoe-s32.yaml", 2, ("parallel.expert_parallel_size=2",)),
    ("vit/b16.yaml", 2, ("parallel.zero_stage=2",)),
    (
        "gpt2/124m-smoe-16.yaml",
        2,
        (
            "adapt.lora={rank: 8, experts: true}",
            "checkpoint.init_from=base",
            "parallel.expert_parallel_size=2",
        ),
    ),
    # Two heads of keys for four processes; latent attention with shared experts; sinks and windows.
    (
        "decoder/small.yaml",
        4,
        ("parallel.tensor_parallel_size=4", "parallel.expert_parallel_size=1"),
    ),
    ("decoder/deepseek-v2-lite.yaml", 4, CUT_IN_ALL_WAYS),
    ("decoder/gpt-oss-20b.yaml", 4, CUT_IN_ALL_WAYS),
    ("decoder/olmoe-1b-7b.yaml", 2, ("parallel.expert_parallel_size=2", "parallel.zero_stage=2")),
    ("decoder/olmoe-1b-7b.yaml", 4, ("parallel.expert_parallel_size=2", "parallel.zero_stage=3")),
    ("decoder/deepseek-v2-lite.yaml", 4, (*CUT_IN_ALL_WAYS, "parallel.zero_stage=3")),
    ("gpt2/124m-smoe-16.yaml", 2, ("parallel.expert_parallel_size=2", "parallel.zero_stage=3")),
]
EVERYDAY = [
    ("gpt2/124m.yaml", 2, ("parallel.zero_stage=3",)),
    (
        "gpt2/124m-smoe-16.yaml",
        4,
        ("parallel.expert_parallel_size=2", "parallel.tensor_parallel_size=2"),
    ),
]


@everyday(("file", "processes", "overrides"), LAYOUTS, EVERYDAY)
@everyday("precision", ["bf16", "fp32"], keep=["bf16"])
def test_exchanges_and_state_are_those_of_real_processes(
    workers, file, processes, overrides, precision
):
    given = load_config(Path("configs") / file, [*vocabulary_of(file), *overrides])
    config = small_config(given, processes)
    train = config.train.model_copy(update={"precision": precision})
    config = config.model_copy(update={"train": train})
    planned = footprint(config, validate(config, processes))
    found = workers(processes).run(second_step, config)
    total = {}
    for exchanges, held in found:
        for key, amount in exchanges.items():
            total[key] = total.get(key, Amount()) + amount
        assert held == {kind: planned.between_steps[kind] for kind in held}
    assert "experts" not in planned.between_steps
    wanted = {key: amount.times(processes) for key, amount in planned.exchanges.items()}
    if file.startswith("vit/vmoe"):  # a capacity drops rows, and how many is not known before
        for key in wanted:
            if key.kind == "all-to-all" and key.precision != "int64":
                assert 0.8 * wanted[key].payload < total[key].payload <= wanted[key].payload
                total[key] = wanted[key]
    assert total == wanted


SIZES = (
    ("hidden_size=64", "num_heads=2", "num_layers=3", 2),
    ("hidden_size=192", "num_heads=3", "num_layers=4", 6),
)


@everyday(
    ("precision", "size"), [("bf16", 0), ("fp32", 0), ("fp32", 1), ("bf16", 1)], keep=[("bf16", 0)]
)
@everyday(
    "file",
    [
        "gpt2/124m.yaml",
        "gpt2/124m-mumoe-cp.yaml",
        "gpt2/124m-mumoe-tr.yaml",
        "gpt2/124m-smoe-16.yaml",
        "wikitext103/smoe-medium-similarity.yaml",
        "wikitext103/smoe-medium-attention.yaml",
        "bert/base.yaml",
        "mixer/s16.yaml",
        "mixer/s16-mumoe-cp-64x2.yaml",
        "vit/b16.yaml",
        "vit/vmoe-s32.yaml",
    ],
    keep=["gpt2/124m-mumoe-tr.yaml"],
)
def test_the_peak_of_a_step_is_the_measured_one(workers, file, size, precision):
    width, heads, layers, micro = SIZES[size]
    sizes = [f"model.{width}", f"model.{layers}", f"train.micro_batch_size={micro}"]
    sizes += [f"train.global_batch_size={2 * micro}"]
    if "smoe" in file or "vmoe" in file:
        sizes.append("parallel.expert_parallel_size=1")
    if "vmoe" in file:
        sizes.append("model.feed_forward.placement=2")
    if "mixer" not in file:
        sizes.append(f"model.{heads}")
    if "vit" not in file and "mixer" not in file:
        sizes += ["model.sequence_length=192"]
    config = load_config(Path("configs") / file, [*vocabulary_of(file), *sizes])
    train = config.train.model_copy(update={"precision": precision})
    config = config.model_copy(update={"train": train})
    planned = footprint(config, validate(config, 1))
    rise = sum(planned.memory.values()) - sum(planned.between_steps.values())
    (measured,) = workers(1).run(measured_rise, config)
    assert rise == pytest.approx(measured, rel=0.1)


DECODER = (
    *("model.hidden_size=128", "model.num_layers=3", "model.sequence_length=192"),
    *("model.vocab_size=61", "model.feed_forward.num_experts=8", "model.feed_forward.top_k=2"),
    *("model.feed_forward.expert_hidden_size=96", "train.micro_batch_size=3"),
    *("train.global_batch_size=6", "parallel.expert_parallel_size=1", "model.num_heads=4"),
)
HEADS = ("model.head_size=48", "model.num_key_value_heads=2")
LATENT = "{key_value_rank: 48, plain_size: 32, rotated_size: 16, value_size: 40}"


@everyday(
    ("file", "more"),
    [
        ("olmoe-1b-7b", (*HEADS, "model.recompute=none")),
        ("granite-3.1-3b-a800m", (*HEADS, "model.recompute=block")),
        (
            "deepseek-v2-lite",
            (
                f"model.latent_attention={LATENT}",
                "model.feed_forward.placement=[1, 2]",
                "model.feed_forward.dense_hidden_size=300",
                "model.feed_forward.shared_hidden_size=192",
                "model.recompute=none",
            ),
        ),
        (
            "gpt-oss-20b",
            (
                *HEADS,
                "model.sliding_window_blocks=[0, 2]",
                "model.pad_id=60",
                "model.recompute=none",
            ),
        ),
    ],
    keep=["deepseek-v2-lite"],
    ids=lambda case: case[0],
)
@everyday("precision", ["bf16", "fp32"], keep=["bf16"])
def test_the_peak_of_a_step_of_a_decoder_is_the_measured_one(workers, file, more, precision):
    keys = [*DECODER, *more, f"train.precision={precision}"]
    config = load_config(Path("configs/decoder") / f"{file}.yaml", keys)
    planned = footprint(config, validate(config, 1))
    rise = sum(planned.memory.values()) - sum(planned.between_steps.values())
    (measured,) = workers(1).run(measured_rise, config)
    assert rise == pytest.approx(measured, rel=0.1)


@everyday("precision", ["bf16", "fp32"], keep=["bf16"])
@pytest.mark.slow
def test_a_teacher_takes_its_weights_and_what_it_computes(workers, tmp_path, precision):
    words = [*vocabulary_of("gpt2/124m.yaml"), "model.num_layers=2", "model.sequence_length=64"]
    words += ["model.hidden_size=64", "model.num_heads=2", f"train.precision={precision}"]
    words += ["train.micro_batch_size=2", "train.global_batch_size=4"]
    alone = load_config(Path("configs/gpt2/124m.yaml"), words)
    larger = load_config(Path("configs/gpt2/124m.yaml"), [*words, "model.num_layers=12"])
    workers(1).run(save_start, larger, tmp_path / "teacher")
    taught = load_config(
        Path("configs/gpt2/124m.yaml"), [*words, f"distill.teacher={tmp_path / 'teacher'}"]
    )
    dims = validate(alone, 1)
    planned, without = footprint(taught, dims), footprint(alone, dims)
    parameters = footprint(larger, dims).parameters
    assert planned.parameters == without.parameters
    assert planned.memory["teacher"] == parameters * (2 if precision == "bf16" else 4)
    rise = sum(planned.memory.values()) - sum(planned.between_steps.values())
    (measured,) = workers(1).run(measured_rise, taught)
    assert rise == pytest.approx(measured, rel=0.1)
    assert flops(planned) - flops(without) > 2 * 4 * 64 * parameters  # 4 samples of 64 tokens


def flops(planned):
    """What a step computes."""
    return sum(work.flops * times for work, times in planned.work)


def test_a_sample_of_choices_is_as_many_sequences_of_the_longest_length():
    file = Path("configs/finetune/bert-base-sst2.yaml")
    words = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2"]
    words += ["model.vocab_size=61", "model.head.num_classes=1", "data.task=multiple_choice"]
    words += ["train.global_batch_size=12", "data.columns={choices: [a, b, c]}"]
    config = load_config(file, [*words, "train.micro_batch_size=2"])
    assert random_batch(config.model, [0, 1], config.data).inputs.shape == (6, 128)
    assert config.model.sequence_length == 512
    single = config.data.model_copy(update={"columns": None, "task": "classification"})
    train = config.train.model_copy(update={"global_batch_size": 36, "micro_batch_size": 6})
    as_single = config.model_copy(update={"data": single, "train": train})
    ours, theirs = (footprint(each, validate(each, 1)) for each in (config, as_single))
    assert ours.memory == theirs.memory
    assert flops(ours) == flops(theirs)
    per_sample = flops_of_unit(config.model, config.data)
    assert per_sample == training_flops(config.model, 3, 128)


@pytest.mark.slow
def test_of_a_k_that_grows_the_last_takes_the_memory_and_the_middle_one_the_time():
    file = Path("configs/gpt2/124m-smoe-16.yaml")
    words = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2"]
    words += ["model.vocab_size=61", "model.sequence_length=64", "train.micro_batch_size=2"]
    words += ["train.global_batch_size=4", "parallel.expert_parallel_size=1"]

    def planned(**options):
        keys = [f"model.feed_forward.{key}={value}" for key, value in options.items()]
        config = load_config(file, [*words, *keys])
        return config, footprint(config, validate(config, 1))

    # Of K = 2, 3, 4, 5, 6 the fourth is used from 3/5 of a run on, the third in its middle.
    config, growing = planned(top_k=2, final_top_k=6)
    last, middle = planned(top_k=6)[1], planned(top_k=4)[1]
    buffers = growing.memory["weights"] - last.memory["weights"]
    assert 0 < buffers <= 64  # the present K
    same = {kind: size for kind, size in last.memory.items() if kind != "weights"}
    assert {kind: growing.memory[kind] for kind in same} == same
    assert flops(growing) == flops(middle)
    assert flops_of_unit(config.model) == flops_of_unit(planned(top_k=4)[0].model)


@pytest.mark.slow
def test_a_layout_of_a_mixer_whose_experts_are_in_named_blocks_of_one_section():
    words = ["model.num_classes=11", "model.num_layers=8", "model.hidden_size=32"]
    words += ["model.image_size=16", "model.patch_size=8", "train.micro_batch_size=2"]
    words += ["model.token_feed_forward={kind: mumoe, num_experts: [4], rank: 4}"]
    named = "{kind: smoe, num_experts: 4, top_k: 1, expert_hidden_size: 8, placement: [5, 7]}"
    words += [f"model.channel_feed_forward={named}", "train.global_batch_size=4"]
    config = load_config(Path("configs/mixer/s16.yaml"), words)
    dims = validate(config, 1)
    machines = Machines(device=DEVICES["h100"], nodes=1, processes_per_node=1)
    layout = tried(config, dims, (), machines, 1.0)
    whole = with_libraries(footprint(config, dims, on_gpu=True).memory, machines.device)
    assert layout.memory == sum(whole.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "more"),
    [
        # The first block is dense; the others are alike.
        (
            "deepseek-v2-lite",
            (
                f"model.latent_attention={LATENT}",
                "model.num_layers=8",
                "model.feed_forward.placement=[1, 2, 3, 4, 5, 6, 7]",
            ),
        ),
        # Every second block has a window.
        (
            "gpt-oss-20b",
            (
                *HEADS,
                "model.num_layers=12",
                "model.pad_id=60",
                "model.sliding_window_blocks=[0, 2, 4, 6, 8, 10]",
            ),
        ),
    ],
    ids=["deepseek", "gpt-oss"],
)
def test_a_layout_of_listed_blocks_that_repeat_follows_from_few_of_them(file, more):
    config = load_config(Path("configs/decoder") / f"{file}.yaml", [*DECODER, *more])
    dims = validate(config, 1)
    machines = Machines(device=DEVICES["h100"], nodes=1, processes_per_node=1)
    layout = tried(config, dims, (), machines, 1.0)
    found = footprint(config, dims, on_gpu=True)
    whole = sum(with_libraries(found.memory, machines.device).values())
    assert layout.memory == pytest.approx(whole, rel=0.01)
    spent = predicted_time(config, dims, machines, found)
    assert layout.seconds == pytest.approx(spent.total, rel=0.02)
