"""A training step of each configuration on a GPU that is not there:

    python -m tests.gpu.fake.step configs/gpt2/124m.yaml ...     # started by `library.run`

Forward, losses, backward, statistics, routers, evaluation, and experts left out. Prints a line of
JSON for each: what failed, by part.
"""

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from polyad.model.build import place
from polyad.model.output import ask_for_statistics
from polyad.parallel.zero import DTYPES
from polyad.train.config.adaptation import model_of
from polyad.train.config.run import RunConfig, load_config
from polyad.train.experts.actions import intervening
from polyad.train.experts.probing import routed_layers
from polyad.train.loop.losses import routing_loss
from polyad.train.loop.step import StepStatistics
from polyad.train.measures.specialization import without_capacity
from polyad.train.tasks.distillation import cross_entropy
from polyad.train.tasks.random_input import losses_for, random_batch
from polyad.train.tasks.task import OneDevice
from tests.gpu.fake.library import fake_gpu


def to_gpu(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Gives a model on the meta device fake weights and buffers on the GPU."""
    cuda = torch.device("cuda")
    weights = [(n, torch.zeros(p.shape, dtype=dtype, device=cuda)) for n, p in parameters(model)]
    place(model, iter(weights), cuda, dtype)
    # Not by `place`, after which modules copy numbers of buffers to the host, once a start.
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                value = torch.zeros(buffer.shape, dtype=buffer.dtype, device=cuda)
                module._buffers[name] = value


def parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Names and parameters, listed before they are replaced."""
    return list(model.named_parameters())


def check(config: RunConfig) -> dict[str, Any]:
    """Takes a step of a configuration; returns what `failed`, by part."""
    failed: dict[str, str] = {}
    on_cpu, model = random_batch(config.model, range(2), config.data), model_of(config)

    def attempt(part: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = str(error).splitlines()[0] if str(error) else ""
            failed[part] = f"{type(error).__name__}: {text} ({place.filename}:{place.lineno})"

    with fake_gpu() as mode:
        to_gpu(model, DTYPES[config.train.precision])
        model.train()
        batch = type(on_cpu)(
            *(None if t is None else mode.from_tensor(t).to("cuda") for t in on_cpu)
        )
        predictor, task_losses = OneDevice(model, cross_entropy), losses_for(config.model)

        def step(*, record_is_due: bool) -> None:
            model.zero_grad()
            ask_for_statistics(
                model, losses=config.loss.asked(), samples=False, record_is_due=record_is_due
            )
            losses, routing = task_losses(predictor, batch)
            loss = losses.mean()
            StepStatistics(loss.device).add(loss, routing)
            auxiliary = routing_loss(routing, config.loss)
            (loss if auxiliary is None else loss + auxiliary).backward()
            off = [n for n, p in parameters(model) if p.grad is None or not p.grad.is_cuda]
            assert not [n for n in off if dict(parameters(model))[n].requires_grad], off[:3]

        def evaluate() -> None:
            model.eval()
            with torch.no_grad():
                task_losses(predictor, batch)

        def leave_out() -> None:
            layer = routed_layers(model)[0]
            chosen_2S = torch.zeros(2, layer.num_experts, dtype=torch.bool, device="cuda")
            with without_capacity(model), intervening(model, layer) as intervene:
                intervene(chosen_2S, None)
                evaluate()

        attempt("step", lambda: step(record_is_due=True))
        attempt("step between records", lambda: step(record_is_due=False))
        attempt("evaluation", evaluate)
        if routed_layers(model):
            attempt("leaving out", leave_out)
    return {"failed": failed}


def loaded(path: Path, *, words: int = 5000) -> RunConfig:
    """A configuration, with what the data would decide, and so many words."""
    given: list[str] = []
    while (key := load_config(path, given).model.left_to_data()) is not None:
        given.append(f"{key}={0 if key.endswith('_id') else words}")
    return load_config(path, given)


def main() -> int:
    """Prints a line for each configuration; status 1 if one failed."""
    failed = False
    for path in sys.argv[1:]:
        try:
            found = check(loaded(Path(path)))
        except Exception as error:
            found = {"failed": {"whole": f"{type(error).__name__}: {str(error)[:300]}"}}
        failed |= bool(found["failed"])
        print(json.dumps({"config": path} | found), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
