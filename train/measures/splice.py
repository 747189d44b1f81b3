"""`polyad experts splice`: how much of a language model survives replacing feed-forwards.

For the replaced blocks of `model.replaced`, each alone and all together, the cross-entropy

    CE           of the original model, with its own feed-forwards
    CE_zero      with the output of the blocks' feed-forwards set to 0
    CE_splice    with the replaced feed-forwards
    recovered    (CE_zero - CE_splice) / (CE_zero - CE): 1 is lossless, 0 is no better than zeros

and for each block, on its inputs in the original model: nMSE, sum |ŷ - y|^2 / sum |y|^2, and L0,
the mean number of experts with a weight above 0, for kinds of layers that report it.

Source: MxD (Oldfield et al. 2025, "Towards interpretability without sacrifice: faithful dense layer
decomposition with mixture of decoders").
"""

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from polyad.model.decoder import DecoderSettings
from polyad.model.mxd import SparseTable
from polyad.parallel import comm
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.weights import Weights, device_of
from polyad.train.config.distillation import (
    TeacherAt,
    check_original,
    of_step,
    open_teacher,
    original_feed_forwards,
)
from polyad.train.errors import ConfigError
from polyad.train.experts.information import Summed
from polyad.train.measures.measure import Measure
from polyad.train.reading import TOKENS, EvaluationContext, ForwardPass, Subject
from polyad.train.results import Tables
from polyad.train.tasks.language import LanguageModelling
from polyad.train.tasks.samples import losses, through

Way: TypeAlias = Literal["original", "zeroed", "spliced"]
WAYS: tuple[Way, ...] = ("zeroed", "spliced")
"""Replacements of the original feed-forwards."""


@dataclass(kw_only=True)
class Splicing(Measure):
    """Reads text with the original, with zeroed and with the replaced feed-forwards."""

    name = "splice"
    doing = "splicing feed-forwards"

    teacher: Path | None = None
    """The original model; None: the run's teacher."""
    tokens: int = TOKENS
    """Approximate number of tokens to read."""

    def check(self, opened: EvaluationContext) -> None:
        """Opens the original model."""
        opened.need(f"experts {self.name}", LanguageModelling)
        model, weights = opened.weights.model_config(), opened.weights
        if not isinstance(model, DecoderSettings) or model.replaced is None:
            raise ConfigError(
                f"experts {self.name}: {weights.folder} has no model.replaced: all of its blocks "
                f"have their own feed-forwards"
            )
        self._teacher = open_original(self.teacher, opened, model)

    def subject_of(self, opened: EvaluationContext, model: nn.Module) -> Subject:
        """The text; loads the original feed-forwards."""
        config, precision = opened.weights.model_config(), opened.config.train.precision
        assert isinstance(config, DecoderSettings)
        self._originals = original_feed_forwards(
            self._teacher, config.replaced_blocks(), device_of(model), precision
        )
        originals, device = self._originals, device_of(model)
        self._ways: dict[int, Way] = dict.fromkeys(originals, "original")
        self._counted_BT: Tensor | None = None
        self.blocks = [min(originals)]
        together: list[Sequence[int]] = [tuple(originals)] if len(originals) > 1 else []
        self._sets = [*((block,) for block in originals), *together]

        zeros = functools.partial(torch.zeros, dtype=torch.float64, device=device)
        self._losses = zeros(1 + len(WAYS) * len(self._sets))
        """Sums over tokens: for the original model, and for each set of blocks in each way."""
        self._tokens = zeros(1)
        self._errors: dict[int, Tensor] = {block: zeros(4) for block in originals}
        """Sums for each block: |ŷ - y|^2, |y|^2, active experts, and the number of tokens for the
        latter."""
        return Subject(model, [], opened.text(self.tokens), opened.batch_size)

    def read(self, world: comm.World | None = None) -> None:
        """Reads the text, with hooks on the replaced blocks' outputs."""
        with ExitStack() as hooks:
            for block in self._originals:
                module = self.subject.model.get_submodule(f"blocks.{block}.feed_forward")
                hook = functools.partial(self._output, block)
                hooks.enter_context(module.register_forward_hook(hook))
            super().read(world)

    def _output(
        self, block: int, module: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Any, Any]
    ) -> Any:
        """Replaces a feed-forward's output, as a hook."""
        ours_BTD, stats = outputs
        way = self._ways[block]
        if way == "zeroed":
            return torch.zeros_like(ours_BTD), None
        theirs_BTD, _ = self._originals[block](*inputs)
        if way == "original":
            return theirs_BTD, None
        if self._counted_BT is not None:
            sums = self._errors[block]
            both = (each[self._counted_BT].double() for each in (ours_BTD, theirs_BTD))
            ours_ND, theirs_ND = both
            sums[0] += (ours_ND - theirs_ND).square().sum()
            sums[1] += theirs_ND.square().sum()
            if isinstance(module, SparseTable):
                weights_NK = module.gate.forward(inputs[0][self._counted_BT]).weights_NK
                sums[2] += (weights_NK != 0).sum()
                sums[3] += len(weights_NK)
        return ours_BTD, stats

    def add(self, forward_pass: ForwardPass) -> None:
        """Adds a batch, which is read again from the first replaced block on in each way."""
        passages, first = forward_pass.batch, self.blocks[0]

        def loss(blocks: Sequence[int], way: Way) -> Tensor:
            changed = dict.fromkeys(blocks, way)
            self._ways = {block: changed.get(block, "original") for block in self._originals}
            alone = way == "spliced" and len(blocks) == 1
            self._counted_BT = passages.scored_BP if alone else None
            x_BTD = through(self.subject.model, forward_pass.entering[first], first)
            loss_BT = losses(self.subject.model, x_BTD, passages)
            return loss_BT[passages.scored_BP].double().sum()

        sums = [loss((), "original")]
        sums += [loss(blocks, way) for blocks in self._sets for way in WAYS]
        self._ways = dict.fromkeys(self._originals, "original")
        self._losses += torch.stack(sums)
        self._tokens += passages.scored_BP.sum()

    def result(self, summed: Summed = lambda values: values) -> Tables:
        """The result."""
        import pandas as pd

        (tokens,) = summed(self._tokens).tolist()
        whole, *others = (summed(self._losses) / tokens).tolist()
        rows: list[dict[str, Any]] = []
        for blocks, zeroed, spliced in zip(self._sets, others[::2], others[1::2], strict=True):
            recovered = (zeroed - spliced) / (zeroed - whole)
            row = {"zeroed": zeroed, "spliced": spliced, "recovered": recovered}
            if len(blocks) > 1:
                rows.append({"module": "together", **row})
                continue
            error, square, active, of_tokens = summed(self._errors[blocks[0]]).tolist()
            of_block = {"nmse": error / square, "active": active / of_tokens if of_tokens else None}
            rows.append({"module": f"blocks.{blocks[0]}.feed_forward", **row, **of_block})
        title = (
            "loss in nats per token with the outputs zeroed and with the replaced feed-forwards, "
            "the share recovered, and active experts per token"
        )
        return Tables(
            facts={"teacher": str(self._teacher.folder), "tokens": int(tokens), "loss": whole},
            frames={"blocks": pd.DataFrame(rows).astype({"active": float})},
            titles={"blocks": title},
        )


def open_original(path: Path | None, opened: EvaluationContext, model: DecoderSettings) -> Weights:
    """Opens the model whose blocks were replaced.

    Args:
        path: of the model; None: the run's teacher, at the step with which the run started.
        opened: the spliced weights.
        model: their configuration.

    Raises:
        ConfigError: it is unknown, missing, or a different model.
    """
    named, weights = opened.config.distill.teacher, opened.weights
    if path is not None:
        teacher = open_teacher(path, "--teacher")
        key = f"--teacher: {path}"
    elif named is None:
        raise ConfigError(
            f"experts splice: {weights.folder} names no distill.teacher; use --teacher to name the "
            "original model"
        )
    else:
        key, teacher = f"distill.teacher: {named}", open_teacher(Path(named))
        if isinstance(weights, Checkpoint) and isinstance(teacher, Checkpoint):
            newest = TeacherAt(teacher.folder, teacher.training_step)
            teacher = open_teacher(of_step(newest, weights.state.teacher_step, key).folder)
    check_original(key, teacher, model)
    return teacher
