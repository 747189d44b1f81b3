"""Opens a model's weights in any format: a checkpoint, Hugging Face, or plain safetensors."""

from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from polyad.model.build import build_model, initial_value, place
from polyad.model.decoder import DecoderSettings
from polyad.model.decoder_config import DecoderConfig
from polyad.model.settings import ModelSettings
from polyad.parallel.adapted import AdaptedCheckpoint, lora_of
from polyad.parallel.checkpoint.format import CheckpointError
from polyad.parallel.checkpoint.load import Checkpoint, find_checkpoint, read_newest
from polyad.parallel.families import FamilyWeights, is_huggingface_folder
from polyad.parallel.fragments import persistent_buffers
from polyad.parallel.peft import PeftWeights, is_peft_folder
from polyad.parallel.source import described_model
from polyad.parallel.tensor_folder import PlainWeights, is_plain_folder
from polyad.parallel.zero import DTYPES, Precision

Weights: TypeAlias = Checkpoint | FamilyWeights | PlainWeights
"""A model's weights in any format: names, shapes and whole tensors, read one at a time."""
Choice = Literal["trained", "ema"]
"""The weights of a checkpoint to use: the trained ones, or their moving average (`train.ema`)."""


def is_weights_folder(path: Path) -> bool:
    """Returns whether a path is a folder of weights, of other libraries or under our names, and not
    a checkpoint or run."""
    return is_huggingface_folder(path) or is_peft_folder(path) or is_plain_folder(path)


def open_weights(path: Path, choice: Choice = "trained", base: Path | None = None) -> Weights:
    """Opens the weights at a path: a checkpoint, a run's newest one, another library's folder (a
    decoder, BERT, ViT, CLIP or timm's Mixer), peft adapters of such a folder, or a folder of
    safetensors under our names.

    Args:
        path: the path.
        choice: the weights to use; folders of weights have no average.
        base: for adapters, the path of their base; None: from their configuration.

    Raises:
        ValueError: with an `exit_status` of 2: it is none of these, or cannot be used.
    """
    if not is_weights_folder(path):
        return open_checkpoint(path, choice, base)
    if choice == "ema":
        raise CheckpointError(
            f"{path}: is a folder of weights, which has no moving average; only checkpoints of "
            "runs with train.ema have one"
        )
    if is_peft_folder(path):
        return PeftWeights(path, base)
    if base is not None:
        raise _without_adapters(path, base)
    return FamilyWeights(path) if is_huggingface_folder(path) else PlainWeights(path)


def _without_adapters(path: Path, base: Path) -> CheckpointError:
    return CheckpointError(
        f"--base: {base} is not allowed: {path} holds no adapters, and only adapters have a base "
        "model"
    )


def _opened(path: Path, given: Path | None) -> Checkpoint:
    """Opens a checkpoint, with its base if it consists of adapters.

    Args:
        path: as in `open_checkpoint`.
        given: the base's path, if it differs from the configured one.
    """
    checkpoint = read_newest(path, lambda chosen: Checkpoint(find_checkpoint(chosen)))
    lora = lora_of(checkpoint)
    if lora is None:
        if given is not None:
            raise _without_adapters(checkpoint.folder, given)
        return checkpoint
    folder, config = checkpoint.folder, checkpoint.model_config()
    place = Path(checkpoint.section("checkpoint")["init_from"]) if given is None else given
    named = "checkpoint.init_from" if given is None else "--base"
    try:
        base = open_weights(place)
        model = described_model(config, base.shapes(), place)
        ours = {name for name, _ in model.named_parameters()}
        unused = base.shapes().keys() - ours  # such as the head of a model with another one
        check_fits(base, config, (*checkpoint.shapes(), *unused))  # it has the former
    except ValueError as error:
        raise CheckpointError(
            f"{folder}: holds adapters, and their base ({named}) cannot be used: {error}"
        ) from None
    return AdaptedCheckpoint(folder, checkpoint.contents, base, lora)


def origin_of(weights: Weights) -> dict[str, Any] | None:
    """Returns what a run keeps of another library's folder, for a model that is or was trained from
    its decoder: an `Origin` as JSON values; None if the weights do not come from such a folder."""
    if isinstance(weights, FamilyWeights) and isinstance(weights.config, DecoderConfig):
        return weights.origin().model_dump()
    return weights.state.huggingface if isinstance(weights, Checkpoint) else None


def check_fits(weights: Weights, config: ModelSettings, without: tuple[str, ...] = ()) -> None:
    """Checks that weights belong to a model.

    Args:
        weights: weights of any format.
        config: the configuration of the model.
        without: prefixes of names that may be missing.

    Raises:
        ValueError: with an `exit_status` of 2: they belong to another model.
    """
    if isinstance(weights, FamilyWeights):  # what it lacks of replaced blocks is in `without`
        weights.check_config(config.original() if isinstance(config, DecoderSettings) else config)
    else:
        weights.check_model(build_model(config), without)


def open_checkpoint(path: Path, choice: Choice = "trained", base: Path | None = None) -> Checkpoint:
    """Opens a checkpoint, or a run's newest one, and checks its weights against its configuration.

    A checkpoint of adapters is opened with its base, so that its weights are whole.

    Args:
        path: the path.
        choice: the weights to use.
        base: see `open_weights`.

    Raises:
        ValueError: with an `exit_status` of 2: it does not exist, or cannot be used.
    """
    checkpoint = _opened(path, base)
    checkpoint.check_own_model()
    if choice == "ema":
        checkpoint.take_average()
    return checkpoint


class NotFiniteError(RuntimeError):
    """Weights that hold NaN or inf: one line that names the first such tensor."""

    exit_status = 1


def load_model(
    source: Path | str | Weights,
    device: torch.device | str = "cpu",
    precision: Precision = "fp32",
    choice: Choice = "trained",
) -> nn.Module:
    """Loads a model with weights on one device, in evaluation mode.

    Args:
        source: an argument or a result of `open_weights`.
        device: the device.
        precision: precision of its parameters.
        choice: the weights to use of a checkpoint that is not open yet; its buffers are the same
            for both.

    Returns:
        The model; no process group is needed.
    """
    if isinstance(source, Path | str):
        return read_newest(
            Path(source),
            lambda chosen: load_model(open_weights(chosen, choice), device, precision),
        )
    model = build_model(source.model_config())
    fill(model, source, device, precision)
    return model.eval()


def fill(
    model: nn.Module,
    stored: Weights,
    device: torch.device | str,
    precision: Precision,
    begins: tuple[str, ...] = ("",),
) -> None:
    """Allocates parameters and buffers of a model and sets their values.

    Args:
        model: a model with the configuration of the weights.
        stored: the weights.
        device: the device.
        precision: precision of the parameters; buffers keep theirs.
        begins: name prefixes of the parameters and buffers to fill.

    Raises:
        NotFiniteError: a value that the weights hold is NaN or inf.
    """
    dtype = DTYPES[precision]
    parameters, initial, buffers = (
        [name for name, _ in named if name.startswith(begins)]
        for named in (model.named_parameters(), model.named_buffers(), persistent_buffers(model))
    )

    def finite(name: str, value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point() and value.numel():
            for extreme in value.aminmax():  # in one pass without a copy; NaN is passed on
                if not extreme.isfinite():
                    raise NotFiniteError(
                        f"{stored.folder}: {name} is not finite: it holds {extreme}"
                    )
        return value

    weights = ((name, finite(name, stored.as_stored(name, dtype))) for name in parameters)
    place(model, weights, device, dtype)
    place(model, ((name, initial_value(model, name, 0)) for name in initial), device)
    place(model, ((name, finite(name, stored.buffer(name))) for name in buffers), device)
