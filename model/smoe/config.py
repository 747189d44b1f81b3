"""The keys of a sparse mixture of experts, and the base class of all kinds that select experts."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from polyad.model.config import Count, NameIn, SectionError, whole_number_or
from polyad.model.feedforward import (
    Activation,
    DenseFeedForwardConfig,
    FeedForwardSettings,
    GatedActivation,
)

Positive = Annotated[float, Field(ge=1e-6, le=1e6)]
Probability = Annotated[float, Field(ge=0, lt=1)]
SCORES: dict[str, Callable[..., Any]] = {}
"""Builders of a router's scores by name, from a layer's configuration and the model's context;
`router.py` and plugins add them."""
GRAPHS: dict[str, Callable[..., Any]] = {}
"""The same for graphs of tokens, from `graph.py`."""
ScoreName = Annotated[str, NameIn(SCORES)]
GraphName = Annotated[str, NameIn(GRAPHS)]
PoolName = Literal["none", "document", "prefix"]
LOWEST_ENTROPY: Literal["lowest_entropy"] = "lowest_entropy"


def check_placement(value: object) -> object:
    """Checks the parsed value before pydantic, whose error for a union lists every member's.

    Raises:
        ValueError: The value is not a placement.
    """
    numbers, least = (value, 0) if isinstance(value, list) else ([value], 1)
    is_number = all(type(number) is int and number >= least for number in numbers)
    if not is_number or len(set(numbers)) < len(numbers):
        raise ValueError("1 or more, or a list of block numbers from 0, each once")
    return value


Placement: TypeAlias = Annotated[int | list[int], BeforeValidator(check_placement)]
"""Blocks that have something: 1 all of them, n the last of every n blocks, or a list of block
numbers, from 0."""


def is_placed(placement: Placement, block: int) -> bool:
    """Returns whether a placement has a block, given by its number from 0."""
    if isinstance(placement, list):
        return block in placement
    return (block + 1) % placement == 0


def at_most(key: str, value: int, limit_key: str, limit: int) -> None:
    """Checks that a value is at most another one.

    Raises:
        SectionError: It is more.
    """
    if value > limit:
        raise SectionError(f"@{key}: {value} is more than {limit_key}: {limit}")


class SelectingConfig(FeedForwardSettings, ABC):
    """The base class of kinds whose router selects whole experts per token, in some blocks."""

    num_experts: Annotated[int, Field(ge=2)] = 16
    """Number of experts E per block; in an emergent mixture it must divide the inner width."""
    router_noise: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Normal noise that is added to the router logits in training, independently for each token and
    expert, with a standard deviation of router_noise / num_experts (V-MoE: 1); 0: no noise."""
    score_width: Count | None = None
    """Width of the space in which the cosine score compares, in units; null: half of num_experts,
    but at least 8."""
    capacity_factor: Positive | None = None
    """Maximum number of assignments per expert in a micro-batch, as a multiple of an even share
    (EMoE's code: 1.5, in evaluation too); tokens beyond it are not processed by that expert. null:
    no token is ever dropped."""
    evaluation_capacity_factor: Positive | None = None
    """capacity_factor in evaluation (V-MoE trains with 1.05 and evaluates with 4); null: the same
    as in training. With num_experts / top_k or more, nothing is dropped."""

    if TYPE_CHECKING:  # each kind has other ones
        score: str

    placement_key: ClassVar[str]
    """The key that selects the blocks with experts."""

    @abstractmethod
    def used_experts(self) -> int:
        """Returns the number of experts per token in the first steps of a run."""

    def known_final_top_k(self) -> int:
        """Returns the number of experts per token in a run's last steps and in the final model."""
        return self.used_experts()

    @abstractmethod
    def dense(self) -> DenseFeedForwardConfig:
        """Returns the feed-forward of the blocks without experts."""

    def check_keys(self, top_key: str, *needs: tuple[str, str, bool]) -> None:
        """Checks the keys against one another.

        Args:
            top_key: The key that sets the number of experts per token.
            needs: For each key that another value may make ineffective: the value that any but its
                default needs, and whether it is there.

        Raises:
            SectionError: A token uses more experts than there are, or a key is ineffective.
        """
        at_most(top_key, self.known_final_top_k(), "@num_experts", self.num_experts)
        capacity = ("evaluation_capacity_factor", "@capacity_factor", bool(self.capacity_factor))
        for key, needed, is_there in (capacity, *needs):
            if not is_there and self.changed(key):
                raise SectionError(f"@{key}: {str(getattr(self, key)).lower()} needs {needed}")

    def check_model(self, *, num_layers: int, num_heads: int | None, causal: bool) -> None:
        """See `FeedForwardSettings.check_model`: the model has the listed blocks, some block has
        experts, and a language model drops no tokens depending on the rest of the batch."""
        placement = self._placement()
        listed = placement if isinstance(placement, list) else []
        routed = any(self.routes(block) for block in range(num_layers))
        if any(block >= num_layers for block in listed) or not routed:
            raise SectionError(
                f"@{self.placement_key}: {placement} is not allowed: the model has blocks 0 to "
                f"{num_layers - 1}, and at least one needs experts"
            )
        if causal and self.capacity_factor is not None:
            raise SectionError(
                f"@capacity_factor: {self.capacity_factor} drops tokens depending on the rest of "
                "the batch, which is not allowed in a language model; allowed: null"
            )

    def routes(self, block: int) -> bool:
        """Returns whether a block has experts.

        Args:
            block: Number of the block, from 0.
        """
        return is_placed(self._placement(), block)

    def of_block(self, block: int) -> Self | DenseFeedForwardConfig:
        """Returns the feed-forward of one block: this one, or a dense one.

        Args:
            block: Number of the block, from 0.
        """
        return self if self.routes(block) else self.dense()

    def capacity(self, training: bool) -> float | None:
        """Returns the capacity factor for training or evaluation.

        Args:
            training: Whether the layer is in training mode.

        Returns:
            Maximum assignments of an expert, as a multiple of its even share; None for no limit.
        """
        if training or self.evaluation_capacity_factor is None:
            return self.capacity_factor
        return self.evaluation_capacity_factor

    def score_size(self) -> int:
        """Returns the width of the space of the cosine score."""
        return max(self.num_experts // 2, 8) if self.score_width is None else self.score_width

    def _placement(self) -> Placement:
        placement: Placement = getattr(self, self.placement_key)
        return placement


class SparseMoEConfig(SelectingConfig):
    """A sparse mixture of experts: a router score, an optional graph of tokens, and top-K
    selection.

    Source of the graphs: Nguyen et al. 2025, "Improving routing in sparse mixture of experts with
    graph of tokens".
    """

    placement_key: ClassVar[str] = "placement"

    kind: Literal["smoe"] = "smoe"
    """The kind of feed-forward."""
    top_k: Count = 2
    """Number of experts K that each token uses."""
    combine: Literal["auto", "sum_to_one", "scores"] = "auto"
    """How the outputs of a token's K experts are weighted: `sum_to_one`, by their scores divided by
    the sum of these, as in Mixtral (equal to a softmax over the K highest logits); `scores`, by the
    scores as they are, as in V-MoE and OLMoE; `auto`, like `scores` with K = 1, as in Switch, and
    like `sum_to_one` otherwise."""
    routed_scaling_factor: Positive = 1.0
    """Factor of the weights of the experts' outputs (DeepSeek)."""
    expert_hidden_size: Count | None = None
    """Inner width F of one expert, in units; null: four times the model's width."""
    placement: Placement = 1
    """Blocks with experts: 1 for all blocks, n for the last of every n blocks (2: every second, as
    in GLaM), or a list of block numbers, from 0. The others are dense."""
    dense_hidden_size: Count | None = None
    """Inner width of the dense blocks, in units; null: four times the model's width."""
    score: ScoreName = "linear"
    """How tokens score the experts: `linear`, softmax(W u + b); `cosine`, by cosine similarity in a
    low-dimensional space with a learned temperature (X-MoE); `random`, linear and never trained
    (SMoE-dropout)."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores: `softmax` over the experts, or `sigmoid` of each logit
    (DeepSeek-V3)."""
    router_dtype: Literal["fp32", "model"] = "fp32"
    """Precision of the matrix product of the linear score: at least `fp32`, or that of the `model`,
    as OLMoE, Mixtral, Qwen, Granite and gpt-oss were trained. Everything after it is at least
    fp32."""
    num_groups: Count = 1
    """Number of groups of neighbouring experts; a token uses experts of top_groups of them
    (DeepSeek). 1: no groups."""
    top_groups: Count = 1
    """Number of groups whose experts a token may use."""
    group_score: Literal["best", "best_two"] = "best"
    """How groups are ranked: by the score of their `best` expert (DeepSeek-V2), or by the sum of
    their `best_two` scores including the balancing bias (DeepSeek-V3)."""
    router_bias: bool = True
    """Whether the linear score has a bias if the model's layers have one; V-MoE has none."""
    final_top_k: Count | None = None
    """Value to which top_k grows linearly over `train.steps` (num_experts in SMoE-dropout); null:
    top_k stays constant."""
    graph: GraphName = "none"
    """Over which tokens a token's scores are averaged before the top_k experts are selected:
    `none`, no averaging; `similarity`, weighted by similarity to the token; `attention`, weighted
    by the attention of one head. In a language model later tokens are left out."""
    similarity: Literal["dot", "cosine"] = "dot"
    """How the similarity graph compares tokens. With normalized tokens, the graph of dot products
    is nearly the identity."""
    tau: Positive = 1.0
    """Temperature of the similarity graph, which weights tokens by exp(similarity / tau)."""
    sigma: Positive = 1.0
    """Standard deviation, in the attention graph, of a token's output around that of a head."""
    attention_head: Annotated[
        Literal["lowest_entropy"] | Annotated[int, Field(ge=0)], whole_number_or(0, LOWEST_ENTROPY)
    ] = LOWEST_ENTROPY
    """Head of the attention graph: the one whose attention has the `lowest_entropy` (as a running
    mean), or a fixed one, given by its number from 0."""
    head_mean: bool = True
    """Whether the attention graph compares a token's output with the head's values multiplied by
    num_heads, as in the paper, which writes attention as a mean over heads. false: it compares with
    the values themselves, the head's part of the sum over heads."""
    pool: PoolName = "none"
    """Which experts a token can use in training: `none`, all of them; `document`, the d experts
    with the highest mean score over the token's document (EMO), with d drawn at random for each
    document and layer; `prefix`, the same over the document's tokens up to this one, for language
    models. In text a document ends with model.end_of_text_id; elsewhere each sample is a document.
    In evaluation a token can use all experts."""
    pool_least: Count | None = None
    """Smallest number of experts d in a pool (EMO's code: 8 of 128); null: top_k, or final_top_k if
    that is set."""
    pool_most: Count | None = None
    """Largest number of experts d in a pool; null: num_experts, a pool that leaves no expert
    out."""
    balancing_rate: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Amount by which the balancing bias of each expert changes per step, towards even load
    (auxiliary-loss-free balancing, Wang et al. 2024); 0: no balancing bias."""
    selection_bias: bool = False
    """Whether there is a balancing bias even if balancing_rate is 0, which then stays fixed, as in
    a DeepSeek-V3 checkpoint that is loaded."""
    activation: Activation | GatedActivation = "gelu_tanh"
    """Activation of the experts: `gelu_tanh` (tanh approximation of GELU), `gelu` (exact),
    `quick_gelu` (x sigmoid(1.702 x)) or `relu`; or with a gate, a second layer beside the first:
    `swiglu` (silu(gate) * up), `geglu` (gelu_tanh(gate) * up) or `clamped_swiglu` (gpt-oss). Dense
    blocks use the model's activation."""
    swiglu_alpha: Positive = 1.702
    """Steepness of the sigmoid in clamped_swiglu."""
    swiglu_limit: Positive = 7.0
    """Bound to which clamped_swiglu clips the gate and the other layer."""
    shared_hidden_size: Count | None = None
    """Inner width, in units, of a feed-forward beside the experts that every token passes through
    (shared experts); null: none."""
    shared_gate: bool = False
    """Whether the output of the shared experts is multiplied by the sigmoid of a learned score of
    the token, as in Qwen2-MoE."""
    expert_dropout: Probability = 0.0
    """Dropout probability inside experts, in addition to the model's own dropout: for the inner
    units after the activation, and for each expert's output before its bias and the routing
    weight."""
    scale_residual_init: bool = True
    """Whether in GPT-2 and other decoders the initial weights of the experts' second layer are
    divided by sqrt(2 L), with L blocks, like other projections onto the residual stream; with
    false, and in other models, they are initialized like those of the first layer. Because a
    token's routing weights sum to at most 1, the output of K experts then starts about K times
    smaller than that of a dense layer of their total width."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        last, within = self.known_final_top_k(), self.num_experts // self.num_groups
        by_attention, clamped = self.graph == "attention", self.activation == "clamped_swiglu"
        is_pooled, (least, most) = self.pool != "none", self.pool_bounds()
        self.check_keys(
            "top_k" if self.final_top_k is None else "final_top_k",
            ("attention_head", "@graph: attention", by_attention),
            ("head_mean", "@graph: attention", by_attention),
            ("router_dtype", "@score: linear", self.score != "cosine"),
            ("shared_gate", "@shared_hidden_size", self.shared_hidden_size is not None),
            ("swiglu_alpha", "@activation: clamped_swiglu", clamped),
            ("swiglu_limit", "@activation: clamped_swiglu", clamped),
            ("pool_least", "@pool", is_pooled),
            ("pool_most", "@pool", is_pooled),
            # A pool is chosen by means of probabilities.
            ("pool", "@score_function: softmax", self.score_function == "softmax"),
            # The best groups may have fewer experts of a pool than a token uses.
            ("pool", "@num_groups: 1", self.num_groups == 1),
            # The load that noise makes likely would be that without a pool.
            ("pool", "@router_noise: 0", self.router_noise == 0),
        )
        if last < self.top_k:
            raise SectionError(
                f"@final_top_k: {last} is less than @top_k: {self.top_k}; it can only grow"
            )
        if self.num_experts % self.num_groups:
            raise SectionError(
                f"@num_experts: {self.num_experts} is not a multiple of @num_groups: "
                f"{self.num_groups}"
            )
        at_most("top_groups", self.top_groups, "@num_groups", self.num_groups)
        at_most("top_k", last, "the experts of @top_groups", self.top_groups * within)
        if self.group_score == "best_two" and within < 2:
            raise SectionError(
                "@group_score: best_two needs groups of at least two experts, but @num_groups: "
                f"{self.num_groups} gives groups of {within}"
            )
        if is_pooled and least < last:
            raise SectionError(
                f"@pool_least: {least} is less than the {last} experts that a token uses"
            )
        at_most("pool_most", most, "@num_experts", self.num_experts)
        at_most("pool_least", least, "@pool_most", most)
        return self

    def pool_bounds(self) -> tuple[int, int]:
        """Returns the minimum and maximum number of experts in a pool."""
        least = self.known_final_top_k() if self.pool_least is None else self.pool_least
        return least, self.num_experts if self.pool_most is None else self.pool_most

    def reads_documents(self) -> bool:
        """See `FeedForwardSettings.reads_documents`: pools are per document."""
        return self.pool != "none"

    def dense(self) -> DenseFeedForwardConfig:
        """Returns the feed-forward of the blocks without experts."""
        return DenseFeedForwardConfig(hidden_size=self.dense_hidden_size)

    def check_model(self, *, num_layers: int, num_heads: int | None, causal: bool) -> None:
        """See `SelectingConfig.check_model`; also checks the head of an attention graph, and the
        pool."""
        super().check_model(num_layers=num_layers, num_heads=num_heads, causal=causal)
        if self.graph == "attention" and num_heads is None:
            raise SectionError(
                "@graph: attention is not allowed in a model without attention; allowed: none, "
                "similarity"
            )
        if self.fixed_head is not None and num_heads is not None and self.fixed_head >= num_heads:
            raise SectionError(
                f"@attention_head: {self.fixed_head} is not allowed: the model has heads 0 to "
                f"{num_heads - 1}"
            )
        if causal and self.pool == "document":
            raise SectionError(
                "@pool: document makes routing in training depend on the tokens to be predicted, "
                "which is not allowed in a language model; allowed: none, prefix"
            )
        if not causal and self.pool == "prefix":
            raise SectionError(
                "@pool: prefix is not allowed in a model whose tokens see later ones; allowed: "
                "none, document"
            )

    @property
    def fixed_head(self) -> int | None:
        """The attention graph's head if it is fixed; None if it is chosen by entropy."""
        return self.attention_head if isinstance(self.attention_head, int) else None

    def inner_size(self, width: int) -> int:
        """Returns the inner width F of one expert in a model of width D."""
        return 4 * width if self.expert_hidden_size is None else self.expert_hidden_size

    def cut_sizes(self, width: int) -> list[dict[str, int]]:
        """Returns the sizes that tensor parallelism splits, by key: one of each entry must be
        divisible.

        Args:
            width: D.
        """
        sizes = [{"expert_hidden_size": self.inner_size(width)}]
        if self.placement != 1:
            sizes.append({"dense_hidden_size": self.dense().inner_size(width)})
        if self.shared_hidden_size is not None:
            sizes.append({"shared_hidden_size": self.shared_hidden_size})
        return sizes

    def used_experts(self) -> int:
        """See `SelectingConfig.used_experts`."""
        return self.top_k

    def known_final_top_k(self) -> int:
        """See `SelectingConfig.known_final_top_k`."""
        return self.top_k if self.final_top_k is None else self.final_top_k
