"""The keys of an emergent mixture of experts."""

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from polyad.model.config import SectionError
from polyad.model.feedforward import DenseFeedForwardConfig
from polyad.model.smoe.config import (
    Count,
    Placement,
    Positive,
    SelectingConfig,
    check_placement,
)


class EmergentMoEConfig(SelectingConfig):
    """The inner units of a dense feed-forward in groups, of which each token uses some.

    `polyad convert --split` makes it from a trained dense model, and `--merge` makes that dense
    again. Source: Qiu et al. 2023, "Emergent mixture-of-experts".
    """

    placement_key: ClassVar[str] = "blocks"

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
    shared_hidden_size: Count | None = None
    """Inner units, of the hidden_size, that every token uses (shared experts); the others are in
    groups. null: there are none."""
    score: Literal["avg_k", "member", "linear", "cosine"] = "avg_k"
    """How a token scores the experts: `avg_k` by the mean of their keys as they are, with nothing
    to learn, or `member` by the magnitude of one unit of each (CMoE), and each expert it uses has
    weight 1; or learned, as smoe's `linear` and `cosine`: the softmax over the experts it uses,
    times as many, so that the weights are 1 on average. With a gate the keys are its rows."""
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
        self.check_placement_once()
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
        self.check_number("top_k", self.used_experts())
        self.check_capacity()
        return self

    def weighs_experts(self) -> bool:
        """Whether experts have the weights of a learned score, and not 1."""
        return self.score in ("linear", "cosine")

    def used_experts(self) -> int:
        """See `SelectingConfig.used_experts`."""
        return self.num_experts - self.top_k if self.select == "not_top_k" else self.top_k

    def inner_size(self, width: int) -> int:
        """The inner width F of all experts together in a model of the given width D."""
        return 4 * width if self.hidden_size is None else self.hidden_size

    def group_size(self, width: int) -> int:
        """The inner units F of one expert, in a model of the given width D."""
        return (self.inner_size(width) - (self.shared_hidden_size or 0)) // self.num_experts

    def of_model(self, *, width: int, bias: bool) -> Self:
        """See `FeedForwardSettings.of_model`: only checks that experts would be of equal size."""
        whole, shared = self.inner_size(width), self.shared_hidden_size or 0
        inner = whole - shared
        if shared >= whole:
            raise SectionError(
                f"@shared_hidden_size: {shared} leaves no unit of the inner width {whole} "
                f"(@hidden_size) to be in groups"
            )
        if shared and inner % self.num_experts:
            raise SectionError(
                f"@num_experts: {self.num_experts} does not divide the {inner} units that "
                f"@shared_hidden_size: {shared} leaves of {whole} (@hidden_size); with "
                f"{shared + inner % self.num_experts} shared ones it does"
            )
        if inner % self.num_experts:
            small = [n for n in range(1, math.isqrt(inner) + 1) if inner % n == 0]
            divisors = {*small, *(inner // n for n in small)} - {1}
            near = sorted(sorted(divisors, key=lambda n: abs(n - self.num_experts))[:2])
            raise SectionError(
                f"@num_experts: {self.num_experts} does not divide the inner width {inner} "
                f"(@hidden_size); nearest that do: {', '.join(map(str, near))}"
            )
        return self

    def dense(self) -> DenseFeedForwardConfig:
        """The dense feed-forward that the experts are parts of."""
        return DenseFeedForwardConfig(hidden_size=self.hidden_size)

    def cut_sizes(self, width: int) -> list[dict[str, int]]:
        """See `FeedForwardSettings.cut_sizes`: the inner width, and that of one expert."""
        sizes = [
            {"hidden_size": self.inner_size(width)},
            {"hidden_size / num_experts": self.group_size(width)},
        ]
        if self.shared_hidden_size is not None:
            sizes.append({"shared_hidden_size": self.shared_hidden_size})
        return sizes
