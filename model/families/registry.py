"""The supported families: to add one, write a module in this folder and add a line here."""

from collections.abc import Mapping
from typing import Any

from polyad.model.decoder_config import DecoderConfig
from polyad.model.families.bert import BERT
from polyad.model.families.decoders import DECODERS, family_of
from polyad.model.families.family import OUR_NAMES, Family
from polyad.model.families.gpt2 import GPT2
from polyad.model.families.keys import WeightsError
from polyad.model.families.vision import CLIP, VIT
from polyad.model.settings import ModelSettings

FAMILIES = (GPT2, BERT, VIT, CLIP, *DECODERS)
WRITTEN = {"gpt2": GPT2, "bert": BERT, "vit": VIT}
"""The family as which a model is written, by `model.kind`."""
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
        WeightsError: There is none.
    """
    if isinstance(config, DecoderConfig):
        return family_of(config)
    family = WRITTEN.get(config.kind)
    if family is None:
        raise WeightsError(
            f"model.kind: {config.kind!r}: other libraries have no such model; {OUR_NAMES}"
        )
    return family
