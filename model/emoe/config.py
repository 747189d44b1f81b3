"""The keys of an emergent mixture of experts."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from polyad.model.config import Config, SectionError
from polyad.model.dense import DenseFeedForwardConfig
from polyad.model.placement import Placement, check_blocks, check_once, check_placement, is_placed
from polyad.model.smoe.config import Count, Positive, SparseMoEConfig


class EmergentMoEConfig(Config):
    """The inner units of a dense feed-forward in groups, of which each token uses some.

    `polyad convert --split` makes it from a trained dense model, and `--merge` makes that dense
    again. Source: Qiu et al. 2023, "Emergent mixture-of-experts".
    """

    kind: Literal["emoe"] = "emoe"
    """Which feed-forward this is."""
    num_experts: Annotated[int, Field(ge=2, le=2**31 - 1)] = 16
    """Experts E of a block: groups of equal size of its inner units. Divides the inner width."""
    top_k: Count = 8
    """Experts K that a token uses; all of them are the dense feed-forward."""
    hidden_size: Count | None = None
    """Inner width F of all experts of a block together, and of the blocks that are dense, in units;
    null: four times the model's width."""
    blocks: Placement = 1
    """Blocks that are split: 1 all of them, n the last of every n, or a list of block numbers, from
    0. The others are dense."""
    score: Literal["avg_k", "linear", "cosine"] = "avg_k"
    """How a token scores the experts: `avg_k` by the mean of their keys as they are, with nothing
    to learn, and each expert it uses has weight 1; or learned, as smoe's `linear` and `cosine`: the
    softmax over the experts it uses, times as many, so that the weights are 1 on average."""
    score_width: Count | None = None
    """Width of the cosine score's space, in units; null: half of num_experts, at least 8."""
    select: Literal["top_k", "bottom_k", "not_top_k"] = "top_k"
    """Which experts a token uses: the top_k with the highest scores, the top_k with the lowest, or
    all but the top_k with the highest. The last two are for comparison."""
    router_noise: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Standard deviation, times 1 / num_experts, of normal noise on the scores in training (the
    authors' code: 1); 0 adds none."""
    capacity_factor: Positive | None = None
    """Most assignments of an expert in a micro-batch, as a multiple of its even share (the authors'
    code: 1.5, in evaluation too); null: no token is ever dropped."""
    evaluation_capacity_factor: Positive | None = None
    """capacity_factor in evaluation; null: the same."""
    capacity_order: Literal["arrival", "priority"] = "arrival"
    """Which assignments a capacity keeps: those of the first tokens, or by `priority` those of the
    tokens with the highest scores (the authors' code)."""
    allow_leak: bool = False
    """Whether capacity_factor is allowed in a language model, although the experts of a token then
    depend on what else is in the batch."""
    experts: Literal["masked", "grouped", "loop"] = "masked"
    """How experts are computed: `masked`, all of them in one product, and what a token does not use
    is set to 0; `grouped` or `loop`, as smoe's, only what it uses. Over expert-parallel processes
    `masked` is `grouped`."""

    @field_validator("blocks", mode="before")
    @classmethod
    def _is_placement(cls, value: object) -> object:
        return check_placement(value)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        check_once("blocks", self.blocks)
        if self.used_experts() < 1:
            raise SectionError(
                f"@top_k: {self.top_k} of @num_experts: {self.num_experts} leaves no expert with "
                f"@select: not_top_k"
            )
        if self.router_noise and self.select != "top_k":
            raise SectionError(
                f"@router_noise: {self.router_noise:g} is not allowed with @select: {self.select}; "
                f"0 is"
            )
        try:
            self.sparse(self.num_experts)  # the keys that both kinds have obey the same rules
        except ValidationError as error:
            raise error.errors()[0]["ctx"]["error"] from None
        return self

    def used_experts(self) -> int:
        """The number of experts that a token uses."""
        return self.num_experts - self.top_k if self.select == "not_top_k" else self.top_k

    def sparse(self, width: int) -> SparseMoEConfig:
        """The sparse mixture that has the same experts and the same router but for avg_k.

        Args:
            width: D.
        """
        return SparseMoEConfig(
            num_experts=self.num_experts,
            top_k=self.used_experts(),
            expert_hidden_size=max(1, self.inner_size(width) // self.num_experts),
            score="cosine" if self.score == "cosine" else "linear",
            score_width=self.score_width,
            router_noise=self.router_noise,
            capacity_factor=self.capacity_factor,
            evaluation_capacity_factor=self.evaluation_capacity_factor,
            capacity_order=self.capacity_order,
            allow_leak=self.allow_leak,
            experts="loop" if self.experts == "loop" else "grouped",
        )

    def inner_size(self, width: int) -> int:
        """The inner width F of all experts together in a model of the given width D."""
        return 4 * width if self.hidden_size is None else self.hidden_size

    def routes(self, block: int) -> bool:
        """Whether a block has experts.

        Args:
            block: its number, from 0.
        """
        return is_placed(self.blocks, block)

    def of_model(self, *, width: int, bias: bool) -> "EmergentMoEConfig":
        """Checks the experts against the model's width; nothing is completed in this kind.

        Args:
            width: D.
            bias: whether linear layers have one.

        Raises:
            SectionError: the experts would not be of equal size.
        """
        inner = self.inner_size(width)
        if inner % self.num_experts:
            small = [n for n in range(1, math.isqrt(inner) + 1) if inner % n == 0]
            divisors = {*small, *(inner // n for n in small)} - {1}
            near = sorted(sorted(divisors, key=lambda n: abs(n - self.num_experts))[:2])
            raise SectionError(
                f"@num_experts: {self.num_experts} does not divide the inner width {inner} "
                f"(@hidden_size); nearest that do: {', '.join(map(str, near))}"
            )
        return self

    def of_block(self, block: int) -> "EmergentMoEConfig | DenseFeedForwardConfig":
        """The feed-forward of one block: this one, or a dense one of the same inner width.

        Args:
            block: its number, from 0.
        """
        return self if self.routes(block) else self.dense()

    def dense(self) -> DenseFeedForwardConfig:
        """The dense feed-forward that the experts are parts of."""
        return DenseFeedForwardConfig(hidden_size=self.hidden_size)

    def check_model(self, *, num_layers: int, num_heads: int | None, causal: bool) -> None:
        """Checks this section against the rest of the model.

        Args:
            num_layers: of the model.
            num_heads: of its attention; None without attention.
            causal: whether it is a language model.

        Raises:
            SectionError: a block that is not there is to be split, or a language model would leak.
        """
        check_blocks("blocks", self.blocks, num_layers)
        self.sparse(self.num_experts).check_model(
            num_layers=num_layers, num_heads=num_heads, causal=causal
        )

    def cut_sizes(self, width: int) -> list[dict[str, int]]:
        """What tensor parallelism divides: the inner width, and that of one expert.

        Args:
            width: D.
        """
        inner = self.inner_size(width)
        return [{"hidden_size": inner}, {"hidden_size / num_experts": inner // self.num_experts}]

    def saved_numbers_per_token(self, width: int) -> int:
        """Numbers that a token saves for the backward pass: units before and after the activation,
        and what is left of them.

        Args:
            width: D.
        """
        if self.experts == "masked":
            return 3 * self.inner_size(width)
        return self.sparse(width).saved_numbers_per_token(width)

    def matmul_parameters_per_token(self, width: int) -> int:
        """Counts the weights that multiply one token: those of the experts it uses, and the score.

        Args:
            width: D.

        Returns:
            A number of weights, without biases. `masked` computes with all, and counts the same.
        """
        return self.sparse(width).matmul_parameters_per_token(width)

    def mixing_flops_per_token(self, width: int, head_size: int, length: int) -> int:
        """FLOPs of mixing over tokens: none.

        Args:
            width: D.
            head_size: of one attention head.
            length: tokens in a sequence.

        Returns:
            0.
        """
        return 0
