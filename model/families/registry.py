"""The supported families: to add one, write a module in this folder and add a line here."""

from collections.abc import Mapping
from typing import Any

from polyad.model.families.decoders import DECODERS, GPT2
from polyad.model.families.encoders import BERT, CLIP, VIT
from polyad.model.families.family import OUR_NAMES, Family
from polyad.model.families.keys import WeightsError
from polyad.model.settings import ModelSettings

FAMILIES = (GPT2, BERT, VIT, CLIP, *DECODERS)
WRITTEN = (GPT2, BERT, VIT, *DECODERS)
"""Those as which models are written."""
SUPPORTED = ", ".join(name for family in FAMILIES for name in family.model_types)
"""The supported families, for messages."""


def family_of_files(tree: Mapping[str, Any], origin: str) -> Family:
    """Returns the family of a folder.

    Args:
        tree: The content of its config.json.
        origin: How to refer to config.json in errors.

    Raises:
        WeightsError: The family is not supported.
    """
    for family in FAMILIES:
        if family.is_of(tree):
            return family
    kind = tree.get("model_type")
    raise WeightsError(
        f"{origin}: model_type: {kind!r:.60} is not supported; supported: {SUPPORTED}"
    )


def family_of_model(config: ModelSettings) -> Family:
    """Returns the family as which a model is written.

    Args:
        config: The configuration of the model.

    Raises:
        WeightsError: There is none; the message names the differences from the nearest family.
    """
    nearest, reason = list[str](), "there are no models of this kind"
    for family in WRITTEN:
        if type(config) is not family.config:
            continue
        try:
            differing = family.differences(config)
        except WeightsError as error:
            reason = str(error)
            continue
        if not differing:
            return family
        if not nearest or len(differing) < len(nearest):
            nearest = differing
    raise WeightsError(
        f"model.kind: {config.kind}: transformers has no such architecture: "
        f"{'; '.join(nearest[:3]) or reason}; {OUR_NAMES}"
    )
