"""Where the time of a step on a GPU goes, in nine minutes: `make gpu-speed`, or a part of it:

    make gpu-speed ONLY="dense smoe"

Parts stand in the order of what they decide per second; each has a limit, at which it is cut and
what it has written so far is kept. OUT (./gpu-speed) holds `result.json` after each part, with the
kernels that took most of every traced step. Runs of one group share a process and its compiled
programs. They differ by keys of the configuration, as the forms that were replaced have no switch
in the product: micro-batches, precision of the router, recomputation, CUDA graphs; and by
Inductor's own TORCHINDUCTOR_MAX_AUTOTUNE_GEMM. Tokens of a step are equal, so losses of the first
steps are too; `compared` has their largest difference. The first run of all is repeated last: its
drift is the error bar of every ratio.

`--tiny` runs all but steps beside others' on a CPU in small sizes; what needs CUDA says so.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.gpu import check
from tests.gpu.check import Part, data, options, rates_of, run_of, visit

NEEDS_CUDA = "needs CUDA"
STEPS = 14
"""Steps of a run. The last but one is traced; medians are over those before it, from the fourth."""


class Trial(NamedTuple):
    """A training run."""

    config: str
    keys: tuple[str, ...]
    needs_cuda: bool = False


def _batches(micro: int, number: int) -> tuple[str, ...]:
    return (f"train.micro_batch_size={micro}", f"train.global_batch_size={micro * number}")


DENSE = "configs/gpt2/124m.yaml"
SPARSE = "configs/gpt2/124m-smoe-16.yaml"
FACTORIZED = "configs/gpt2/124m-mumoe-cp.yaml"
OLMOE = "configs/decoder/olmoe-1b-7b.yaml"
LARGE, SMALL = _batches(60, 4), _batches(12, 20)
FEW_BLOCKS = ("model.num_layers=2", *_batches(3, 4))
LEVELS = ("model.feed_forward.num_experts=[32,64]", "model.feed_forward.level_std=0.1")
GROUPS = {
    "dense": {
        "gpt2": Trial(DENSE, LARGE),
        "gpt2-12": Trial(DENSE, SMALL),
        "gpt2-graphs": Trial(DENSE, (*LARGE, "train.cuda_graph=true"), needs_cuda=True),
        "gpt2-one": Trial(DENSE, _batches(60, 1)),  # as on each of 8 GPUs
    },
    "smoe": {
        "smoe": Trial(SPARSE, LARGE),
        "smoe-12": Trial(SPARSE, SMALL),
        "smoe-bf16": Trial(SPARSE, (*LARGE, "model.feed_forward.router_dtype=model")),
        "smoe-one": Trial(SPARSE, _batches(60, 1)),
    },
    "mumoe": {"mumoe": Trial(FACTORIZED, LARGE), "mumoe-2048": Trial(FACTORIZED, LARGE + LEVELS)},
    "olmoe": {
        "olmoe": Trial(OLMOE, FEW_BLOCKS),
        "olmoe-recompute": Trial(OLMOE, (*FEW_BLOCKS, "model.recompute=block")),
    },
    "autotuned": {"gpt2-autotuned": Trial(DENSE, LARGE, needs_cuda=True)},
    "again": {"gpt2-again": Trial(DENSE, LARGE)},
}
"""Runs by part and name; the first of a part is what its others are compared with."""
BASES = {name: next(iter(trials)) for trials in GROUPS.values() for name in trials}
BASES |= {"gpt2-autotuned": "gpt2", "gpt2-again": "gpt2", "smoe": "gpt2", "mumoe": "gpt2"}
TINY = {
    DENSE: (),
    SPARSE: ("model.feed_forward.expert_hidden_size=32",),
    FACTORIZED: ("model.feed_forward.rank=8",),
    OLMOE: (
        "model.num_key_value_heads=2", "model.head_size=16", "model.feed_forward.num_experts=8",
        "model.feed_forward.expert_hidden_size=32", "model.feed_forward.top_k=2",
    ),
}  # fmt: skip
"""Keys of small models, beside those that all have."""


def keys_of(name: str, trial: Trial, work: Path, tiny: bool) -> list[str]:
    """The keys of a run over its configuration.

    Args:
        name: Of the run.
        trial: What it is.
        work: The folder with `data`, in which the run gets its own.
        tiny: Whether the model and its batches are small.
    """
    keys = [f"run.folder={work / name}", f"data.path={work / 'data'}", "model.vocab_size=50304"]
    steps = 6 if tiny else STEPS
    keys += ["checkpoint.every=0", f"train.steps={steps}", "schedule.warmup_steps=2"]
    keys += [f"log.profile.first_step={steps - 1}", "log.profile.num_steps=1"]
    keys += ["parallel.expert_parallel_size=1", *trial.keys]
    if tiny:
        keys += ["data.num_workers=0"]
        keys += ["model.hidden_size=32", "model.num_heads=2", "model.sequence_length=64"]
        keys += ["model.num_layers=2", "model.vocab_size=1024", "model.compile=false"]
        keys += [*TINY[trial.config], *_batches(2, 2)]
    return keys


def parts(work: Path, tiny: bool) -> Iterator[Part]:
    """All parts in their order; see `check.parts`. Small ones have ten times as long."""
    for part in _parts(work, tiny):
        yield part._replace(limit=10 * part.limit) if tiny else part


def _parts(work: Path, tiny: bool) -> Iterator[Part]:
    few = ("--tiny",) if tiny else ()

    def measure(name: str, limit: int, **variables: str) -> Part:
        place = work if name in GROUPS else work / f"{name}.json"
        words = ("-m", "tests.gpu.measures", name, str(place), *few)
        return Part(name, limit, words, variables=variables, reserved=name == "again")

    def beside(name: str, limit: int, script: str, *words: str) -> Part:
        shape = ("--device", "cpu" if tiny else "cuda", "--precision", "bf16")
        words = (*words, *shape, "--json", str(work / f"{name}.json"))
        if tiny:
            words += ("--tokens", "64", "--width", "64", "--hidden", "64", "--experts", "8")
            words += ("--repeats", "1", "--threads", "1")
        return Part(name, limit, ("-m", f"tests.benchmarks.{script}", *words))

    def step(peer: str) -> Iterator[Part]:
        if not tiny:  # a test of BENCHMARKS.md takes it on a CPU
            words = ("--peer", peer, "--batch-size", "60", "--compile")
            yield beside(f"step-{peer}", 90, "step", *words)

    yield data(work, tiny)
    yield measure("card", 30)
    yield measure("dense", 150)
    yield measure("smoe", 150)
    yield from step("nanogpt")
    yield measure("head", 45)
    yield measure("parts", 40)
    yield measure("mumoe", 90)
    wide = ("--tokens", "12288", "--width", "768")
    experts = ("--experts", "16", "64", "--hidden", "1536", "--load", "uniform")
    yield beside("layer-smoe", 50, "layer", *wide, *experts)
    yield measure("olmoe", 90)
    experts = ("--experts", "64", "--top-k", "8", "--hidden", "1024", "--load", "uniform")
    shape = ("--kind", "swiglu", "--tokens", "16384", "--width", "2048", *experts)
    yield beside("layer-olmoe", 50, "layer", *shape)
    yield beside("layer-mumoe", 40, "layer", "--kind", "mumoe", "--experts", "256", *wide)
    yield from step("transformers")
    yield measure("autotuned", 90, TORCHINDUCTOR_MAX_AUTOTUNE_GEMM="1")
    yield measure("again", 45)


def found_by(part: str, work: Path) -> dict[str, Any]:
    """What a part has written, whether or not it came to its end."""
    if part not in GROUPS:
        return check.found_by(part, work)
    runs: dict[str, Any] = {}
    for name, trial in GROUPS[part].items():
        ended = (work / name / "metrics.jsonl").exists()
        runs[name] = {"status": NEEDS_CUDA if trial.needs_cuda else "no run"}
        if ended:
            runs[name] = run_of(work / name)
        base = work / BASES[name] / "metrics.jsonl"
        if ended and name != BASES[name] and base.exists():
            runs[name]["compared"] = compared(runs[name], run_of(base.parent))
    return {"runs": runs}


def compared(run: dict[str, Any], base: dict[str, Any]) -> dict[str, float]:
    """How often as fast a run is as its base, and the largest difference of their first losses."""
    pairs = zip(run["losses"], base["losses"], strict=False)
    return {
        "speed": run["tokens_per_second"] / base["tokens_per_second"],
        "losses": max(abs(a - b) for a, b in pairs),
    }


def said(name: str, result: dict[str, Any]) -> str:
    """A part's lines for people."""
    lines = [f"{name:22} {result['status']!s:>8} {result['seconds']:6.1f} s"]
    for run, values in result.get("runs", {}).items():
        words = values["status"] if "status" in values else rates_of(values)
        if beside := values.get("compared"):
            words += f"; {beside['speed']:.3f} of {BASES[run]}, losses +-{beside['losses']:.1e}"
        lines.append(f"    {run:18} {words}")
    return "\n".join(lines)


def main() -> int:
    """Runs the parts; status 1 if one failed."""
    return visit(options(__doc__, "gpu-speed").parse_args(), parts, found_by, said)


if __name__ == "__main__":
    sys.exit(main())
