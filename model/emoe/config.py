"""The keys of an emergent mixture of experts."""

import math
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from polyad.model.config import Count, SectionError
from polyad.model.feedforward import DenseFeedForwardConfig
from polyad.model.smoe.config import (
    Placement,
    SelectingConfig,
)


class EmergentMoEConfig(SelectingConfig):
    """A dense feed-forward whose inner units are divided into experts; each token uses some of
    them.

    `polyad convert --split` makes it from a trained dense model, and `--merge` turns it back into a
    dense one. Source: Qiu et al. 2023, "Emergent mixture-of-experts".
    """

    placement_key: ClassVar[str] = "blocks"

    kind: Literal["emoe"] = "emoe"
    """The kind of feed-forward."""
    top_k: Count = 8
    """Number of experts K that each token uses; with all of them it is the dense feed-forward."""
    hidden_size: Count | None = None
    """Inner width F of all experts of a block together, and of dense blocks, in units; null: four
    times the model's width."""
    blocks: Placement = 1
    """Blocks that are split into experts: 1 for all blocks, n for the last of every n blocks, or a
    list of block numbers, from 0. The others are dense."""
    score: Literal["avg_k", "linear", "cosine"] = "avg_k"
    """How tokens score the experts. `avg_k` has no parameters: the mean of the expert's keys (the
    rows of its first layer, or of its gate), and weight 1 for each selected expert. Learned:
    `linear` or `cosine`, as for smoe, with a softmax over the selected experts that is multiplied
    by their number, so that weights are 1 on average."""
    select: Literal["top_k", "bottom_k", "not_top_k"] = "top_k"
    """Which experts a token uses: the `top_k` with the highest scores, as many with the lowest
    (`bottom_k`), or all except the top_k highest (`not_top_k`). The last two are for comparison."""
    experts: Literal["masked", "grouped", "loop"] = "masked"
    """How experts are computed: `masked` computes all of them in one matrix product and sets to 0
    what a token does not use; `grouped` and `loop` (as for smoe) compute only what it uses. With
    expert parallelism, `masked` means `grouped`."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.used_experts() < 1:
            raise SectionError(
                f"@top_k: {self.top_k} of @num_experts: {self.num_experts} leaves no expert with "
                f"@select: not_top_k"
            )
        self.check_keys("top_k", ("router_noise", 0, "@select: top_k", self.select == "top_k"))
        return self

    def used_experts(self) -> int:
        """See `SelectingConfig.used_experts`."""
        return self.num_experts - self.top_k if self.select == "not_top_k" else self.top_k

    def group_size(self, width: int) -> int:
        """Returns the number of inner units F of one expert in a model of width D."""
        return self.inner_size(width) // self.num_experts

    def of_model(self, *, width: int, bias: bool) -> Self:
        """See `FeedForwardSettings.of_model`: only checks that experts have equal sizes."""
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

    def dense(self) -> DenseFeedForwardConfig:
        """Returns the dense feed-forward that the experts are parts of."""
        return DenseFeedForwardConfig(hidden_size=self.hidden_size)

    def cut_sizes(self, width: int) -> list[dict[str, int]]:
        """See `FeedForwardSettings.cut_sizes`: the inner width, and that of one expert."""
        return [
            {"hidden_size": self.inner_size(width)},
            {"hidden_size / num_experts": self.group_size(width)},
        ]
