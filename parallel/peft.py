"""Adapters in the format of the library peft: low-rank matrices for the weights of transformers'
models, merged into those of their base.

    a linear layer or a router   MODULE.lora_A.weight [R, in], MODULE.lora_B.weight [out, R]
    stacked experts              [E R, in], all rows of one expert before those of the next, and
                                 [out, R E], one column of each expert, then the next of each

Names are those in memory, where experts are stacked (`Family.in_memory`). If a module has two
stacks, the matrices of the first have `.base_layer` in their names. A tensor that holds several of
ours, such as gate and up, has the sum of their ranks: the As are stacked, and B is zero where the
outputs of one meet the rank of another.

Shapes: E experts (1 for a linear layer), R rank in the file, I inputs, O outputs.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from polyad.model.families.keys import WeightsError
from polyad.model.families.tensors import Piece, Slices
from polyad.parallel.checkpoint.format import Record, fault_of
from polyad.parallel.families import FamilyWeights, is_huggingface_folder
from polyad.parallel.tensor_folder import TensorFolder, Wanted, read_json

ADAPTER_CONFIG_FILE, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
BEFORE = "base_model.model."
"""Prefix of transformers' names in the file."""
T = TypeVar("T")
STACKS = ("gate_up_proj", "down_proj")
"""Names of stacked experts, in the order of their module."""
_INNER = ".base_layer"
_A, _B = ".lora_A.weight", ".lora_B.weight"
_HARMLESS = frozenset({
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "lora_dropout", "fan_in_fan_out", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core", "eva_config",
    "qalora_group_size", "ensure_weight_tying", "loftq_config",
})  # fmt: skip
"""Keys of adapter_config.json that do not affect the update."""


class Factors(NamedTuple):
    """Both matrices for one of their tensors, or for our share of it."""

    A_ERI: Tensor
    B_EOR: Tensor

    @classmethod
    def unpacked(cls, A: Tensor, B: Tensor, experts: int) -> "Factors":
        """Converts two matrices from a file.

        Args:
            A: A in the file's layout.
            B: B in the file's layout.
            experts: E.
        """
        rank = A.shape[0] // experts
        B_EOR = B.view(B.shape[0], rank, experts).permute(2, 0, 1)
        return cls(A.view(experts, rank, A.shape[1]), B_EOR)

    def packed(self) -> tuple[Tensor, Tensor]:
        """Returns A and B in the file's layout."""
        outputs = self.B_EOR.shape[1]
        return self.A_ERI.flatten(0, 1), self.B_EOR.permute(1, 2, 0).reshape(outputs, -1)

    def of_share(self, piece: Piece) -> "Factors":
        """Returns the matrices for a share of the tensor.

        Args:
            piece: The share.
        """
        share, outputs = piece.rule.share, self.B_EOR.shape[1]
        if share is None:
            return self
        rows = slice(share.index, None, share.count)
        if not share.in_turns:
            size = outputs // share.count
            rows = slice(share.index * size, (share.index + 1) * size)
        return Factors(self.A_ERI, self.B_EOR[:, rows])


def fused(parts: Sequence[tuple[Piece, Factors]]) -> Factors:
    """Combines the matrices of shares into those of one of their tensors.

    Args:
        parts: Shares of the tensor with their matrices; other shares get none.
    """
    (piece, (A_ErI, B_EOr)), share = parts[0], parts[0][0].rule.share
    if share is None:
        return parts[0][1]
    experts, rank, inputs = A_ErI.shape
    A_ERI = A_ErI.new_zeros(experts, share.count * rank, inputs)
    B_EOR = A_ErI.new_zeros(experts, share.count * B_EOr.shape[1], share.count * rank)
    whole = Factors(A_ERI, B_EOR)
    for piece, (A_ErI, B_EOr) in parts:
        assert piece.rule.share is not None
        here = slice(piece.rule.share.index * rank, (piece.rule.share.index + 1) * rank)
        A_ERI[:, here] = A_ErI
        whole.of_share(piece).B_EOR[:, :, here] = B_EOr
    return whole


def module_of(name: str, stacks: Collection[str]) -> str:
    """Returns the common prefix of the names of both matrices for a tensor.

    Args:
        name: The name of the tensor.
        stacks: The names in `STACKS` that have such matrices.
    """
    owner, _, own = name.rpartition(".")
    if own not in STACKS:
        return owner
    outside = sum(other in stacks for other in STACKS[STACKS.index(own) + 1 :])
    return owner + outside * _INNER


def delta(factors: Factors, scale: float, slices: tuple[slice, ...]) -> Tensor:
    """Computes a box of the update of one of our weights.

    Args:
        factors: Factors of the whole weight.
        scale: Factor of the product.
        slices: The box: [O, I], or [E, I, O] for stacked experts.
    """
    A_ERI, B_EOR = factors
    if len(slices) == 2:
        return scale * (B_EOR[0, slices[0]] @ A_ERI[0][:, slices[1]])
    A_ERI, B_EOR = A_ERI[slices[0], :, slices[1]], B_EOR[slices[0], slices[2]]
    return scale * (B_EOR @ A_ERI).mT


class _AdapterConfig(Record):
    """The keys of adapter_config.json that determine the update."""

    peft_type: Literal["LORA"]
    r: Annotated[int, Field(ge=1, le=2**20)]
    lora_alpha: Annotated[float, Field(gt=0, le=1e6, strict=False)]
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    target_parameters: list[str] | None = None
    use_rslora: bool = False
    bias: Literal["none"] = "none"
    init_lora_weights: bool | Literal["gaussian", "orthogonal", "eva"] = True
    """Others change the base."""


def is_peft_folder(path: Path) -> bool:
    """Returns whether a path is a folder of adapters of the library peft."""
    return (path / ADAPTER_CONFIG_FILE).is_file()


class _Beside(NamedTuple):
    """The two matrices in a file for one of our weights."""

    piece: Piece
    """The adapted tensor of the base, and the rows of our weight that it contains."""
    A: str
    B: str
    scale: float

    @property
    def experts(self) -> int:
        """Number of experts that the tensor contains."""
        return self.piece.size[0] if len(self.piece.size) == 3 else 1


class PeftWeights(FamilyWeights):
    """The weights of another library's folder with peft adapters merged into them.

    Experts may be adapted all in one tensor, as in transformers 5, or one by one, as in 4.

    Args:
        adapters: The folder with adapter_config.json and adapter_model.safetensors.
        base: The folder of the base; None: from adapter_config.json.

    Raises:
        ValueError: With an `exit_status` of 2: the base cannot be used, a tensor matches none of
            its weights, or a key needs something that is not supported.
    """

    def __init__(self, adapters: Path, base: Path | None = None) -> None:
        place = adapters / ADAPTER_CONFIG_FILE
        tree = read_json(place)
        self._settings = _settings(tree, place)
        said = "--base"
        if base is None:
            base = Path(str(tree.get("base_model_name_or_path")))
            said = f"{place}: base_model_name_or_path"
        if not is_huggingface_folder(base):
            raise WeightsError(
                f"{said}: {base} is not a Hugging Face folder; use `--base FOLDER` to name that of "
                "the base model"
            )
        super().__init__(base)
        self.base, self.folder = base, adapters
        self._matrices = TensorFolder(adapters, single=ADAPTER_FILE)
        self._beside = self._located()

    @property
    def files_folder(self) -> Path:
        """The folder of the base; see `StoredWeights.files_folder`."""
        return self.base

    @property
    def note(self) -> str | None:
        """See `FamilyWeights.note`; mentions the adapters."""
        notes = [super().note, f"the adapters of {self.folder} are merged into {self.base}"]
        return "; ".join(each for each in notes if each)

    def parts(self, name: str, slices: Slices) -> Iterator[Tensor]:
        """See `FamilyWeights.parts`; includes the update by adapters."""
        beside = self._beside.get(name)
        if beside is None:
            yield from super().parts(name, slices)
            return
        value = torch.cat([part.float() for part in super().parts(name, slices)])
        for each in beside:
            rows = each.piece.rows
            start, stop = max(slices[0].start, rows.start), min(slices[0].stop, rows.stop)
            if start < stop:
                here = slice(start - rows.start, stop - rows.start)
                A, B = (self._matrices[name].read(()).float() for name in (each.A, each.B))
                factors = Factors.unpacked(A, B, each.experts).of_share(each.piece)
                added = delta(factors, each.scale, (here, *slices[1:]))
                value[start - slices[0].start : stop - slices[0].start] += added
        yield value

    def _located(self) -> dict[str, list[_Beside]]:
        """Finds the matrices for each of our weights.

        Raises:
            WeightsError: One matches no weight, has another shape, or all updates are zero.
        """
        names = self._matrices
        located, used, stacks = dict[str, list[_Beside]](), set[str](), self._stacks(names)
        for name, form in product(self._shapes, (self.family, self.family.in_memory())):
            pieces = form.pieces(name, self._shapes[name]) if form.find(name) else ()
            for piece in pieces:
                if len(piece.size) < 2 or piece.name.rpartition(".")[2] not in ("weight", *stacks):
                    continue  # biases, including those of experts
                stored = self.family.stored_name(piece.name, self.config)
                for before in {stored, piece.name}:  # the class may have no prefix
                    path = BEFORE + module_of(before, stacks)
                    beside = _Beside(piece, path + _A, path + _B, 0.0)
                    if beside.A not in names or beside.B not in names:
                        continue
                    if any(each.A == beside.A for each in located.get(name, [])):
                        continue  # both forms have the same name for it
                    scale = self._checked_scale(beside, before)
                    located.setdefault(name, []).append(beside._replace(scale=scale))
                    used |= {beside.A, beside.B}
        if strange := sorted(set(names) - used):
            raise WeightsError(
                f"{self.folder / ADAPTER_FILE}: {strange[0]} belongs to no weight of {self.base}; "
                f"adapters on embeddings and heads are not supported"
            )
        if not any(self._matrices[name].read(()).any() for name in names if name.endswith(_B)):
            raise WeightsError(f"{self.folder / ADAPTER_FILE}: adds nothing: all lora_B are zero")
        return located

    def _stacks(self, names: Collection[str]) -> set[str]:
        """Returns the stacks of experts that have adapters."""
        if any(".base_layer." in name for name in names):
            return set(STACKS)
        listed = self._settings.target_parameters or []
        return {
            stack for stack in STACKS if any(f".{each}".endswith(f".{stack}") for each in listed)
        }

    def _checked_scale(self, beside: _Beside, tensor: str) -> float:
        """Checks the shapes of two matrices and returns the factor of their product.

        Raises:
            WeightsError: A shape or dtype does not match the weight and the rank.
        """
        settings, experts = self._settings, beside.experts
        listed = settings.target_parameters or []
        by_parameter = any(f".{tensor}".endswith(f".{each}") for each in listed)
        key = tensor if by_parameter else tensor.removesuffix(".weight")
        rank = _by_pattern(settings.rank_pattern, key, settings.r)
        alpha = _by_pattern(settings.alpha_pattern, key, settings.lora_alpha)
        share = beside.piece.rule.share
        outputs, inputs = beside.piece.size[-2:]
        if len(beside.piece.size) == 3:
            inputs, outputs = outputs, inputs
        outputs *= 1 if share is None else share.count
        wanted = {
            beside.A: Wanted((experts * rank, inputs)),
            beside.B: Wanted((outputs, rank * experts)),
        }
        rule = f"rank {rank} beside {tensor} of {self.base}"
        self._matrices.refuse(self._matrices.faults(wanted, rule))
        return alpha / (math.sqrt(rank) if settings.use_rslora else rank)


def _by_pattern(patterns: Mapping[str, T] | None, name: str, default: T) -> T:
    """Returns the value of the first pattern that a name ends with, as in peft."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def _settings(tree: dict[str, Any], place: Path) -> _AdapterConfig:
    """Reads the keys that determine the update.

    Raises:
        WeightsError: One is missing or invalid, or needs something that is not supported.
    """
    fields = _AdapterConfig.model_fields
    for key, value in tree.items():
        if key not in {*fields, *_HARMLESS} and value not in (None, False, [], {}):
            raise WeightsError(
                f"{place}: {key}: {value!r:.60} is not supported; it must be null or false"
            )
    try:
        settings = _AdapterConfig.model_validate({k: v for k, v in tree.items() if k in fields})
        for pattern in (*(settings.rank_pattern or {}), *(settings.alpha_pattern or {})):
            re.compile(pattern)
    except ValidationError as error:
        raise WeightsError(f"{place}: {fault_of(error)}") from None
    except re.error as error:
        raise WeightsError(f"{place}: rank_pattern or alpha_pattern: {error}") from None
    return settings
