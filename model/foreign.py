"""Models of transformers that are no family of ours: read, evaluated and analysed, not trained.

transformers 5 calls the experts of all its mixtures in one way:

    experts(hidden_states [N, D], top_k_index [N, K], top_k_weights [N, K])

`blocks.3.feed_forward` here observes the experts of layer 3 there: a hook before such a call gives
the decisions to our modules, whose own hooks may change them, and takes them back. So measures and
interventions need not know the model. The module that has a matrix [E, D] beside the experts is the
router; the first product in it gives the logits, and whatever it does with them stays its own.

Only whole models run: all blocks but the last do nothing, and the last runs the model on the token
ids. A measure that reads again from some block on reads everything again.

Shapes: B windows, T tokens, V vocabulary, N tokens of a layer, E experts, K of a token, D width.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from polyad.model.attention import KeyValueCache
from polyad.model.block import Block, FeedForwardConfig
from polyad.model.build import MODELS, ModelKind
from polyad.model.decoder import DecoderSettings
from polyad.model.families.keys import WeightsError, configurations
from polyad.model.output import ModelOutput
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.graph import Graph
from polyad.model.smoe.layer import Dispatcher, SelectingMoE
from polyad.model.smoe.router import Router, Selected, Selection, spread

KIND: Literal["transformers"] = "transformers"
TOLERANCE = 0.02
"""Largest relative deviation of routing weights from scores of a known form, in bf16 too."""
USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
"""Names of the number of experts of a token in config.json."""
_PRODUCTS = (torch.nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)
_SUMS = (torch.add, Tensor.add, Tensor.__add__)
_CHOICES = (torch.topk, Tensor.topk)
_BLOCK = re.compile(r"(.*?\.)?\d+(?=\.)")
"""Matches the name of the block in that of a module."""


class TheirConfig(DecoderSettings):
    """A model of transformers, by the content of its config.json."""

    kind: Literal["transformers"] = KIND
    """The kind of model; it can be evaluated and analysed, but not trained."""
    config: dict[str, Any]
    """The content of config.json."""

    def of_text(self, *names: str) -> int | None:
        """Returns the first of some whole numbers that config.json has; of a list, its first."""
        tree = self.config | (self.config.get("text_config") or {})
        for value in map(tree.get, names):
            number = value[0] if isinstance(value, list) and value else value
            if type(number) is int:
                return number
        return None

    def has_experts(self) -> bool:
        """Returns True: other models are not opened."""
        return True

    def build_block(self, feed_forward: FeedForwardConfig, number: int) -> Block:
        """Its blocks are the library's."""
        raise NotImplementedError

    def in_words(self) -> str:
        """Describes the model for the user."""
        return f"{self.config['model_type']} of transformers, {self.num_layers} blocks"


class _Decided(Selection):
    """Passes on what the library's router has selected."""

    own: Selected

    def forward(self, scores_NE: Tensor, logits_NE: Tensor | None = None) -> Selected:
        """See `Selection.forward`."""
        return self.own


class _Dispatcher(Dispatcher):
    """Runs the library's experts, or passes on their output."""

    def forward(self, tokens_ND: Tensor, selected: Selected, experts: Any, *_: Any) -> Any:
        """See `Dispatcher.forward`; `experts` may be their output."""
        if isinstance(experts, Tensor):
            return experts, None
        weights_NK = selected.weights_NK.to(tokens_ND.dtype)
        # Through `forward`, which runs no hooks.
        return experts.forward(tokens_ND, selected.expert_ids_NK, weights_NK), None


class TheirExperts(SelectingMoE):
    """The experts of one layer of the library's model.

    Args:
        theirs: The library's model.
        block: The name of the block in it that they are in.
        name: Their own name in it.
        config: The configuration of the model.

    Attributes:
        holder: The module that has the experts.
        their_router: The module with the matrix of the router; None if none was found.
        their_block: The block that they are in.
    """

    config: SparseMoEConfig
    router: Any
    experts: Any
    holder: nn.Module
    their_router: nn.Module | None
    their_block: nn.Module

    def __init__(self, theirs: nn.Module, block: str, name: str, config: TheirConfig) -> None:
        nn.Module.__init__(self)
        experts: Any = theirs.get_submodule(name)
        groups = config.of_text("n_group") or 1
        self.config = SparseMoEConfig(
            num_experts=experts.num_experts,
            top_k=config.of_text(*USED) or 1,
            num_groups=groups,
            top_groups=config.of_text("topk_group") or groups,
        )
        # The place of the hooks on logits, scores and selection.
        score: Any = nn.Identity()
        self.router = Router(score, Graph(), _Decided(self.config))
        self.dispatcher = _Dispatcher()
        self.output_bias = None
        # Not registered: they belong to the library's model.
        self.__dict__ |= {
            "experts": experts,
            "holder": theirs.get_submodule(name.rpartition(".")[0]),
            "their_router": _router_beside(theirs, name, experts),
            "their_block": theirs.get_submodule(block),
        }
        self.scored: Callable[[Tensor], Tensor] | None = None
        """Computes scores of all experts from logits; None if their form is not known."""
        self.seen = _Logits(self)
        """What was seen of the router in the last forward pass."""
        self.watch = ExitStack()
        """Watches what lies between the router and the experts, until it is closed."""
        self._call = inspect.signature(experts.forward)
        self._selected: Selected | None = None
        self._tokens_ND = torch.empty(0)
        experts.register_forward_pre_hook(self._before, with_kwargs=True)
        experts.register_forward_hook(self._after)
        if self.their_router is not None:
            self.their_router.register_forward_pre_hook(self._begin)

    def _begin(self, module: nn.Module, arguments: Any) -> None:
        self.watch.close()
        self.seen = self.watch.enter_context(_Logits(self))

    def _before(self, module: nn.Module, arguments: Any, named: Any) -> Any:
        self.watch.close()
        self._tokens_ND, their_ids_NK, their_weights_NK = self._call.bind(*arguments, **named).args
        # Some routers do not sort. The library's experts keep its order, and so its rounding.
        order_NK = their_weights_NK.argsort(dim=1, descending=True, stable=True)
        weights_NK, ids_NK = (x.gather(1, order_NK) for x in (their_weights_NK, their_ids_NK))
        own = Selected.of(weights_NK, ids_NK, self.config.num_experts)
        self._check(own)
        self.router.selection.own = own
        self._selected = self.router.selection(self.scores(own))
        back_NK = order_NK.argsort(dim=1)
        ids_NK = self._selected.expert_ids_NK.gather(1, back_NK).to(their_ids_NK.dtype)
        weights_NK = self._selected.weights_NK.gather(1, back_NK).to(their_weights_NK.dtype)
        return (self._tokens_ND, ids_NK, weights_NK), {}

    def _after(self, module: nn.Module, arguments: Any, output_ND: Tensor) -> Tensor:
        result: Tensor = self.dispatcher(self._tokens_ND, self._selected, output_ND)[0]
        return result

    def _check(self, own: Selected) -> None:
        """Checks that the router has followed a change of its logits."""
        if self.seen.logits_NE is None and self.router.score._forward_hooks:
            raise WeightsError("how: the scores of this router are not known, so cannot be changed")
        removed_NE = self.seen.removed_NE
        if removed_NE is not None and bool(removed_NE.gather(1, own.expert_ids_NK).any()):
            raise WeightsError("how: prune: this router selects experts whatever their scores are")

    def scores(self, own: Selected) -> Tensor:
        """The scores of all experts, or where they are not known the weights of those chosen."""
        if self.scored is None or self.seen.logits_NE is None:
            return spread(own, self.config.num_experts).float()
        return self.scored(self.seen.logits_NE.float())

    def learn(self) -> None:
        """Learns from the last forward pass how many experts a token uses, and how logits become
        scores: the form to which weights of a token's experts are in proportion."""
        own, logits_NE = self.router.selection.own, self.seen.logits_NE
        used = self.router.selection.top_k = own.weights_NK.shape[1]
        self.config = self.config.model_copy(update={"top_k": used})
        if logits_NE is None or len(logits_NE) != len(own.weights_NK):
            return
        least = TOLERANCE
        for scored in (_softmax, torch.sigmoid, _softplus_root):
            own_NK = scored(logits_NE.float()).gather(1, own.expert_ids_NK)
            share_NK = own.weights_NK.float() / own_NK.clamp_min(1e-30)
            dims = 1 if share_NK.shape[1] > 1 else (0, 1)
            mean = share_NK.mean(dims, keepdim=True).clamp_min(1e-30)
            if (deviation := float((share_NK / mean - 1).abs().max())) < least:
                least, self.scored = deviation, scored
        best_NK = logits_NE.topk(used).indices.sort().values
        takes_best = torch.equal(best_NK, own.expert_ids_NK.sort().values)
        self.router.by_sigmoid = self.scored is not _softmax or not takes_best

    def gate_columns(self) -> list[Tensor]:
        """Returns the matrix of the router, [E, D]."""
        if self.their_router is None:
            raise WeightsError("how: steer: the matrix of this router was not found")
        return _matrices(self.their_router, self.config.num_experts)

    def add_bias(self, y_ND: Tensor, selected: Selected) -> Tensor:
        """The library's experts have added theirs."""
        return y_ND


def _softmax(logits_NE: Tensor) -> Tensor:
    return logits_NE.softmax(-1)


def _softplus_root(logits_NE: Tensor) -> Tensor:
    """DeepSeek-V4's scores."""
    return torch.nn.functional.softplus(logits_NE).sqrt()


class _Logits(TorchFunctionMode):
    """Watches a router: gives its logits to the hooks of `score`, and where these remove experts,
    with a logit of minus infinity, keeps them from being chosen for their bias alone."""

    def __init__(self, layer: TheirExperts) -> None:
        super().__init__()
        self.layer, self.experts = layer, layer.config.num_experts
        self.logits_NE: Tensor | None = None
        self.removed_NE: Tensor | None = None

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        removed_NE = self.removed_NE
        if removed_NE is not None and function in _CHOICES and self._is_whole(arguments[0]):
            last = arguments[0].masked_fill(removed_NE.view_as(arguments[0]), -torch.inf)
            arguments = (last, *arguments[1:])
        result = function(*arguments, **(named or {}))
        if not self._is_whole(result):
            return result
        if self.logits_NE is None and function in _PRODUCTS:
            flat_NE = result.reshape(-1, self.experts)
            self.logits_NE = self.layer.router.score(flat_NE)
            if self.logits_NE is not flat_NE and bool(self.logits_NE.isneginf().any()):
                self.removed_NE = self.logits_NE.isneginf()
            return self.logits_NE.view_as(result)
        if removed_NE is not None and function in _SUMS:
            return result.masked_fill(removed_NE.view_as(result), -torch.inf)
        return result

    def _is_whole(self, x: Any) -> bool:
        """Whether this is a tensor with a value for every token and expert."""
        whole = isinstance(x, Tensor) and x.is_floating_point() and x.shape[-1:] == (self.experts,)
        return whole and (self.removed_NE is None or x.numel() == self.removed_NE.numel())


class _TheirBlock(nn.Module):
    """A block, of which only the last does something."""

    run: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor, given: Any = None) -> tuple[Tensor, None]:
        """Returns token ids, or the logits of the model."""
        return (x if self.run is None else self.run(x)), None


class TheirModel(nn.Module):
    """A model of transformers with the interface of our models of text.

    Args:
        config: Its configuration.
        theirs: The model; None: one without values, on the current default device.

    Raises:
        WeightsError: It is no causal language model, or has no such experts.
    """

    def __init__(self, config: TheirConfig, theirs: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        self.theirs = built(config.config) if theirs is None else theirs
        self.blocks = nn.ModuleList(_TheirBlock() for _ in range(config.num_layers))
        self.blocks[-1].__dict__["run"] = self._logits
        self._layers = list[TheirExperts]()
        for block, name in _experts_by_block(self.theirs).items():
            layer = TheirExperts(self.theirs, block, name, config)
            self.blocks[int(block.rpartition(".")[2])].feed_forward = layer
            self._layers.append(layer)
        if not self._layers:
            raise WeightsError(
                f"model_type: {config.config['model_type']!r} is not supported: it has no experts "
                "that transformers calls by its common interface"
            )

    def embed(self, input_ids_BT: Tensor) -> Tensor:
        """Returns the input of the first block: the ids."""
        return input_ids_BT

    def _logits(self, input_ids_BT: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        past = None if cache is None else cache.past
        try:
            output = self.theirs(
                input_ids=input_ids_BT, past_key_values=past, use_cache=cache is not None
            )
        finally:
            for layer in self._layers:
                layer.watch.close()
        if cache is not None:
            cache.past = output.past_key_values
        logits_BTV: Tensor = output.logits
        return logits_BTV

    def score(self, logits_BTV: Tensor, target_ids_BT: Tensor | None = None) -> Tensor:
        """Returns logits, or with targets the loss of each in nats [B, T]."""
        if target_ids_BT is None:
            return logits_BTV
        flat_NV, flat_N = logits_BTV.flatten(0, 1).float(), target_ids_BT.flatten()
        return cross_entropy(flat_NV, flat_N, reduction="none").view(target_ids_BT.shape)

    def forward(
        self,
        input_ids_BT: Tensor,
        cache: KeyValueCache | None = None,
        target_ids_BT: Tensor | None = None,
    ) -> ModelOutput:
        """Returns logits [B, T, V], or with targets the loss of each [B, T]."""
        return ModelOutput(self.score(self._logits(input_ids_BT, cache), target_ids_BT), ())

    @torch.inference_mode()
    def learn(self) -> "TheirModel":
        """Reads a few tokens, and learns of every layer what `TheirExperts.learn` says."""
        device = next(self.parameters()).device
        size = self.config.number("vocab_size")
        self.eval()(torch.arange(16, device=device).mul(size // 17).add(1).unsqueeze(0))
        for layer in self._layers:
            layer.learn()
        return self

    @property
    def without_scores(self) -> list[int]:
        """Numbers of the blocks whose scores of all experts are not known."""
        layers = (getattr(block, "feed_forward", None) for block in self.blocks)
        return [n for n, layer in enumerate(layers) if layer is not None and layer.scored is None]


MODELS[KIND] = ModelKind(TheirConfig, TheirModel)


def _experts_by_block(theirs: nn.Module) -> dict[str, str]:
    """Returns the names of the experts of a model of transformers that are called by the common
    interface, by the name of their block; of a block with several the first, those of text."""
    names = dict[str, str]()
    for name, module in theirs.named_modules():
        block = _BLOCK.match(name)
        if block and hasattr(module, "_is_expert_parallel") and hasattr(module, "num_experts"):
            if module._is_expert_parallel:
                raise WeightsError(f"{name}: its experts are split over processes: not supported")
            names.setdefault(block[0], name)
    return names


def _matrices(module: nn.Module, experts: int) -> list[Tensor]:
    """Returns the matrices [E, D] that a module itself has."""
    own = module.parameters(recurse=False)
    return [each for each in own if each.dim() == 2 and len(each) == experts]


def _router_beside(theirs: nn.Module, name: str, experts: Any) -> nn.Module | None:
    """Returns the module with a matrix [E, D] that is nearest to the experts of a name."""
    within = set(experts.modules())
    while "." in name and not name.rpartition(".")[2].isdigit():
        name = name.rpartition(".")[0]
        found: list[tuple[str, nn.Module]] = [
            (path, module)
            for path, module in theirs.get_submodule(name).named_modules()
            if module not in within and _matrices(module, experts.num_experts)
        ]
        if found:  # the first that is called so, or else the first
            return min(found, key=lambda each: re.search("gate|rout", each[0]) is None)[1]
    return None


def built(tree: Mapping[str, Any]) -> nn.Module:
    """Builds a model of transformers on the current default device."""
    builder, config = class_of(tree)
    model: nn.Module = builder.from_config(config)
    return model


def class_of(tree: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the class of transformers that builds the language model of a configuration, and the
    configuration as the library reads it."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = tree["model_type"]
    config = configurations(kind)[kind].from_dict(dict(tree))
    for each in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in (known := each._model_mapping):
            name = str(getattr(known[type(config)], "__name__", ""))
            if name.endswith(("ForCausalLM", "ForConditionalGeneration")):  # no diffusion
                return each, config
    raise WeightsError(
        f"model_type: {kind!r} is not supported: transformers has no causal language model of it"
    )
