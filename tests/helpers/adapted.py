"""Checkpoints of random adapters, like those of a run over a folder of weights."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from polyad.model.build import build_model, materialize, place
from polyad.model.lora import AdaptConfig, LoRAConfig, add_lora, of_base
from polyad.parallel.checkpoint.load import Checkpoint, find_checkpoint
from polyad.parallel.checkpoint.save import save_weights
from polyad.parallel.fragments import persistent_buffers
from polyad.parallel.weights import digest_of, load_model, open_weights, origin_of
from polyad.train.exchange.convert import config_for_model
from polyad.train.state import TrainState
from tests.helpers.parity import assert_equal_tensors


def adapted_checkpoint(
    folder: Path, base: Path, lora: LoRAConfig, *, std: float = 0.2, **buffers: float
) -> nn.Module:
    """Writes a checkpoint of adapters.

    Args:
        folder: The checkpoint's folder, which must not exist.
        base: The folder of the base weights.
        lora: The adapters.
        std: Standard deviation of A and B.
        buffers: Values to add to buffers, by the last part of their names.

    Returns:
        The model with base and adapters.
    """
    weights = open_weights(base)
    config = weights.model_config()
    model = build_model(config)
    add_lora(model, lora)
    frozen, generator = of_base(model), torch.Generator().manual_seed(4)
    values: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        noise = std * torch.randn(parameter.shape, generator=generator)
        is_whole = name in weights.shapes()
        values[name] = weights.whole(name) if is_whole else noise
        if is_whole and name not in frozen:
            values[name] = values[name] + noise
    held = {name: weights.buffer(name) for name, _ in persistent_buffers(model)}
    for name in held:
        held[name] = held[name] + buffers.get(name.rpartition(".")[2], 0)
    place(model, iter([*values.items(), *held.items()]))
    run, _ = config_for_model(config, base, "adapted")
    checkpoint = run.checkpoint.model_copy(update={"init_from": str(base)})
    run = run.model_copy(update={"adapt": AdaptConfig(lora=lora), "checkpoint": checkpoint})
    own = {name: value for name, value in values.items() if name not in frozen}
    folder.mkdir(parents=True)
    save_weights(
        folder,
        {name: tuple(value.shape) for name, value in own.items()},
        own.__getitem__,
        buffers=held,
        state=TrainState(base_digest=digest_of(weights, frozen)).to_json()
        | {"huggingface": origin_of(weights)},
        config_yaml=run.to_yaml(),
        files={},
    )
    return model.eval()


def assert_all_loaded(model: nn.Module, folder: Path) -> None:
    """Checks that a model of peft has the adapters of a folder: what it does not find it leaves out
    with no more than a warning."""
    loaded = {n.replace(".default", ""): p for n, p in model.named_parameters() if "lora_" in n}
    assert_equal_tensors(loaded, load_file(folder / "adapter_model.safetensors"))


def unmerged(folder: Path, base: Path, lora: dict[str, Any]) -> nn.Module:
    """The model of a run as it was trained: frozen weights, and what was trained beside them."""
    checkpoint, frozen = Checkpoint(find_checkpoint(folder)), load_model(base).state_dict()
    model, trained = build_model(checkpoint.model_config()), checkpoint.shapes()
    add_lora(model, LoRAConfig.model_validate(lora))
    materialize(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint.whole(name) if name in trained else frozen[name])
    return model.eval()
