"""Image models as experts of a mixture: ViT and MLP-Mixer besides the small networks.

Shapes: B images, C channels, H x W pixels, D width of what the head reads, K classes.
"""

from collections.abc import Mapping
from typing import Annotated, TypeAlias

from pydantic import Field, ValidationError
from torch import Tensor, nn

from polyad.model.config import SectionError
from polyad.model.initialization import Initializer
from polyad.model.mixer import Mixer, MixerConfig
from polyad.model.small_network import NetworkConfig, NetworkOutput, SmallNetwork
from polyad.model.vision import LinearHeadConfig
from polyad.model.vit import ViT, ViTConfig

ExpertConfig: TypeAlias = Annotated[
    NetworkConfig | ViTConfig | MixerConfig, Field(discriminator="kind")
]
"""The architecture of an expert, the same for all experts of a mixture."""
MODELS: dict[str, type[ViTConfig | MixerConfig]] = {"vit": ViTConfig, "mixer": MixerConfig}


def completed(section: object, image_size: object, channels: object) -> object:
    """Fills in the keys of an expert's section that the mixture decides.

    Args:
        section: The parsed YAML.
        image_size: The mixture's image size, in pixels.
        channels: Number of values per pixel that the networks read.

    Raises:
        ValueError: The section is invalid, or contradicts the mixture; the message names the key.
    """
    if not isinstance(section, Mapping):
        return section
    section = {"kind": "network", **section}
    if not isinstance(section["kind"], str) or section["kind"] not in MODELS:
        return section
    decided = {"image_size": image_size, "channels": channels}
    for key, value in decided.items():
        if section.get(key, value) != value:
            raise ValueError(
                f"model.expert.{key}: {section[key]} differs from the value that the mixture gives "
                f"its experts: {value}"
            )
    section = section | decided
    try:
        MODELS[section["kind"]].model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":  # its message has full keys
            raise ValueError(
                str(first["ctx"]["error"]).replace("model.", "model.expert.")
            ) from None
    return section


def check_expert(config: ExpertConfig, image_size: int) -> None:
    """Checks an expert against its mixture.

    Args:
        config: The expert's configuration.
        image_size: Side of the image, in pixels.

    Raises:
        SectionError: It is not a valid expert.
    """
    if isinstance(config, NetworkConfig):
        config.check(image_size)
        return
    for key, feed_forward in config.feed_forwards().items():
        if feed_forward.kind != "dense":
            name = key.removeprefix("model.")
            raise SectionError(
                f"@{name}.kind: {feed_forward.kind} is not allowed in an expert of a mixture of "
                "networks; allowed: dense"
            )
    if not isinstance(config.head, LinearHeadConfig):
        raise SectionError(
            f"@head.kind: {config.head.kind} is not allowed in an expert of a mixture of networks; "
            "allowed: linear"
        )
    if config.num_classes is not None:
        raise SectionError(
            f"@num_classes: {config.num_classes} cannot be set for an expert: its output layer has "
            "the classes of the mixture, model.num_classes; allowed: null"
        )
    for key, allowed in (("recompute", "none"), ("compile", False)):
        value = getattr(config, key)
        if value != allowed:
            raise SectionError(f"@{key}: {value} cannot be set for an expert: set model.{key}")


def hidden_width(config: ExpertConfig) -> int:
    """Returns the width D of the last hidden layer."""
    if isinstance(config, NetworkConfig):
        return config.hidden_sizes[-1]
    return config.head_width()


def last_parameter(config: ExpertConfig) -> str:
    """Returns the name of a parameter near the end of an expert."""
    if isinstance(config, NetworkConfig):
        return "output.weight"
    return f"model.{config.last_parameter()}"


def build_expert(
    config: ExpertConfig, image_size: int, channels: int, classes: int
) -> "SmallNetwork | ExpertModel":
    """Builds an expert whose parameters have no values yet.

    Args:
        config: The configuration of the expert.
        image_size: Side of the images, in pixels.
        channels: Number of values per pixel.
        classes: K.
    """
    if isinstance(config, NetworkConfig):
        return SmallNetwork(config, image_size, channels, classes)
    return ExpertModel(_with_classes(config, classes))


def _with_classes(config: ViTConfig | MixerConfig, classes: int) -> ViTConfig | MixerConfig:
    return config.model_copy(update={"num_classes": classes})


class ExpertModel(nn.Module):
    """A ViT or a Mixer as an expert. If all of it is frozen, it stays in evaluation mode.

    Args:
        config: Its configuration, with the number of classes.
    """

    def __init__(self, config: ViTConfig | MixerConfig) -> None:
        super().__init__()
        self.model = ViT(config) if isinstance(config, ViTConfig) else Mixer(config)

    def initializers(self) -> dict[str, Initializer]:
        """Empty: the model has its own initializers."""
        return {}

    def forward(self, x_BCHW: Tensor) -> NetworkOutput:
        """Runs the model; its last hidden layer is the input of its head.

        Args:
            x_BCHW: Images.
        """
        x_BTD = self.model.embed(x_BCHW)
        for block in self.model.blocks:
            x_BTD, *_ = block(x_BTD)
        hidden_BD = self.model.pool(x_BTD)
        logits_BK: Tensor = self.model.head(hidden_BD)
        none = x_BCHW.new_empty(0)
        return NetworkOutput(hidden_BD, logits_BK, none, none)

    def train(self, mode: bool = True) -> "ExpertModel":
        """Sets training mode, unless everything is frozen."""
        return super().train(mode and any(p.requires_grad for p in self.parameters()))
