"""Builds a model from a configuration: first on the meta device, then filled tensor by tensor.

    model = build_model(config)          # on the meta device: shapes, no memory
    materialize(model, seed=0)           # in one process
    initial_values(model, seed=0)        # or: one value at a time, to be sliced for this process

The value of a parameter depends only on the seed and on its name, not on other parameters, their
order, the number of processes or the state of the global random generators.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyad.model.bert import Bert, BertConfig
from polyad.model.decoder import Decoder, DecoderConfig, GPT2Config
from polyad.model.initialization import Initializer
from polyad.model.mixer import Mixer, MixerConfig
from polyad.model.mixture import MixtureConfig, MixtureModel
from polyad.model.settings import ModelSettings
from polyad.model.vit import ViT, ViTConfig


class ModelKind(NamedTuple):
    """An entry of the registry of models."""

    config: type[ModelSettings]
    build: Callable[[Any], nn.Module]
    """Takes the config class of this kind; no single type expresses that, hence Any."""


MODELS: dict[str, ModelKind] = {
    "gpt2": ModelKind(GPT2Config, Decoder),
    "decoder": ModelKind(DecoderConfig, Decoder),
    "bert": ModelKind(BertConfig, Bert),
    "mixer": ModelKind(MixerConfig, Mixer),
    "vit": ModelKind(ViTConfig, ViT),
    "mixture": ModelKind(MixtureConfig, MixtureModel),
}


def read_model_config(section: object) -> ModelSettings:
    """Reads the section `model` of a configuration.

    Args:
        section: The parsed YAML; without a `kind` it is GPT-2's.

    Raises:
        ValueError: A key or value is invalid; pydantic's error, which names the key.
    """
    kind = section.get("kind", "gpt2") if isinstance(section, dict) else "gpt2"
    if not isinstance(kind, str) or kind not in MODELS:
        raise ValueError(f"model.kind: {kind!r} is unknown; known: {', '.join(MODELS)}")
    return MODELS[kind].config.model_validate(section)


class ModelSizeError(ValueError):
    """A model that is too large for any machine, as a one-line message."""

    exit_status = 2


def build_model(config: ModelSettings) -> nn.Module:
    """Builds a model on the meta device.

    Args:
        config: The model's configuration, with all values from the data filled in.

    Returns:
        A model whose parameters have shapes and names, but no memory.

    Raises:
        ValueError: The kind is unknown, or the configuration is invalid.
        ModelSizeError: The number of elements of a tensor exceeds 64 bits.
    """
    if config.kind not in MODELS:
        raise ValueError(f"model.kind: {config.kind!r} is unknown; known: {', '.join(MODELS)}")
    try:
        with torch.device("meta"):
            return MODELS[config.kind].build(config)
    except (OverflowError, RuntimeError, TypeError) as error:  # torch's long message about shapes
        reason = " ".join(str(error).split())[:120]
        raise ModelSizeError(f"model: its sizes are too large: {reason}") from None


def count_parameters(model: nn.Module) -> int:
    """Counts the parameters of a model; shared ones count once.

    Args:
        model: A model, on any device.

    Returns:
        The number of scalars.
    """
    return sum(parameter.numel() for parameter in model.parameters())


def num_parameters(config: ModelSettings) -> int:
    """Counts the parameters of a configuration without allocating them.

    Args:
        config: The model's configuration, as for `build_model`.

    Returns:
        The number of scalars.
    """
    return count_parameters(build_model(config))


def initial_value(
    model: nn.Module, name: str, seed: int, experts: Sequence[int] | None = None
) -> Tensor:
    """Draws the initial value of one parameter or buffer.

    Args:
        model: The whole model, on any device, unchanged. Its layers must not have been sliced for a
            process: shapes and initializers are taken from it.
        name: The name, as in `named_parameters` or `named_buffers`.
        seed: The run's seed.
        experts: For a parameter with one slice per expert: which experts to draw, by their index
            in the whole model; None for all.

    Returns:
        An fp32 CPU tensor with the parameter's shape, or fewer experts with `experts`.

    Raises:
        ValueError: There is no parameter or buffer of that name, or `experts` does not apply.
    """
    tensors = dict(_named_tensors(model))
    if name not in tensors:
        raise ValueError(f"the model has no parameter {name!r}")
    return initializer_of(model, name).draw(tensors[name].shape, seed, name, experts)


def initial_values(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Draws the initial values of all parameters and buffers, one at a time.

    Args:
        model: The whole model, as for `initial_value`.
        seed: The run's seed.

    Yields:
        Name and fp32 CPU tensor. No reference is kept, so only one value exists at a time if the
        caller drops it.
    """
    # Listed first: `materialize` replaces tensors between two values, and a shared tensor that has
    # been replaced would appear again under its second name.
    for name, shape in [(name, tensor.shape) for name, tensor in _named_tensors(model)]:
        yield name, initializer_of(model, name).draw(shape, seed, name)


def matrix_dimensions(model: nn.Module) -> dict[str, int]:
    """Returns the number of dimensions of each parameter, without the one that counts experts.

    Weights have two or more; biases and scales, of a layer or of each expert, have fewer.

    Args:
        model: The whole model, as for `initial_value`.

    Returns:
        Numbers of dimensions by parameter name.
    """
    return {
        name: parameter.dim() - initializer_of(model, name).per_expert
        for name, parameter in model.named_parameters()
    }


def materialize(
    model: nn.Module,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Allocates all parameters and buffers of a model and sets their initial values, in place.

    Args:
        model: A model from `build_model`.
        seed: The run's seed.
        device: The target device.
        dtype: Precision of the parameters; buffers keep theirs.
    """
    place(model, initial_values(model, seed), device, dtype)


def place(
    model: nn.Module,
    values: Iterable[tuple[str, Tensor]],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    placed: Callable[[nn.Parameter], None] | None = None,
) -> None:
    """Allocates parameters and buffers of a model and sets their values, in place, one at a time.

    At most one value exists besides the model itself. A parameter shared by two modules stays
    shared; `requires_grad` and attributes of parameters are kept.

    Args:
        model: The model.
        values: Names, as in `named_parameters` or `named_buffers`, and values; each value is
            released before the next is requested.
        device: The target device.
        dtype: Precision of the parameters; buffers keep theirs.
        placed: Called with each parameter once it is in the model, before the next is made.
    """
    owners = _owners(model)
    tensors = dict(_named_tensors(model))
    for name, value in values:
        old = tensors[name]
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(value.to(device, dtype), requires_grad=old.requires_grad)
            new.__dict__.update(old.__dict__)
            for module, attribute in owners[id(old)]:
                module._parameters[attribute] = new
            if placed is not None:
                placed(new)
        else:
            for module, attribute in owners[id(old)]:
                module._buffers[attribute] = value.to(device, old.dtype)
        del value  # else it would stay in memory together with the next one
    buffers_changed(model)


def buffers_changed(model: nn.Module) -> None:
    """Notifies every module that caches a buffer as a plain number that the buffer was set.

    Args:
        model: The model.
    """
    for module in model.modules():
        callback = getattr(module, "buffers_changed", None)
        if callback is not None and not any(b.is_meta for b in module.buffers(recurse=False)):
            callback()


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Lists parameters, then buffers; a shared one once, under its first name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _owners(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Maps each tensor to what refers to it: {id(tensor): [(module, attribute)]}."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                owners.setdefault(id(tensor), []).append((module, attribute))
    return owners


def initializer_of(model: nn.Module, name: str) -> Initializer:
    """Finds a parameter's initializer in the modules around it, the nearest first."""
    path = name.split(".")
    for depth in reversed(range(len(path))):
        module = model.get_submodule(".".join(path[:depth]))
        initializers: dict[str, Initializer] = getattr(module, "initializers", dict)()
        if (entry := initializers.get(".".join(path[depth:]))) is not None:
            return entry
    raise AssertionError(f"no module says how {name} starts: add it to `initializers()`")


PLACED_ANYWHERE = {"triton.divisible_by_16": False}
"""Compiler options for kernels whose tensors may not be aligned to 16 bytes."""


def compile_model(
    model: nn.Module, backend: str = "inductor", *, placed_anywhere: bool = False
) -> None:
    """Compiles a model with torch.compile, in place: each block, and the code around the blocks.

    Call it after the weights exist and parallel layers are in place. Names of modules and
    parameters do not change. Identical blocks share one compiled program, whereas a program for the
    whole model would repeat each block. A model without `blocks` is compiled whole.

    Args:
        model: Any model.
        backend: The compiler backend.
        placed_anywhere: Whether weights may be unaligned to 16 bytes. The compiler assumes that the
            weights of all blocks are aligned like those of the first, and a GPU faults otherwise
            (PyTorch 2.13, pytorch/pytorch#193054); with this option it assumes nothing, which costs
            some speed.
    """
    # Without this, the graph breaks where the CPU learns how many rows each process sends.
    torch._dynamo.config.capture_scalar_outputs = True
    # For a K that changes during a run: a second program handles any K, instead of one program per
    # K.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    how: dict[str, Any] = {"backend": backend}
    if placed_anywhere and backend == "inductor":
        how["options"] = PLACED_ANYWHERE
    blocks = getattr(model, "blocks", None)
    if blocks is None:
        model.compile(**how)
        return
    # A kind of block has up to five programs: training with and without a record, evaluation, and
    # other batch sizes. Beyond a limit, by default 8, blocks would run uncompiled.
    limit = 8 * min(len(blocks), 8)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    for block in blocks.children():
        block.compile(**how)
    for name in ("embed", "score"):
        setattr(model, name, torch.compile(getattr(model, name), **how))
