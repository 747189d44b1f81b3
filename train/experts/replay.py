"""Router replay: the experts of tokens are recorded, and used again.

    with recording(model) as recorder:          with replaying(other, choices):
        model(ids)                                  other(ids).logits
    choices = recorder.choices()

Only the selection is replayed, of every layer that selects whole experts. Weights are computed from
the scores of the replaying model, which get a gradient. So layouts, precisions, kernels and
checkpoints can be compared under equal routing, and a model can be trained on another engine's
experts, as in reinforcement learning (`moe_enable_routing_replay` of Megatron-LM).

A recording consists of rows, one for each sequence or image, in reading order. Padding is not
recorded, so rows may be read in different micro-batches. The experts are those before a capacity
drops any.

Shapes: B rows of a forward pass, R rows of a recording, N tokens of rows without padding, K experts
of a token, E experts.
"""

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from polyad.data.files import write_whole, writing
from polyad.data.json_reader import parse_json
from polyad.model.feedforward import BlockInput
from polyad.model.layers import Region
from polyad.model.smoe.layer import Router, SelectingMoE
from polyad.parallel import comm
from polyad.train.errors import ConfigError, RunError, one_line
from polyad.train.experts.probing import routed_layers, uncompiled

FORMAT = "polyad routing 1"
"""The metadata `format` of a file of choices."""
_IDS, _TOKENS = ".expert_ids", ".tokens"
"""Suffixes of the names of a layer's two tensors."""


class LayerChoices(NamedTuple):
    """The experts that one layer selected for the tokens of some rows, on the CPU."""

    expert_ids_NK: Tensor
    """Indices of the experts, of any integer type, the best first."""
    tokens_R: Tensor
    """Number of tokens in each row without padding; the sum is N."""
    num_experts: int
    """E."""

    @classmethod
    def joined(cls, parts: "Sequence[LayerChoices]") -> "LayerChoices":
        """Concatenates the rows of all parts."""
        ids, tokens, experts = zip(*parts, strict=True)
        return cls(torch.cat(ids), torch.cat(tokens), experts[0])


Choices: TypeAlias = Mapping[str, LayerChoices]
"""Choices by layer name, as in parameter names: blocks.3.feed_forward."""


class Recorder:
    """The selections of a model in the forward passes of `recording`.

    Args:
        layers: names of the layers.
    """

    def __init__(self, layers: Sequence[str]) -> None:
        self.passes: dict[str, list[LayerChoices]] = {name: [] for name in layers}
        """This process's choices of each forward pass."""

    def choices(self) -> Choices:
        """All rows of this process, in reading order.

        Raises:
            RunError: there was no forward pass.
        """
        if not all(self.passes.values()):
            raise RunError("no routing was recorded: there was no forward pass")
        return {name: LayerChoices.joined(each) for name, each in self.passes.items()}

    def of_all(self, world: comm.World) -> Choices | None:
        """Gathers the rows of all processes in the order of their samples, which are distributed
        batch by batch; all processes call this together.

        Args:
            world: this process.

        Returns:
            The choices on rank 0; None on other ranks.
        """
        everyone = comm.gather_to_main(self.passes)
        if everyone is None:
            return None
        groups = everyone[:: world.tensor_parallel_size]  # the others have the same rows
        together = Recorder(list(self.passes))
        for name, passes in together.passes.items():
            for of_pass in zip(*(group[name] for group in groups), strict=True):
                passes.extend(of_pass)
        return together.choices()


def first_rows(choices: Choices, rows: int) -> Choices:
    """Keeps the first rows of a recording, without those that padded the last batch.

    Args:
        choices: at least as many rows.
        rows: number of rows to keep.
    """
    left = {}
    for name, (ids_NK, tokens_R, experts) in choices.items():
        tokens_R = tokens_R[:rows]
        left[name] = LayerChoices(ids_NK[: int(tokens_R.sum())], tokens_R, experts)
    return left


@contextmanager
def recording(model: nn.Module) -> Iterator[Recorder]:
    """Records which experts every layer selects, in each forward pass inside the context.

    Compiled blocks run uncompiled inside it. A block that is recomputed in the backward pass counts
    once.

    Args:
        model: any model, or an engine's `module`. Each process records its own rows.

    Raises:
        ConfigError: no layer of it selects experts.
    """
    routers = _selecting(model)
    recorder = Recorder(list(routers))
    with _forcing(
        model, [_Record(name, each, recorder.passes[name]) for name, each in routers.items()]
    ):
        yield recorder


@contextmanager
def replaying(
    model: nn.Module, choices: Choices, *, rank: int = 0, ranks: int = 1, fills: bool = False
) -> Iterator[None]:
    """Sends tokens to recorded experts, in the forward passes inside the context.

    The rows of a recording are consumed in order, as many per forward pass as it has rows. On
    several processes they are distributed batch by batch, like samples. A backward pass that
    recomputes blocks must run inside the context, before the forward pass of another micro-batch.
    Compiled blocks run uncompiled inside it.

    Args:
        model: a model with the layers and experts of the recording.
        choices: recorded, or made by another program.
        rank: number of this process among those that read different samples.
        ranks: number of these processes.
        fills: whether rows after the last one pad a batch and use the experts of the last row.

    Raises:
        ConfigError: the recording belongs to another model, or forward passes have other rows.
        RunError: a block is recomputed, and its experts are not known any more.
    """
    routers = _selecting(model)
    check_choices(choices, "the recording")
    _check_model(choices, routers)
    recomputes = getattr(getattr(model, "config", None), "recompute", "none") == "block"
    regions = [
        _Replay(name, each, choices[name], (rank, ranks), fills=fills, recomputes=recomputes)
        for name, each in routers.items()
    ]
    with _forcing(model, regions):
        yield


def force_equal_loads(model: nn.Module) -> None:
    """Permanently sends token i of a micro-batch to experts i K to i K + K - 1, modulo E.

    Expert loads are then equal, or differ by one token if E does not divide the number of
    assignments, so that a step takes the time of balanced routing. What such a model learns is
    meaningless. Weights are still computed from the scores.

    Args:
        model: not compiled yet.

    Raises:
        ConfigError: no layer of it selects experts.
    """
    for router in _selecting(model).values():
        selection = router.selection
        selection.forced = functools.partial(_in_turn, num_experts=selection.num_experts)


def check_choices(choices: Choices, origin: str) -> None:
    """Checks that the numbers in a recording are valid experts and rows.

    Args:
        choices: choices of any origin.
        origin: name of the recording in errors.

    Raises:
        ConfigError: they are not.
    """
    for name, (ids_NK, tokens_R, experts) in choices.items():
        place = f"{origin}: {name}"
        whole = not (ids_NK.is_floating_point() or tokens_R.is_floating_point())
        if ids_NK.dim() != 2 or tokens_R.dim() != 1 or not whole:
            raise ConfigError(f"{place}: whole numbers [tokens, experts] and [rows] are needed")
        if not ids_NK.numel() or tokens_R.min() < 0 or int(tokens_R.sum()) != len(ids_NK):
            raise ConfigError(
                f"{place}: its rows have {int(tokens_R.sum()):,} tokens, and experts are named of "
                f"{len(ids_NK):,}"
            )
        low, high = int(ids_NK.min()), int(ids_NK.max())
        if low < 0 or high >= experts:
            wrong = low if low < 0 else high
            raise ConfigError(f"{place}: expert {wrong} is not one of 0 to {experts - 1}")
        twice_N = (ids_NK.sort(-1).values.diff(dim=-1) == 0).any(-1)
        if twice_N.any():
            token = int(twice_N.nonzero()[0])
            named = ids_NK[token].tolist()
            raise ConfigError(f"{place}: token {token} has the same expert twice: {named}")


def write_choices(path: Path, choices: Choices, about: Mapping[str, str]) -> None:
    """Writes a recording as safetensors, atomically.

    Args:
        path: the file, replaced if it exists.
        choices: choices of all processes.
        about: further metadata for the file.

    Raises:
        DataError: it cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for name, each in choices.items():
        tensors[name + _IDS] = each.expert_ids_NK.contiguous()
        tensors[name + _TOKENS] = each.tokens_R.contiguous()
    experts = json.dumps({name: each.num_experts for name, each in choices.items()})
    content = save(tensors, {"format": FORMAT, "experts": experts, **about})
    with writing(path):
        write_whole(path, content)


def read_choices(path: Path) -> tuple[Choices, dict[str, str]]:
    """Reads a recording.

    Args:
        path: a file written by `write_choices`.

    Returns:
        The choices, and the metadata.

    Raises:
        ConfigError: it cannot be read, or is not a recording.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path}: is damaged or not a safetensors file: {one_line(error)}"
        ) from None
    if about.get("format") != FORMAT:
        raise ConfigError(f"{path}: is not a recording of routing: its metadata has no {FORMAT!r}")
    experts = parse_json(about.get("experts", ""), f"{path}: experts", error=ConfigError)
    if not isinstance(experts, dict) or not all(type(e) is int and e > 0 for e in experts.values()):
        raise ConfigError(f"{path}: experts: the number of experts of each layer is needed")
    if sorted(tensors) != sorted(name + end for name in experts for end in (_IDS, _TOKENS)):
        raise ConfigError(f"{path}: contains tensors other than {_IDS} and {_TOKENS} of its layers")
    choices = {
        name: LayerChoices(tensors[name + _IDS], tensors[name + _TOKENS], number)
        for name, number in experts.items()
    }
    check_choices(choices, str(path))
    return choices, about


class _Forced(ABC):
    """Base of hooks on a layer's router, which get the rows that it reads and set its experts.

    Args:
        name: the layer's name.
        router: the layer's router.
    """

    def __init__(self, name: str, router: Router) -> None:
        self.name, self.router = name, router
        self.outer = router.selection.forced

    def look(self, _: nn.Module, given: tuple[Any, ...]) -> None:
        """Hooks the router."""
        self.reads(_tokens(*given[:2]))

    def __call__(self, best_NK: Tensor) -> Tensor:
        """Replaces the selection."""
        return self.experts(self.outer(best_NK))

    @abstractmethod
    def reads(self, tokens_B: Tensor) -> None:
        """Receives the number of tokens in each row of a forward pass."""

    @abstractmethod
    def experts(self, best_NK: Tensor) -> Tensor:
        """The experts to use."""

    def ended(self) -> Region:
        """The selection's region after the context."""
        return self.outer


class _Record(_Forced):
    """Records a layer's selection without changing it."""

    def __init__(self, name: str, router: Router, passes: list[LayerChoices]) -> None:
        super().__init__(name, router)
        self._passes, self._tokens_B = passes, torch.empty(0)

    def reads(self, tokens_B: Tensor) -> None:
        self._tokens_B = tokens_B

    def experts(self, best_NK: Tensor) -> Tensor:
        if not _in_backward():
            number = self.router.selection.num_experts
            kept_NK = best_NK.to("cpu", torch.int16 if number <= 1 << 15 else torch.int32)
            self._passes.append(LayerChoices(kept_NK, self._tokens_B, number))
        return best_NK


class _Replay(_Forced):
    """Replaces a layer's selection by recorded experts."""

    def __init__(
        self,
        name: str,
        router: Router,
        choices: LayerChoices,
        part: tuple[int, int],
        *,
        fills: bool,
        recomputes: bool,
    ) -> None:
        super().__init__(name, router)
        self._choices, self._fills, self._recomputes = choices, fills, recomputes
        self._rank, self._ranks = part
        self._ends: list[int] = choices.tokens_R.long().cumsum(0).tolist()
        self._done = 0
        """Number of rows that all processes have read."""
        self._now_NK: Tensor | None = None
        """The experts of the newest forward pass."""
        self._passes = 0
        """Number of forward passes with gradients since one was recomputed."""

    def reads(self, tokens_B: Tensor) -> None:
        if _in_backward():
            if self._now_NK is None or self._passes > 1:
                raise RunError(
                    f"{self.name}: a forward pass that is not the newest one is computed again "
                    f"(model.recompute: block): each needs its backward pass before the next one"
                )
            self._passes = 0
            return
        self._passes += torch.is_grad_enabled()
        first, count = self._done + self._rank * len(tokens_B), len(self._ends)
        self._done += self._ranks * len(tokens_B)
        parts = []
        for row, tokens in enumerate(tokens_B.tolist(), first):
            if row >= count and not self._fills:
                raise ConfigError(
                    f"{self.name}: the recording has {count:,} rows, and row {row} is read"
                )
            row = min(row, count - 1)
            recorded = int(self._choices.tokens_R[row])
            if recorded != tokens:
                raise ConfigError(
                    f"{self.name}: row {row} has {tokens:,} tokens, but {recorded:,} in the "
                    "recording, which was made with other data"
                )
            end = self._ends[row]
            parts.append(self._choices.expert_ids_NK[end - recorded : end])
        self._now_NK = torch.cat(parts)

    def experts(self, best_NK: Tensor) -> Tensor:
        assert self._now_NK is not None
        used, recorded = best_NK.shape[1], self._now_NK.shape[1]
        if used != recorded:
            raise ConfigError(
                f"{self.name}: a token uses {used} experts, but {recorded} in the recording"
            )
        return self._now_NK.to(best_NK)

    def ended(self) -> Region:
        """Refuses to recompute a replayed forward pass, until there is another one."""
        if not (self._recomputes and self._passes):
            return self.outer
        selection, outer = self.router.selection, self.outer

        def refuse(best_NK: Tensor) -> Tensor:
            if _in_backward():
                raise RunError(
                    f"{self.name}: a replayed forward pass is computed again (model.recompute: "
                    f"block) outside of `replaying`: its backward pass has to be inside"
                )
            selection.forced = outer
            return outer(best_NK)

        return refuse


@contextmanager
def _forcing(model: nn.Module, layers: Sequence[_Forced]) -> Iterator[None]:
    """A context in which these hooks determine which experts routers select."""
    handles = []
    for layer in layers:
        handles.append(layer.router.register_forward_pre_hook(layer.look))
        layer.router.selection.forced = layer
    try:
        with uncompiled(model):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for layer in layers:
            layer.router.selection.forced = layer.ended()


def _selecting(model: nn.Module) -> dict[str, Router]:
    """The routers of the layers that select whole experts, by name."""
    layers = routed_layers(model)
    found: dict[str, Router] = {}
    for layer in layers:
        module = model.get_submodule(layer.name)
        if isinstance(module, SelectingMoE):
            found[layer.name] = module.router
    if not found:
        if layers:
            kind = type(model.get_submodule(layers[0].name)).__name__
            why = f"{layers[0].name} ({kind}) gives a token a share of every expert, selects none"
        else:
            why = "the model has no experts"
        raise ConfigError(f"no routing can be recorded, replayed or forced: {why}")
    return found


def _check_model(choices: Choices, routers: Mapping[str, Router]) -> None:
    """Checks that a recording belongs to such a model."""
    if missing := [name for name in routers if name not in choices]:
        raise ConfigError(f"the recording has no layer {missing[0]}; it has {', '.join(choices)}")
    if other := [name for name in choices if name not in routers]:
        raise ConfigError(
            f"the recording has a layer {other[0]}, but the model has {', '.join(routers)}"
        )
    for name, router in routers.items():
        here, recorded = router.selection.num_experts, choices[name].num_experts
        if here != recorded:
            raise ConfigError(f"{name}: has {here} experts, but {recorded} in the recording")


def _tokens(u_BTD: Tensor, given: BlockInput) -> Tensor:
    """Number of tokens in each row without padding [B], on the CPU."""
    if given.real is not None:
        return given.real.lengths_B.to("cpu", torch.int32)
    return torch.full(u_BTD.shape[:1], u_BTD.shape[1], dtype=torch.int32)


def _in_turn(best_NK: Tensor, *, num_experts: int) -> Tensor:
    tokens, top_k = best_NK.shape
    assignments_A = torch.arange(tokens * top_k, device=best_NK.device)
    return assignments_A.remainder(num_experts).view(tokens, top_k)


def _in_backward() -> bool:
    """Whether autograd is running, so that a forward pass is a recomputation."""
    return torch._C._current_graph_task_id() != -1
