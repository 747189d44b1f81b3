"""Folders of transformers' models that are no family of ours: read, pruned and written."""

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from polyad.data.errors import say
from polyad.data.files import temporary_folder
from polyad.model.build import build_model
from polyad.model.families.family import CONFIG_FILE
from polyad.model.families.keys import WeightsError, configurations
from polyad.model.families.registry import FAMILIES, SUPPORTED
from polyad.model.foreign import TheirConfig, TheirModel, class_of
from polyad.parallel.families import GENERATION_FILE, FamilyWeights, Origin
from polyad.parallel.source import StoredWeights
from polyad.parallel.tensor_folder import INDEX_FILE, read_json
from polyad.parallel.zero import DTYPES, Precision

READ_ONLY = (
    "is a model of transformers, which is evaluated and analysed, but not trained, converted or "
    f"split over processes; families of ours are: {SUPPORTED}"
)
OTHERS = f"supported: {SUPPORTED}, and the other mixtures of transformers"
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
          "num_routed_experts")  # fmt: skip
"""Names of the number of experts in config.json."""


def their_config(folder: Path) -> TheirConfig:
    """Returns the configuration of a folder.

    Raises:
        WeightsError: transformers has no such model, or its config.json is not valid.
    """
    place = folder / CONFIG_FILE
    kind = str(read_json(place).get("model_type"))
    known = configurations(kind)
    if kind not in known:
        raise WeightsError(f"{place}: model_type: {kind!r:.60} is not supported; {OTHERS}")
    try:
        read = known[kind].from_pretrained(folder, local_files_only=True)
        text = read.get_text_config()
        return TheirConfig.model_validate(
            {
                "config": read.to_dict(),
                "vocab_size": text.vocab_size,
                "num_layers": text.num_hidden_layers,
                "hidden_size": text.hidden_size,
                "num_heads": 1,  # not split, so only the library's own number counts
                "sequence_length": getattr(text, "max_position_embeddings", None) or 2048,
            }
        )
    except Exception as error:  # of any class: each kind of fault there has its own
        raise WeightsError(f"{place}: {' '.join(str(error).split())}") from None


class TheirWeights(StoredWeights):
    """A folder of such a model, or the model itself.

    Args:
        folder: The folder, with config.json and safetensors.
        options: Arguments of `from_pretrained`, such as `device_map` or `quantization_config`.

    Raises:
        WeightsError: transformers has no such model, or it has no such experts.
    """

    config: TheirConfig
    _kept: Any = None

    def __init__(self, folder: Path, options: Mapping[str, Any] | None = None) -> None:
        self.folder, self._options, self._model = folder, dict(options or {}), None
        self.config = their_config(folder)
        try:
            build_model(self.config)
        except WeightsError as error:
            raise WeightsError(f"{folder / CONFIG_FILE}: {error}; {OTHERS}") from None

    @classmethod
    def of_model(cls, model: Any, tokenizer: Any = None) -> "TheirWeights":
        """Takes a model that is in memory.

        Args:
            model: A causal language model of transformers.
            tokenizer: Its tokenizer there; None if it needs none.
        """
        kept = tempfile.TemporaryDirectory(prefix="polyad-")
        folder = Path(kept.name)
        model.config.save_pretrained(folder)
        for part in (getattr(model, "generation_config", None), tokenizer):
            if part is not None:
                part.save_pretrained(folder)
        weights = cls(folder)
        weights._model, weights._kept = model, kept
        return weights

    def load(
        self, device: torch.device | str, precision: Precision | Literal["auto"]
    ) -> TheirModel:
        """Loads the model, in evaluation mode; where options place or quantize it, as they say.

        Args:
            device: The device.
            precision: Precision of the parameters; `auto`: as they are stored.
        """
        theirs = self._model
        if theirs is None:
            dtype = "auto" if precision == "auto" else DTYPES[precision]
            options = {"dtype": dtype} | self._options
            builder, _ = class_of(self.config.config)
            try:
                theirs = builder.from_pretrained(
                    self.folder, local_files_only=True, use_safetensors=True, **options
                )
            except (OSError, ValueError, RuntimeError, ImportError) as error:
                raise WeightsError(f"{self.folder}: {' '.join(str(error).split())}") from None
            if not {"device_map", "quantization_config"} & self._options.keys():
                theirs = theirs.to(device)
        model = TheirModel(self.config, theirs.eval()).learn()
        if blocks := model.without_scores:
            say(
                f"{self.folder}: in blocks {', '.join(map(str, blocks))} the scores of all experts "
                "are not known: those shown are the weights of the chosen ones"
            )
        return model

    def origin(self) -> Origin:
        """Returns what says which tokens end a text."""
        place = self.folder / GENERATION_FILE
        files = {GENERATION_FILE: place.read_text("utf-8")} if place.is_file() else {}
        return Origin(config=self.config.config, dtype="F32", dtypes={}, copies=[], files=files)

    def _refuse(self, name: str = "") -> Any:
        """Refuses what reads weights one by one."""
        raise WeightsError(f"{self.folder}: {READ_ONLY}")

    shapes = whole = buffer = _refuse


def open_folder(folder: Path) -> FamilyWeights | TheirWeights:
    """Opens a folder of another library: of a family of ours if there is one.

    Raises:
        WeightsError: Neither we nor transformers have such a model.
    """
    tree = read_json(folder / CONFIG_FILE)
    is_ours = any(family.is_of(tree) for family in FAMILIES)
    return FamilyWeights(folder) if is_ours else TheirWeights(folder)


def on_disk(path: Path) -> Path:
    """Returns a path, or the folder into which the hub's model of this name has been downloaded.

    Args:
        path: An existing path; otherwise `owner/name` is a name on the hub.

    Raises:
        WeightsError: It is neither there nor can it be downloaded.
    """
    name = path.as_posix()
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or path.parent.exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model",
                                                            "*.txt", "*.jinja"]))  # fmt: skip
    except OSError:  # the library's own are of this class
        raise WeightsError(
            f"{name}: there is no such folder, and the hub cannot be reached or has no such model; "
            f"where it can: `hf download {name} --local-dir {path.name}`, and give that folder"
        ) from None


def write_with_fewer(
    weights: TheirWeights, groups: Mapping[str, Sequence[Mapping[int, float]]], output: Path
) -> int:
    """Writes a model whose experts are some of another's, or weighted means of them.

    Args:
        weights: The folder of the other.
        groups: By layer such as blocks.3.feed_forward, the shares of its experts in each new one.
        output: The folder to write.

    Returns:
        Number of parameters.
    """
    model = weights.load("cpu", "auto")
    theirs: Any = model.theirs
    for name, each in groups.items():
        layer: Any = model.get_submodule(name)
        before, count = layer.config.num_experts, len(each)
        shares = torch.zeros(count, before, dtype=torch.float64)
        for row, group in enumerate(each):
            shares[row, list(group)] = torch.tensor([*group.values()], dtype=torch.float64)
        children = layer.holder.children()
        routers = [each for each in children if layer.their_router in each.modules()]
        inside = (part for each in (layer.experts, *routers) for part in each.modules())
        for part in (layer.holder, *inside):
            _keep(part, shares)
        _count(theirs.config, before, count)
    with temporary_folder(f".{output.name}.", output.absolute().parent, ".partial") as staging:
        try:
            theirs.save_pretrained(staging)
        except RuntimeError as error:  # of some, experts of text and of pictures are one tensor
            raise WeightsError(
                f"{weights.folder}: cannot be written with fewer experts: {error}"
            ) from None
        for path in weights.files_folder.iterdir():
            is_small = path.suffix in (".json", ".model", ".txt", ".jinja")
            if is_small and path.name != INDEX_FILE and not (staging / path.name).exists():
                (staging / path.name).write_bytes(path.read_bytes())
        staging.rename(output)
    return sum(parameter.numel() for parameter in theirs.parameters())


def _keep(part: nn.Module, shares: Tensor) -> None:
    """Replaces what a module has for each expert, by shares [new, old]."""
    for key, value in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
        axis = 1 if value.shape[:1] == (1,) and value.dim() == 2 else 0
        if value.dim() and value.shape[axis] == shares.shape[1]:
            kept = torch.tensordot(shares, value.detach().double().movedim(axis, 0), 1)
            kept = kept.movedim(0, axis).to(value.dtype).contiguous()
            setattr(part, key, nn.Parameter(kept) if key in part._parameters else kept)


def _count(config: Any, before: int, count: int) -> None:
    """Changes the number of experts in a configuration."""
    for each in (config, config.get_text_config()):
        for key in COUNTS:
            value = getattr(each, key, None)
            if value == before:
                setattr(each, key, count)
            elif isinstance(value, list):
                setattr(each, key, [count if one == before else one for one in value])
