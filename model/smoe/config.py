"""The keys of a sparse mixture of experts."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from polyad.model.config import Config, SectionError
from polyad.model.dense import DenseFeedForwardConfig
from polyad.model.interface import Activation
from polyad.model.placement import Placement, check_blocks, check_once, check_placement, is_placed

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Field(ge=1e-6, le=1e6)]
Probability = Annotated[float, Field(ge=0, lt=1)]
ScoreName = Literal["linear", "cosine", "random", "attentive"]
GraphName = Literal["none", "similarity", "attention"]
LOWEST_ENTROPY: Literal["lowest_entropy"] = "lowest_entropy"


class SparseMoEConfig(Config):
    """Experts of which each token uses a few: a score, a graph of tokens, top-K, experts.

    Source of the graphs: Nguyen et al. 2025, "Improving routing in sparse mixture of experts with
    graph of tokens".
    """

    kind: Literal["smoe"] = "smoe"
    """Which feed-forward this is."""
    num_experts: Annotated[int, Field(ge=2)] = 16
    """Experts E in a block."""
    top_k: Count = 2
    """Experts K that a token uses."""
    combine: Literal["renormalized", "softmax"] = "renormalized"
    """Weights of the outputs of a token's experts: `renormalized`, the K highest scores divided by
    their sum, or with K = 1 the score itself, as in Switch; `softmax`, the scores as they are,
    which sum to less than 1, as in V-MoE."""
    expert_hidden_size: Count | None = None
    """Inner width F of one expert, in units; null: four times the model's width."""
    placement: Placement = 1
    """Blocks that route: 1 all of them, n the last of every n (2: every second, as in GLaM), or
    a list of block numbers, from 0. The others are dense."""
    dense_hidden_size: Count | None = None
    """Inner width of the blocks that do not route, in units; null: four times the model's."""
    score: ScoreName = "linear"
    """How a token scores the experts: `linear` softmax(W u + b); `cosine` in a narrow space, with a
    learned temperature (X-MoE); `random` linear and never trained (SMoE-dropout); `attentive` by
    the token's query and a key of each expert, in a narrow space too."""
    expert_keys: Literal["learned", "hidden_means"] = "learned"
    """Where the attentive score's keys come from: `learned`, one vector for each expert; or
    `hidden_means`, a learned projection of the expert's hidden layer, before its activation, at the
    moving mean of the tokens that chose it."""
    router_bias: bool = True
    """Whether the linear score has a bias where the model's layers have one; V-MoE's has none."""
    router_noise: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Standard deviation, times 1 / num_experts, of normal noise that is added to the score's
    logits in training, for each token and expert anew (V-MoE: 1); 0 adds none."""
    score_width: Count | None = None
    """Width of the cosine and attentive scores' space, in units; null: half of num_experts, at
    least 8."""
    final_top_k: Count | None = None
    """top_k grows linearly to this over `train.steps` (SMoE-dropout grows it to num_experts); null:
    it stays."""
    graph: GraphName = "none"
    """Over which tokens scores are mixed before top_k is taken: `none`, those with a `similarity`
    to this one, or those that one head's `attention` went to. In a language model a token sees no
    later one."""
    similarity: Literal["dot", "cosine"] = "dot"
    """Of the similarity graph. Of normalized tokens the dot product is nearly the identity."""
    tau: Positive = 1.0
    """Temperature of the similarity graph: its exponent is similarity / tau."""
    sigma: Positive = 1.0
    """Standard deviation of a token's output around a head's, in the attention graph."""
    attention_head: Literal["lowest_entropy"] | Annotated[int, Field(ge=0)] = LOWEST_ENTROPY
    """The head of the attention graph: the one whose attention has the `lowest_entropy`, by a
    running mean, or always the one of a number, from 0."""
    head_mean: bool = True
    """Whether in the attention graph a token's output is compared with the head's values times
    num_heads, as the paper does, which writes attention as the mean over heads. false: with the
    values alone, which are the head's own part of the sum over heads."""
    lower_entropy_only: bool = False
    """Whether a token takes part in another's mixture only if its own scores have no more entropy
    (J_i of the paper's Proposition 1)."""
    causal_graph: bool = True
    """Whether in a language model a token's mixture leaves out later tokens. false: as the paper
    writes it, which sees what the model is to predict: to measure what that is worth."""
    graph_from: Probability = 0.0
    """Share of `train.steps` before which the graph is off, and each token has its own scores; 0:
    it is on from the first step. A graph that is on stays on when train.steps grows."""
    balancing_rate: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """How far the balancing bias of each expert moves in a step towards even load (loss-free
    balancing, Wang et al. 2024); 0 has no bias."""
    capacity_factor: Positive | None = None
    """Most assignments of an expert in a micro-batch, as a multiple of its even share; tokens that
    come after do without it. null: no token is ever dropped."""
    evaluation_capacity_factor: Positive | None = None
    """capacity_factor in evaluation (V-MoE trains with 1.05 and evaluates with 4); null: the same.
    num_experts / top_k and more drop nothing."""
    capacity_order: Literal["arrival", "priority"] = "arrival"
    """Which assignments a capacity keeps: `arrival`, those of the first tokens of a micro-batch;
    `priority`, first choices before second ones, and among them those of the tokens with the
    highest scores (V-MoE's batch priority routing)."""
    activation: Activation = "gelu_tanh"
    """Of the experts: `gelu_tanh`, GELU approximated by tanh; `gelu`, exact; or `quick_gelu`, x
    sigmoid(1.702 x). Blocks that do not route have the model's."""
    expert_dropout: Probability = 0.0
    """Dropout probability inside experts, beside the model's own: of the inner units after the
    activation, and of each expert's output, before its bias and the routing weight."""
    scale_residual_init: bool = True
    """Whether in GPT-2 the experts' second layer starts smaller by sqrt(2 L), L blocks, as its
    projections onto the residual stream do; false, and in other models: as their first layer. A
    token's weights sum to 1 at most: K experts then start about K times smaller than a dense layer
    as wide as all of them."""
    allow_leak: bool = False
    """Whether capacity_factor, or causal_graph: false, is allowed in a language model, although the
    experts of a token then depend on later ones, with a capacity on what else is in the batch."""
    experts: Literal["grouped", "loop"] = "grouped"
    """How experts are computed: `grouped`, all in one matrix product on a GPU (not in float64 or
    with widths that are no multiple of 8) and into common buffers on a CPU; or `loop`, one after
    the other: the reference."""

    @field_validator("placement", mode="before")
    @classmethod
    def _is_placement(cls, value: object) -> object:
        return check_placement(value)

    @field_validator("attention_head", mode="before")
    @classmethod
    def _is_head(cls, value: object) -> object:
        # Before pydantic does: its error on a union lists every member's.
        if value != LOWEST_ENTROPY and (type(value) is not int or value < 0):
            raise ValueError(f"{LOWEST_ENTROPY}, or the number of a head from 0")
        return value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        check_once("placement", self.placement)
        for name in ("top_k", "final_top_k"):
            value = getattr(self, name)
            if value is not None and value > self.num_experts:
                raise SectionError(
                    f"@{name}: {value} is more than @num_experts: {self.num_experts}"
                )
        if self.final_top_k is not None and self.final_top_k < self.top_k:
            raise SectionError(
                f"@final_top_k: {self.final_top_k} is less than @top_k: {self.top_k}; "
                f"it can only grow"
            )
        if self.expert_keys != "learned" and self.score != "attentive":
            raise SectionError(
                f"@expert_keys: {self.expert_keys} needs @score: attentive, which is {self.score}; "
                f"learned is allowed with every score"
            )
        if self.lower_entropy_only and self.graph == "none":
            raise SectionError("@lower_entropy_only: true needs a graph, there is none")
        if not self.causal_graph and self.graph == "none":
            raise SectionError("@causal_graph: false needs a graph, there is none")
        if self.graph_from and self.graph == "none":
            raise SectionError(f"@graph_from: {self.graph_from:g} needs a graph, there is none")
        if self.graph != "attention":
            for name, default in (("attention_head", LOWEST_ENTROPY), ("head_mean", True)):
                if (value := getattr(self, name)) != default:
                    shown = "false" if value is False else value
                    raise SectionError(
                        f"@{name}: {shown} needs @graph: attention, which is {self.graph}"
                    )
        if self.capacity_factor is None:
            for name, unused in (
                ("evaluation_capacity_factor", None),
                ("capacity_order", "arrival"),
            ):
                if (value := getattr(self, name)) != unused:
                    raise SectionError(
                        f"@{name}: {value} needs @capacity_factor, which is null: no token is "
                        f"dropped"
                    )
        return self

    def routes(self, block: int) -> bool:
        """Whether a block has experts.

        Args:
            block: its number, from 0.
        """
        return is_placed(self.placement, block)

    def of_model(self, *, width: int, bias: bool) -> "SparseMoEConfig":
        """Completed with what the model decides: nothing in this kind.

        Args:
            width: D.
            bias: whether linear layers have one.
        """
        return self

    def of_block(self, block: int) -> "SparseMoEConfig | DenseFeedForwardConfig":
        """The feed-forward of one block: this one, or a dense one.

        Args:
            block: its number, from 0.
        """
        return (
            self
            if self.routes(block)
            else DenseFeedForwardConfig(hidden_size=self.dense_hidden_size)
        )

    def check_model(self, *, num_layers: int, num_heads: int | None, causal: bool) -> None:
        """Checks this section against the rest of the model.

        Args:
            num_layers: of the model.
            num_heads: of its attention; None without attention.
            causal: whether it is a language model.

        Raises:
            SectionError: a block that is not there is to route, the graph needs attention or a head
                that is not there, or a language model would leak.
        """
        check_blocks("placement", self.placement, num_layers)
        if self.graph == "attention" and num_heads is None:
            raise SectionError(
                "@graph: attention is not allowed in a model without attention; none and "
                "similarity are"
            )
        if self.fixed_head is not None and num_heads is not None and self.fixed_head >= num_heads:
            raise SectionError(
                f"@attention_head: {self.fixed_head} is not allowed: the model has heads 0 to "
                f"{num_heads - 1}"
            )
        if causal and self.capacity_factor is not None and not self.allow_leak:
            raise SectionError(
                f"@capacity_factor: {self.capacity_factor} drops tokens by what else is "
                f"in the batch and is not allowed in a language model: null drops none, and "
                f"@allow_leak: true allows it"
            )
        if causal and not self.causal_graph and not self.allow_leak:
            raise SectionError(
                "@causal_graph: false lets tokens choose experts by those that they are to "
                "predict and is not allowed in a language model: true does not, and "
                "@allow_leak: true allows it"
            )

    @property
    def fixed_head(self) -> int | None:
        """The number of the attention graph's head; None: it is chosen by entropies."""
        return self.attention_head if isinstance(self.attention_head, int) else None

    def capacity(self, training: bool) -> float | None:
        """The capacity factor that holds.

        Args:
            training: whether the layer trains.

        Returns:
            Most assignments of an expert, as a multiple of its even share; None: no limit.
        """
        if training or self.evaluation_capacity_factor is None:
            return self.capacity_factor
        return self.evaluation_capacity_factor

    def inner_size(self, width: int) -> int:
        """The inner width F of one expert in a model of the given width D."""
        return 4 * width if self.expert_hidden_size is None else self.expert_hidden_size

    def cut_sizes(self, width: int) -> list[dict[str, int]]:
        """What tensor parallelism divides: of each entry one of the sizes, by key.

        Args:
            width: D.
        """
        sizes = [{"expert_hidden_size": self.inner_size(width)}]
        if self.placement != 1:
            dense = 4 * width if self.dense_hidden_size is None else self.dense_hidden_size
            sizes.append({"dense_hidden_size": dense})
        return sizes

    def score_size(self) -> int:
        """Width of the cosine and attentive scores' space."""
        return max(self.num_experts // 2, 8) if self.score_width is None else self.score_width

    def known_final_top_k(self) -> int:
        """Experts of a token in the last steps of a run, and in the model that it leaves."""
        return self.top_k if self.final_top_k is None else self.final_top_k

    def saved_numbers_per_token(self, width: int) -> int:
        """Numbers that a token saves for the backward pass: for each of its experts the input, the
        inner units before and after the activation, and the output; both again once they are
        dropped.

        Args:
            width: D.
        """
        times = 3 if self.expert_dropout else 2
        return self.known_final_top_k() * times * (self.inner_size(width) + width)

    def matmul_parameters_per_token(self, width: int) -> int:
        """Counts the weights that multiply one token: top_k experts, and the score. Of a K that
        grows the mean counts: each K has an equal share of the run.

        Args:
            width: D.

        Returns:
            A number of weights, without biases. What makes keys of hidden means runs once for each
            expert and not for each token, and is left out.
        """
        score = width * self.num_experts
        if self.score in ("cosine", "attentive"):
            score = (width + self.num_experts) * self.score_size()
        both_k = self.top_k + self.known_final_top_k()
        return score + both_k * width * self.inner_size(width)

    def mixing_flops_per_token(self, width: int, head_size: int, length: int) -> int:
        """FLOPs of the graph, forward and backward; counted over the full length, as attention, and
        for steps in which it is on.

        Args:
            width: D.
            head_size: of one attention head.
            length: tokens in a sequence.

        Returns:
            FLOPs.
        """
        keys = {"none": 0, "similarity": width, "attention": 2 * head_size + 1}[self.graph]
        return 6 * length * (keys + self.num_experts) if keys else 0
