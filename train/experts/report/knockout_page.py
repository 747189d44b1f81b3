"""What a page says of an expert that is left out, beside its top tokens."""

from html import escape

from polyad.train.experts.class_changes import Change
from polyad.train.experts.knockout import ExpertWithout, Harmed

MOST_CLASSES = 3
"""That are named of an expert."""


def knockout_note(tokens: int) -> str:
    """What the numbers below are.

    Args:
        tokens: that were read without experts.
    """
    return (
        f'<p class="note">Without an expert: the change of the loss in nats a token when its part '
        f"is left out and the others stay as they are, of {tokens:,} tokens evenly over the "
        f"split; over all tokens, and over those that it has a part in. Named are the classes of "
        f"tokens whose loss rises most, by the token that is predicted and by the one that is "
        f"read; in brackets 95% intervals over windows.</p>"
    )


def without_expert(without: ExpertWithout) -> str:
    """The lines of an expert.

    Args:
        without: what was found.
    """
    lines = [f"Without it: {_said(without.change)}; its own tokens {_said(without.own_change)}"]
    for side, classes in without.harmed.items():
        lines.append(f"{side} tokens: {_classes(classes)}")
    return f'<p class="note">{"<br>".join(lines)}</p>'


def _classes(harmed: list[Harmed]) -> str:
    named = [f"{escape(one.title)} {_said(one.change)}" for one in harmed[:MOST_CLASSES]]
    return ", ".join(named) or "none beyond noise"


def _said(change: Change) -> str:
    if change.value != change.value:
        return "none"
    if change.low != change.low:
        return f"{change.value:+.4f}"
    star = " *" if change.is_beyond_noise else ""
    return f"{change.value:+.4f} [{change.low:+.4f}, {change.high:+.4f}]{star}"
