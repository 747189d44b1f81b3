"""A language model's view of a text, with and without interventions on its experts.

`polyad.load(RUN).show(TEXT)` returns a `TextView`, which notebooks show as a table; `polyad experts
trace --html` writes the same table as a page.

Shapes: T tokens of a text, P of them predicted, V vocabulary, S experts of a layer (all levels side
by side), K experts shown per token.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.train.experts.interventions import Intervention, intervened
from polyad.train.experts.trace import TOP, LayerExperts, read_experts
from polyad.train.page import render, signs
from polyad.train.results import aligned, in_words

NEXT = 10
"""Number of most probable next tokens shown for each token."""


class NextToken(NamedTuple):
    """A token that may come next."""

    token: str
    token_id: int
    probability: float
    changed: float | None
    """Its probability under the interventions; None without interventions."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward pass over the text."""

    layers: dict[str, LayerExperts]
    """The layers with experts by module name, in the model's order."""
    losses: list[float | None]
    """Loss of each token, predicted from those before it, in nats; None for the first."""

    @property
    def loss(self) -> float | None:
        """The mean over predicted tokens; None if there are none."""
        losses = [loss for loss in self.losses if loss is not None]
        return sum(losses) / len(losses) if losses else None


@dataclass(frozen=True, kw_only=True)
class TextView:
    """A model's view of a text."""

    name: str
    """The model's name."""
    tokens: list[str]
    """The text of each token."""
    token_ids: list[int]
    plain: Pass
    """Without interventions."""
    changed: Pass | None
    """Under the interventions; None without interventions."""
    interventions: list[Intervention]
    next_tokens: list[list[NextToken]]
    """The `NEXT` most probable tokens after each token; with interventions those of both passes."""

    @property
    def shown(self) -> Pass:
        """The pass under the interventions, if there are any."""
        return self.changed or self.plain

    def moved(self) -> dict[str, list[bool]]:
        """Returns which tokens the interventions send to other experts, by layer."""
        return {
            name: (_set_of(each) != _set_of(self.plain.layers[name])).any(1).tolist()
            for name, each in self.shown.layers.items()
        }

    def _repr_html_(self) -> str:
        """The table that a notebook shows."""
        return render(
            "train/experts/view.html", view=self, moved=self.moved(), label=label, hue=hue, zip=zip
        )

    def page(self) -> str:
        """The table as an HTML page."""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
            '<meta name="color-scheme" content="light dark">\n<title>Experts of a text</title>'
            f"</head><body>\n{self._repr_html_()}\n</body></html>\n"
        )

    def __str__(self) -> str:
        """Formats a line for each token: its losses, and the most probable next token."""
        passes = {"loss": self.plain, "changed loss": self.changed}
        rows = [["", *(name for name, each in passes.items() if each), "next token"]]
        for number, (token, likely) in enumerate(zip(self.tokens, self.next_tokens, strict=True)):
            losses = [each.losses[number] for each in passes.values() if each]
            best = max(likely, key=_chance)
            rows.append([label(token), *map(in_words, losses), label(best.token)])
        return "\n".join(aligned(rows, "<><" if self.changed is None else "<>><"))

    def __repr__(self) -> str:
        """Names the model and its loss."""
        losses = [each.loss for each in (self.plain, self.changed) if each is not None]
        shown = " -> ".join("none" if loss is None else f"{loss:.4f}" for loss in losses)
        return f"polyad.TextView({self.name!r}: {len(self.tokens)} tokens, loss {shown})"


def label(token: str) -> str:
    """Formats a token on one line, with visible line ends, control characters and sole blanks."""
    return signs(token if token.strip(" ") else "\u2423" * len(token)).replace("\n", "")


def hue(expert: int) -> float:
    """The hue of an expert in degrees, far from those of its neighbors."""
    return expert * 137.508 % 360


@torch.inference_mode()
def view_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    name: str,
    token_ids: Sequence[int],
    *,
    interventions: Sequence[Intervention] = (),
    top: int = TOP,
    means: Callable[[], Mapping[str, Tensor]] | None = None,
) -> TextView:
    """Reads a text, and reads it again under interventions.

    Args:
        model: a decoder in evaluation mode, whole on one device.
        tokenizer: the model's tokenizer.
        name: the model's name for display.
        token_ids: the text's token ids, at most as many as the model reads.
        interventions: applied all at once, at every token.
        top: number of experts to show per token and level of a muMoE.
        means: see `intervened`.

    Raises:
        ConfigError: the model does not have these layers or experts.
    """
    changed = changed_TV = None
    if interventions:
        with intervened(model, interventions, means):
            changed, changed_TV = _read(model, token_ids, top)
    plain, logits_TV = _read(model, token_ids, top)

    @functools.cache
    def text(token_id: int) -> str:
        return tokenizer.text_within(token_id) or tokenizer.decode([token_id])

    return TextView(
        name=name,
        tokens=[text(each) for each in token_ids],
        token_ids=list(token_ids),
        plain=plain,
        changed=changed,
        interventions=list(interventions),
        next_tokens=_next_tokens(logits_TV, changed_TV, tokenizer.vocab_size, text),
    )


def _read(model: nn.Module, token_ids: Sequence[int], top: int) -> tuple[Pass, Tensor]:
    """A forward pass, and its logits [T, V]."""
    # Called after the interventions: hooks run in order, so it gets the changed values.
    experts, output = read_experts(model, token_ids, top)
    logits_TV = output.logits[0]
    targets_P = torch.tensor(token_ids[1:], device=logits_TV.device, dtype=torch.int64)
    losses_P = nn.functional.cross_entropy(logits_TV[:-1].float(), targets_P, reduction="none")
    return Pass(layers=experts, losses=[None, *losses_P.tolist()]), logits_TV


def _next_tokens(
    logits_TV: Tensor, changed_TV: Tensor | None, vocab_size: int, text: Callable[[int], str]
) -> list[list[NextToken]]:
    both = [each.float().softmax(-1) for each in (logits_TV, changed_TV) if each is not None]
    # Embedding rows beyond the vocabulary have no text.
    count = min(NEXT, vocab_size)
    ids_TN = torch.cat([p_TV[:, :vocab_size].topk(count).indices for p_TV in both], dim=1)
    plain, *changed = (p_TV.gather(1, ids_TN).tolist() for p_TV in both)
    likeliest = []
    for t, ids in enumerate(ids_TN.tolist()):
        likely = {
            token_id: NextToken(
                text(token_id), token_id, plain[t][place], changed[0][t][place] if changed else None
            )
            for place, token_id in enumerate(ids)
        }
        likeliest.append(list(likely.values()))
    return likeliest


def _chance(token: NextToken) -> float:
    """The probability of a token under the interventions, if there are any."""
    return token.probability if token.changed is None else token.changed


def _set_of(layer: LayerExperts) -> Tensor:
    """Each token's experts in order of their numbers [T, K]."""
    return layer.experts.sort(1).values
