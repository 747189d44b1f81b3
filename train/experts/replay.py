"""Router replay: the experts that tokens were sent to are recorded, and taken again.

    with recording(model) as recorder:          with replaying(other, choices):
        model(ids)                                  other(ids).logits
    choices = recorder.choices()

What is replayed are the experts alone, of every layer that selects whole ones. Their weights follow
from the scores of the model that replays, and give these a gradient. So layouts, precisions,
kernels and checkpoints can be compared with equal routing, and a model can be trained on the
experts that another engine has chosen, as in reinforcement learning (`moe_enable_routing_replay`
of Megatron-LM).

A recording is rows, one for each sequence or image, in the order in which they were read. Padding
is no part of it, so rows may be read in other micro-batches. The experts are those before a
capacity drops any.

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

from polyad.data.files import partial_of, writing
from polyad.data.json_reader import parse_json
from polyad.model.feedforward import BlockInput
from polyad.model.regions import Region
from polyad.model.smoe.layer import Router, SelectingMoE
from polyad.parallel import comm
from polyad.train.errors import ConfigError, RunError, one_line
from polyad.train.experts.probing import routed_layers, uncompiled

FORMAT = "polyad routing 1"
"""The metadata `format` of a file of choices."""
_IDS, _TOKENS = ".expert_ids", ".tokens"
"""How the names of a layer's two tensors end."""


class LayerChoices(NamedTuple):
    """The experts that one layer sent the tokens of some rows to, on the CPU."""

    expert_ids_NK: Tensor
    """Indices of the experts, whole numbers of any type, the best first."""
    tokens_R: Tensor
    """Tokens of each row without padding; they add up to N."""
    num_experts: int
    """E."""

    @classmethod
    def joined(cls, parts: "Sequence[LayerChoices]") -> "LayerChoices":
        """The rows of all parts, one after the other."""
        ids, tokens, experts = zip(*parts, strict=True)
        return cls(torch.cat(ids), torch.cat(tokens), experts[0])


Choices: TypeAlias = Mapping[str, LayerChoices]
"""By the name of the layer, as in names of parameters: blocks.3.feed_forward."""


class Recorder:
    """What a model has chosen in the forward passes of `recording`.

    Args:
        layers: names of the layers.
    """

    def __init__(self, layers: Sequence[str]) -> None:
        self.passes: dict[str, list[LayerChoices]] = {name: [] for name in layers}
        """What each forward pass has added, of this process."""

    def choices(self) -> Choices:
        """All rows of this process, in the order in which they were read.

        Raises:
            RunError: there was no forward pass.
        """
        if not all(self.passes.values()):
            raise RunError("no routing was recorded: there was no forward pass")
        return {name: LayerChoices.joined(each) for name, each in self.passes.items()}

    def of_all(self, world: comm.World) -> Choices | None:
        """The rows of all processes in the order of their samples, which are dealt out batch by
        batch; all processes call it together.

        Args:
            world: this process.

        Returns:
            On rank 0; None on the others.
        """
        everyone = comm.gather_to_main(self.passes)
        if everyone is None:
            return None
        groups = everyone[:: world.tensor_parallel_size]  # the others have seen the same rows
        together = Recorder(list(self.passes))
        for name, passes in together.passes.items():
            for of_pass in zip(*(group[name] for group in groups), strict=True):
                passes.extend(of_pass)
        return together.choices()


def first_rows(choices: Choices, rows: int) -> Choices:
    """Leaves the first rows of a recording, and not those that filled up the last batch.

    Args:
        choices: of at least as many rows.
        rows: that are left.
    """
    left = {}
    for name, (ids_NK, tokens_R, experts) in choices.items():
        tokens_R = tokens_R[:rows]
        left[name] = LayerChoices(ids_NK[: int(tokens_R.sum())], tokens_R, experts)
    return left


@contextmanager
def recording(model: nn.Module) -> Iterator[Recorder]:
    """Records which experts every layer selects, in each forward pass inside the context.

    Compiled blocks run uncompiled meanwhile. A block that is computed again in the backward pass
    counts once.

    Args:
        model: of any kind; an engine's `module`. On several processes each records its own rows.

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

    The rows of a recording are taken in order: the first forward pass takes as many of the first
    ones as it has, and so on. Over several processes they are dealt out batch by batch, as samples
    are. A backward pass that computes blocks again has to be inside the context, before the next
    forward pass that it is not of. Compiled blocks run uncompiled meanwhile.

    Args:
        model: with the layers and the experts of the recording.
        choices: recorded, or made by another program.
        rank: number of this process among those that read other samples.
        ranks: how many of them there are.
        fills: whether rows after the last one are those that fill up a batch, which take the
            experts of the last row.

    Raises:
        ConfigError: the recording is not of such a model, or forward passes have other rows.
        RunError: a block is computed again, and it is not known with which experts.
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
    """Sends token i of a micro-batch to experts i K to i K + K - 1, counted round all E, for good.

    Loads of experts are then equal, or differ by one token where E does not divide all
    assignments: a step takes what it takes where routing is balanced. What such a model learns
    says nothing. Weights still follow from the scores.

    Args:
        model: not compiled yet.

    Raises:
        ConfigError: no layer of it selects experts.
    """
    for router in _selecting(model).values():
        selection = router.selection
        selection.forced = functools.partial(_in_turn, num_experts=selection.num_experts)


def check_choices(choices: Choices, origin: str) -> None:
    """Checks that the numbers of a recording can be experts of rows.

    Args:
        choices: of any origin.
        origin: what an error calls it.

    Raises:
        ConfigError: they cannot.
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
    """Writes a recording as safetensors, whole or not at all.

    Args:
        path: the file; what is there is replaced.
        choices: of all processes.
        about: what else the file's metadata says of them.

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
        partial_of(path).write_bytes(content)
        partial_of(path).replace(path)


def read_choices(path: Path) -> tuple[Choices, dict[str, str]]:
    """Reads a recording.

    Args:
        path: as `write_choices` writes it.

    Returns:
        The choices, and the metadata.

    Raises:
        ConfigError: it cannot be read, or is none.
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
    """What a layer's router does in a context: it tells which rows it reads, and asks for experts.

    Args:
        name: of the layer.
        router: of the layer.
    """

    def __init__(self, name: str, router: Router) -> None:
        self.name, self.router = name, router
        self.outer = router.selection.forced

    def look(self, _: nn.Module, given: tuple[Any, ...]) -> None:
        """Hooks the router."""
        self.reads(_tokens(*given[:2]))

    def __call__(self, best_NK: Tensor) -> Tensor:
        """The region of the selection."""
        return self.experts(self.outer(best_NK))

    @abstractmethod
    def reads(self, tokens_B: Tensor) -> None:
        """Is told the tokens of each row of a forward pass."""

    @abstractmethod
    def experts(self, best_NK: Tensor) -> Tensor:
        """The experts that are taken."""

    def ended(self) -> Region:
        """What the selection has afterwards."""
        return self.outer


class _Record(_Forced):
    """Keeps what a layer has selected, and leaves it."""

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
    """Puts recorded experts in the place of those that a layer selects."""

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
        """Rows that all processes have read."""
        self._now_NK: Tensor | None = None
        """The experts of the newest forward pass."""
        self._passes = 0
        """Forward passes with gradients since one was computed again."""

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
        """Refuses to compute a replayed forward pass again, until there is another one."""
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
    """Lets each of the layers say which experts its router selects."""
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
    """Checks that a recording is of such a model."""
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
    """Tokens of each row without padding [B], on the CPU."""
    if given.real is not None:
        return given.real.lengths_B.to("cpu", torch.int32)
    return torch.full(u_BTD.shape[:1], u_BTD.shape[1], dtype=torch.int32)


def _in_turn(best_NK: Tensor, *, num_experts: int) -> Tensor:
    tokens, top_k = best_NK.shape
    assignments_A = torch.arange(tokens * top_k, device=best_NK.device)
    return assignments_A.remainder(num_experts).view(tokens, top_k)


def _in_backward() -> bool:
    """Whether autograd runs, in which a forward pass is one that is computed again."""
    return torch._C._current_graph_task_id() != -1
