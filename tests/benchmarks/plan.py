"""`plan.py`: predictions of `polyad plan` beside throughputs that others have published.

None of these runs is Polyad's, and no constant of the planner was fitted to them. Their models are
GPT-2's but for what a plan hardly feels (positions, biases); where a feed-forward has three
matrices, ours has two with as many weights.
"""

from pathlib import Path
from typing import Any, NamedTuple

from polyad.launch.command import Json
from polyad.launch.output import align, results
from polyad.parallel.plan.devices import DEVICES
from polyad.train.config.rules import validate
from polyad.train.config.run import RunConfig, load_config
from polyad.train.console import Progress
from polyad.train.forecast.forecast import Machines
from polyad.train.forecast.layouts import tried
from tests.benchmarks.script import benchmark, start

BASE = Path(__file__).resolve().parents[2] / "configs/gpt2/124m.yaml"
LLM_FOUNDRY = "MosaicML, llm-foundry, scripts/train/benchmarking/README.md (FSDP, all sharded)"
MEGATRON = "Narayanan et al. 2021, Efficient Large-Scale Language Model Training, table 1"
OLMO = "Allen AI, OLMo-core 1.2, README (its number of GPUs is not given: 64 are taken)"
LLM_C_SMALL = "Karpathy 2024, llm.c discussion 481: 10B tokens in about 90 minutes"
LLM_C_LARGE = "Karpathy 2024, llm.c discussion 677: 32,000 steps of 2^20 tokens in about 24 hours"


class Published(NamedTuple):
    """A run of others."""

    name: str
    source: str
    device: str
    gpus: int
    rate: float
    """Tokens a second of one GPU."""
    shape: tuple[int, int, int]
    """Blocks, width, heads."""
    length: int
    """Tokens of a sequence."""
    micro_batch: int
    accumulation: int
    others: tuple[str, ...] = ()
    """Further keys."""


_SHARDED = ("parallel.zero_stage=3", "model.compile=false")


def _mpt(
    name: str, device: str, gpus: int, rate: float, length: int, micro: int, accumulated: int
) -> Published:
    """A row of llm-foundry's tables that recomputes nothing."""
    shapes = {
        "125M": (12, 768, 12),
        "350M": (24, 1024, 16),
        "760M": (24, 1536, 12),
        "1B": (24, 2048, 16),
        "3B": (32, 2560, 20),
        "7B": (32, 4096, 32),
        "13B": (40, 5120, 40),
    }
    others = (*_SHARDED, "model.vocab_size=50368")
    return Published(
        f"MPT {name}", LLM_FOUNDRY, device, gpus, rate, shapes[name], length, micro, accumulated,
        others,
    )  # fmt: skip


def _megatron(
    name: str, gpus: int, teraflops: float, shape: tuple[int, int, int], cut: int, samples: int
) -> Published:
    """A row of Megatron's table that needs no pipeline; its FLOPs count the recomputation."""
    layers, width, _ = shape
    per_token = 96 * layers * width**2 * (1 + 2048 / (6 * width) + 51200 / (16 * layers * width))
    micro = 4
    return Published(
        f"GPT {name}", MEGATRON, "a100-80gb", gpus, teraflops * 1e12 / per_token, shape, 2048,
        micro, samples * cut // gpus // micro,
        (
            "model.recompute=block", f"parallel.tensor_parallel_size={cut}",
            "model.vocab_size=51200", "model.compile=false", "parallel.zero_stage=1",
        ),
    )  # fmt: skip


_LLM_C = ("parallel.zero_stage=1", "model.vocab_size=50304", "model.bias=true")
_OLMO = (*_SHARDED, "model.vocab_size=100352", "model.tied_embeddings=false")
PUBLISHED = (
    Published(
        "GPT-2 124M", LLM_C_SMALL, "a100-80gb", 8, 10e9 / 5400 / 8, (12, 768, 12), 1024, 64, 1,
        _LLM_C,
    ),
    Published(
        "GPT-2 1558M", LLM_C_LARGE, "h100", 8, 32_000 * 2**20 / 86_400 / 8, (48, 1600, 25), 1024,
        16, 8, _LLM_C,
    ),
    _mpt("125M", "a100-80gb", 8, 156_468, 1024, 64, 2),
    _mpt("350M", "a100-80gb", 8, 64_813, 1024, 64, 2),
    _mpt("760M", "a100-80gb", 8, 32_434, 2048, 24, 2),
    _mpt("1B", "a100-80gb", 8, 20_513, 2048, 14, 4),
    _mpt("3B", "a100-80gb", 8, 10_811, 2048, 10, 2),
    _mpt("7B", "a100-80gb", 8, 4_641, 2048, 6, 2),
    _mpt("13B", "a100-80gb", 8, 2_262, 2048, 2, 3),
    _mpt("760M", "h100", 8, 78_581, 1024, 48, 2),
    _mpt("1B", "h100", 8, 45_455, 2048, 14, 1),
    _mpt("1B", "h100", 64, 44_402, 2048, 20, 1),
    _mpt("3B", "h100", 16, 24_142, 2048, 10, 3),
    _mpt("7B", "h100", 8, 10_643, 2048, 6, 1),
    _mpt("13B", "h100", 8, 4_792, 2048, 2, 1),
    _mpt("13B", "h100", 64, 4_800, 2048, 2, 1),
    _megatron("1.7B", 32, 137, (24, 2304, 24), 1, 512),
    _megatron("3.6B", 64, 138, (30, 3072, 32), 2, 512),
    _megatron("7.5B", 128, 142, (36, 4096, 32), 4, 512),
    _megatron("18B", 256, 135, (40, 6144, 48), 8, 1024),
    Published(
        "OLMo 1B", OLMO, "h100", 64, 46_000, (16, 2048, 16), 4096, 4, 1,
        (*_OLMO, "model.feed_forward.hidden_size=12288"),
    ),
    Published(
        "OLMo 7B", OLMO, "h100", 64, 9_850, (32, 4096, 32), 4096, 2, 1,
        (*_OLMO, "model.feed_forward.hidden_size=16512"),
    ),
)  # fmt: skip
"""Of each source the runs whose layout Polyad has."""


def configuration(run: Published) -> RunConfig:
    """The run as a configuration of Polyad's."""
    layers, width, heads = run.shape
    cut = next((int(o.partition("=")[2]) for o in run.others if "tensor_parallel" in o), 1)
    samples = run.micro_batch * run.accumulation * run.gpus // cut
    keys = [
        f"model.num_layers={layers}",
        f"model.hidden_size={width}",
        f"model.num_heads={heads}",
        f"model.sequence_length={run.length}",
        f"train.micro_batch_size={run.micro_batch}",
        f"train.global_batch_size={samples}",
    ]
    return load_config(BASE, [*keys, *run.others])


def bench_plan() -> dict[str, Any]:
    """Predicts each run.

    Returns:
        JSON values: a row for each, with `published` and `predicted` (tokens a second of a GPU),
        `off_by`, and `memory_bytes`.
    """
    told = Progress("runs", len(PUBLISHED), "run")
    rows, errors = [], []
    for number, run in enumerate(PUBLISHED):
        config = configuration(run)
        place = min(run.gpus, 8)
        machines = Machines(
            device=DEVICES[run.device], nodes=run.gpus // place, processes_per_node=place
        )
        layout = tried(config, validate(config, run.gpus), (), machines, 1.0)
        tokens = config.train.global_batch_size * run.length
        predicted = tokens / layout.seconds / run.gpus
        errors.append(predicted / run.rate - 1)
        rows.append(
            {
                "run": run.name,
                "source": run.source,
                "device": run.device,
                "gpus": run.gpus,
                "published": run.rate,
                "predicted": predicted,
                "off_by": errors[-1],
                "memory_bytes": layout.memory,
            }
        )
        told((number + 1) / len(PUBLISHED))
    off = sorted(abs(each) for each in errors)
    return {"rows": rows, "median_off_by": off[len(off) // 2], "largest_off_by": off[-1]}


def plan_table(result: dict[str, Any]) -> str:
    """The predictions for a person."""
    lines: list[tuple[str, ...]] = [
        ("run", "device", "GPUs", "published", "predicted", "", "source")
    ]
    lines += [
        (
            row["run"],
            row["device"],
            str(row["gpus"]),
            f"{row['published']:,.0f}",
            f"{row['predicted']:,.0f}",
            f"{row['off_by']:+.0%}",
            row["source"].partition(",")[0],
        )
        for row in result["rows"]
    ]
    median, largest = result["median_off_by"], result["largest_off_by"]
    note = f"tokens a second of a GPU; off by {median:.0%} (median), {largest:.0%} at most"
    return f"{align(lines)}\n{note}"


@benchmark("plan", "--json plan.json")
def plan(*, json: Json = None) -> None:
    """Compares predictions of `polyad plan` with published throughputs."""
    with results(json) as show:
        result = bench_plan()
        show(result, plan_table(result))


if __name__ == "__main__":
    start(plan)
