"""`flips.py`: which flipped bits of a weight or a gradient the monitors notice.

A small GPT-2 learns the bytes of Python's own modules. Then, for each bit: back to the same
checkpoint, that bit of one element is flipped in a weight before the step, or in a gradient in the
middle of it, and the step is held against the limits as in a run with `monitor.spike_action: skip`.
"""

import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from polyad.launch.command import Argument, Json, UsageError, positive
from polyad.launch.output import align, results
from polyad.model.build import build_model
from polyad.model.gpt2 import GPT2Config
from polyad.parallel import comm
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.checkpoint.save import save
from polyad.parallel.config import ParallelConfig
from polyad.parallel.dims import Dims
from polyad.parallel.fragments import fill
from polyad.parallel.parallelize import parallelize
from polyad.parallel.source import InitialWeights
from polyad.parallel.zero import Engine, Precision
from polyad.train.console import Progress
from polyad.train.guard.spikes import Limits, MonitorConfig, StepOutcome, limits_of, remember
from polyad.train.loop.optimizer import OptimizerConfig, build_optimizer
from polyad.train.loop.step import train_step
from polyad.train.state import TrainState
from polyad.train.tasks.language import TextBatch, text_losses
from polyad.train.tasks.losses import cross_entropy
from tests.benchmarks.script import benchmark, start

MODEL = GPT2Config(num_layers=2, hidden_size=64, num_heads=4, sequence_length=64, vocab_size=256)
STEPS, BATCH = 150, 8
MIN_STEPS = 8
"""The spike guard judges no step before this one."""
BITS = {"fp32": (32, 8, torch.int32), "bf16": (16, 8, torch.int16)}
"""Bits of a number, of its exponent, and the integers of that width."""
MATRICES = (
    "blocks.0.attention.qkv.weight",
    "blocks.0.feed_forward.up.weight",
    "blocks.1.feed_forward.down.weight",
    "blocks.1.attention.projection.weight",
)


def bench_flips(*, steps: int = STEPS, matrices: int = len(MATRICES)) -> dict[str, Any]:
    """Flips every bit.

    Args:
        steps: of training before.
        matrices: in how many of `MATRICES` an element is flipped.

    Returns:
        JSON values: for each precision and place a list over bits, the lowest first, of how many
        flips there were, what noticed them, and how far the loss was off where nothing did.
    """
    world = comm.initialize()
    result: dict[str, Any] = {"steps": steps, "matrices": matrices, "precisions": {}}
    total = 2 * matrices * sum(n for n, _, _ in BITS.values())
    progress, done = Progress("flipping bits", total, "bits"), 0
    for precision, (bits, exponent, _) in BITS.items():
        with tempfile.TemporaryDirectory() as folder:
            trial = _Trial(precision, world, Path(folder), steps)  # type: ignore[arg-type]
            rows: dict[str, list[dict[str, Any]]] = {"weights": [], "gradients": []}
            for bit in range(bits):
                for place, row in rows.items():
                    found = []
                    for matrix in range(matrices):
                        found.append(trial.flip(place, bit, matrix))
                        done += 1
                        progress(done / total)
                    row.append({"bit": bit, "part": _part(bit, bits, exponent), **_count(found)})
            result["precisions"][precision] = {"limits": trial.limits._asdict(), **rows}
    return result


def _part(bit: int, bits: int, exponent: int) -> str:
    if bit == bits - 1:
        return "sign"
    return "exponent" if bit >= bits - 1 - exponent else "mantissa"


def _count(found: list[tuple[str, float]]) -> dict[str, Any]:
    noticed = [by for by, _ in found if by]
    return {
        "flips": len(found),
        "noticed": len(noticed),
        "by": sorted(set(noticed)),
        "unnoticed_loss_error": max((off for by, off in found if not by), default=None),
    }


class _Trial:
    """A trained model whose next step is repeated, each time with another bit flipped."""

    def __init__(self, precision: Precision, world: comm.World, folder: Path, steps: int) -> None:
        self._world, self._config = world, MonitorConfig(spike_warmup=MIN_STEPS)
        self._integers = BITS[precision][2]
        self._engine = _engine(precision, world)
        self._text = _bytes()
        state = TrainState()
        comm.seed_random(0, 0, world)
        for step in range(steps):
            outcome = self._step(step, Limits(float("inf"), float("inf")))
            remember(self._config, state, outcome.loss, outcome.result.grad_norm)
        self.limits = limits_of(self._config, state)
        self._steps = steps
        saved = save(self._engine, folder, steps, state={}, config_yaml="")
        self._checkpoint = Checkpoint(saved)
        self._clean = self._after()

    def flip(self, place: str, bit: int, matrix: int) -> tuple[str, float]:
        """Flips a bit of an element; gives what noticed it, and the error of the loss after it."""
        fill(self._engine, self._checkpoint)
        parameter = self._engine.module.get_parameter(MATRICES[matrix])
        # Of median size: neither an outlier nor a zero.
        element = int(parameter.detach().abs().flatten().median(0).indices)
        handle = None
        if place == "weights":
            self._turn(parameter.data, element, bit)
        else:

            def turned(gradient: Tensor) -> Tensor:
                gradient = gradient.clone()
                self._turn(gradient, element, bit)
                return gradient

            handle = parameter.register_hook(turned)  # type: ignore[no-untyped-call]
        outcome = self._step(self._steps, self.limits)
        if handle is not None:
            handle.remove()
        finite = torch.tensor([outcome.loss, outcome.result.grad_norm]).isfinite().all()
        if not finite:
            return "not finite", 0.0
        if not outcome.sane:
            return "weight", 0.0
        if outcome.loss > self.limits.loss:
            return "loss", 0.0
        if outcome.result.grad_norm > self.limits.grad_norm:
            return "norm", 0.0
        return "", abs(self._step(self._steps + 1, self.limits).loss - self._clean)

    def _after(self) -> float:
        """The loss of the second step from here, without a flip."""
        fill(self._engine, self._checkpoint)
        self._step(self._steps, self.limits)
        return self._step(self._steps + 1, self.limits).loss

    def _turn(self, values: Tensor, element: int, bit: int) -> None:
        view = values.view(self._integers).flatten()
        width = 8 * view.element_size()
        view[element] ^= -(2 ** (width - 1)) if bit == width - 1 else 2**bit

    def _step(self, step: int, limits: Limits) -> StepOutcome:
        generator = torch.Generator().manual_seed(step)
        length = MODEL.sequence_length + 1
        starts = torch.randint(len(self._text) - length, (BATCH,), generator=generator)
        batch_BT = torch.stack([self._text[start : start + length] for start in starts])
        batches = iter([TextBatch.of(batch_BT.to(self._world.device))])
        return train_step(self._engine, text_losses, batches, 1, 3e-3, limits=limits)


def _engine(precision: Precision, world: comm.World) -> Engine:
    optimizer = OptimizerConfig()
    return parallelize(
        build_model(MODEL),
        Dims(world_size=1),
        ParallelConfig(),
        world=world,
        make_optimizer=lambda parameters: build_optimizer(optimizer, parameters),
        precision=precision,
        global_batch_size=BATCH,
        micro_batch_size=BATCH,
        clip_grad_norm=1.0,
        source=InitialWeights(build_model(MODEL), 1),
        cross_entropy=cross_entropy,
    )


def _bytes() -> Tensor:
    """Half a megabyte of Python's standard library."""
    folder = Path(next(p for p in sys.path if (Path(p) / "argparse.py").exists()))
    text = b"".join((folder / f"{n}.py").read_bytes() for n in ("argparse", "typing", "ast", "cmd"))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def flips_table(result: dict[str, Any]) -> str:
    """The result for a person: bits from the highest, those alike in one line."""
    rows: list[tuple[str, ...]] = [
        ("precision", "place", "bits", "part", "noticed", "by", "else the loss is off by at most")
    ]
    for precision, about in result["precisions"].items():
        for place in ("weights", "gradients"):
            for group in _alike(about[place]):
                high, low = group[0], group[-1]
                bits = f"{high['bit']}" if len(group) == 1 else f"{high['bit']} to {low['bit']}"
                off = [g["unnoticed_loss_error"] for g in group]
                worst = max((o for o in off if o is not None), default=None)
                noticed = sum(g["noticed"] for g in group)
                rows.append(
                    (
                        precision, place, bits, high["part"],
                        f"{noticed} of {sum(g['flips'] for g in group)}",
                        ", ".join(sorted({by for g in group for by in g["by"]})) or "-",
                        "-" if worst is None else f"{worst:.1e}",
                    )
                )  # fmt: skip
    return align(rows)


def _alike(bits: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Groups neighbouring bits of one part of the number that were noticed in the same way."""
    groups: list[list[dict[str, Any]]] = []
    for bit in reversed(bits):
        kind = (bit["part"], tuple(bit["by"]), bit["noticed"] == bit["flips"])
        last = groups[-1][-1] if groups else None
        if last and kind == (last["part"], tuple(last["by"]), last["noticed"] == last["flips"]):
            groups[-1].append(bit)
        else:
            groups.append([bit])
    return groups


@benchmark("flips", "--json flips.json")
def flips(
    *,
    steps: Annotated[
        int, Argument("training steps before the flips; default 150", parse=positive)
    ] = STEPS,
    json: Json = None,
) -> None:
    """Flips bits of weights and gradients, and says which the monitors notice."""
    if steps < MIN_STEPS:
        raise UsageError(f"--steps: {steps} is not allowed, at least {MIN_STEPS}")
    with results(json) as show:
        result = bench_flips(steps=steps)
        show(result, flips_table(result))


if __name__ == "__main__":
    start(flips)
