"""A mixture of whole networks: small experts, and a gate that weights their class predictions.

    p = gate(x)        y = sum_e p_e softmax(o_e(x))

The model returns log y, by logsumexp: its softmax is y, and its cross-entropy is the negative
log-likelihood of the mixture. The gate is a network too; with G and E_e the last hidden layers of
the gate and of the experts, before their ReLUs,

    softmax      p = softmax(W relu(G) + b)
    attentive    p = softmax(Q K^T / sqrt(h)),  Q = G W_q,  K_e = E_e W_k

A network is, on pixels, a perceptron with optional convolutions before it:

    convolution, BatchNorm if configured, ReLU, max-pooling over 2 x 2        once for each
    linear, ReLU                                                              once for each
    linear

Source: Krishnamurthy et al. 2023, "Improving expert specialization in mixture of experts", sections
1 and 5, appendix B; the mixture itself: Jacobs et al. 1991, "Adaptive mixtures of local experts".

Shapes: B images, C channels, H x W pixels, M experts, D width of an expert's last hidden layer, G
width of the gate's, K classes, O outputs of a network, N channels of all BatchNorms side by side.
"""

from itertools import pairwise
from typing import Annotated, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import conv2d, max_pool2d, relu

from polyad.model.block import run_block
from polyad.model.config import Config, Count, SectionError
from polyad.model.initialization import ONES, ZEROS, Initializer, uniform
from polyad.model.mumoe.gating import BatchNorm, GateOutput
from polyad.model.mumoe.layer import gate_statistics
from polyad.model.output import NO_TENSORS, ModelOutput, RoutingStats, StatisticsModule
from polyad.model.settings import ModelSettings
from polyad.model.smoe.losses import importance_loss, load_balance_loss, router_z_loss
from polyad.model.smoe.router import count
from polyad.model.vision import ImageSettings

POOL = 2
"""Side and stride of the max-pooling."""


class NetworkConfig(Config):
    """A small network of convolutions and hidden layers."""

    convolutions: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """Number of output channels of each convolution; []: no convolutions, the hidden layers read
    the pixels."""
    kernel_size: Count = 3
    """Kernel size of the convolutions, in pixels."""
    padding: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Zero padding of each convolution's input, in pixels on each side."""
    batch_norm: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = ()
    """Numbers, from 0, of the convolutions that are followed by a BatchNorm."""
    hidden_sizes: Annotated[tuple[Count, ...], Field(strict=False, min_length=1)] = (128, 32)
    """Width of each hidden layer, in units. An attentive gate reads the last one before its
    ReLU."""

    def check(self, image_size: int) -> None:
        """Checks that the convolutions leave some pixels for the hidden layers.

        Args:
            image_size: Side of the image, in pixels.

        Raises:
            SectionError: None are left, or a BatchNorm has no convolution.
        """
        if strange := [n for n in self.batch_norm if n >= len(self.convolutions)]:
            raise SectionError(
                f"@batch_norm: there is no convolution {strange[0]}; @convolutions has "
                f"{len(self.convolutions)}, numbered from 0"
            )
        if len(set(self.batch_norm)) < len(self.batch_norm):
            raise SectionError(f"@batch_norm: {list(self.batch_norm)} names a convolution twice")
        for number, side in enumerate(self.sides(image_size)[1:]):
            if side < 1:
                raise SectionError(
                    f"@convolutions: of {image_size} x {image_size} pixels none are left after "
                    f"convolution {number} and its pooling; use fewer convolutions, a smaller "
                    "@kernel_size or more @padding"
                )

    def sides(self, image_size: int) -> list[int]:
        """Returns the side of the image at first and after each convolution and its pooling, in
        pixels.

        Args:
            image_size: Side before the first convolution.
        """
        sides = [image_size]
        for _ in self.convolutions:
            sides.append((sides[-1] + 2 * self.padding - self.kernel_size + 1) // POOL)
        return sides

    def widths(self, image_size: int, channels: int) -> list[int]:
        """Returns the input width of the first hidden layer and the width of each, in units."""
        channels = [channels, *self.convolutions][-1]
        return [channels * self.sides(image_size)[-1] ** 2, *self.hidden_sizes]


class SmallNetwork(nn.Module):
    """A small network.

    If all of its parameters are frozen it stays in evaluation mode, so that its BatchNorms do not
    change either.

    Args:
        model: The configuration of the model.
        config: Its own sizes.
        outputs: O; None: the network ends with its last hidden layer.
    """

    def __init__(self, model: "MixtureConfig", config: NetworkConfig, outputs: int | None) -> None:
        super().__init__()
        channels = 1 if model.grey else model.channels
        sizes = pairwise((channels, *config.convolutions))
        self.convolutions = nn.ModuleList(
            Convolution(read, made, config, norm=number in config.batch_norm)
            for number, (read, made) in enumerate(sizes)
        )
        widths = config.widths(model.image_size, channels)
        self.hidden = nn.ModuleList(Linear(*sizes) for sizes in pairwise(widths))
        self.output = None if outputs is None else Linear(widths[-1], outputs)

    def forward(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor | None, list[dict[str, Tensor]]]:
        """Runs the network.

        Args:
            x_BCHW: Images.

        Returns:
            The last hidden layer before its ReLU [B, D]; the output [B, O], or None for a network
            without an output layer; and the moments over images and pixels of the input of each
            BatchNorm, as in `GateOutput`.
        """
        moments = []
        for convolution in self.convolutions:
            x_BCHW, of_norm = convolution(x_BCHW)
            moments += [of_norm] if of_norm else []
        hidden_BD = x_BCHW.flatten(1)
        for number, layer in enumerate(self.hidden):
            hidden_BD = layer(relu(hidden_BD) if number else hidden_BD)
        output_BO = None if self.output is None else self.output(relu(hidden_BD))
        return hidden_BD, output_BO, moments

    def train(self, mode: bool = True) -> "SmallNetwork":
        """Sets training mode, unless everything is frozen."""
        return super().train(mode and any(p.requires_grad for p in self.parameters()))


class Convolution(nn.Module):
    """A convolution, BatchNorm with a scale and a shift per channel, ReLU, and max-pooling.

    BatchNorm works as in the gates of a muMoE: in training it normalizes over the images of all
    data-parallel ranks, and its running statistics are updated from those of the step.

    Args:
        read: Number of input channels.
        made: Number of output channels.
        config: The network's configuration.
        norm: Whether it has a BatchNorm.
    """

    norm: BatchNorm | None

    def __init__(self, read: int, made: int, config: NetworkConfig, *, norm: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(made, read, config.kernel_size, config.kernel_size))
        self.bias = nn.Parameter(torch.empty(made))
        self.padding = config.padding
        self.norm = BatchNorm([made]) if norm else None
        if norm:
            self.scale = nn.Parameter(torch.empty(made))
            self.shift = nn.Parameter(torch.empty(made))

    def initializers(self) -> dict[str, Initializer]:
        """Initializes like PyTorch: uniform, bounded by one over the square root of the inputs."""
        start = uniform(self.weight[0].numel() ** -0.5)
        return {"weight": start, "bias": start, "scale": ONES, "shift": ZEROS}

    def forward(self, x_BCHW: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Convolves.

        Args:
            x_BCHW: Images, or the output of the previous convolution.

        Returns:
            The output, and the moments of BatchNorm's input; empty without BatchNorm.
        """
        y_BCHW = conv2d(x_BCHW, self.weight, self.bias, padding=self.padding)
        moments = NO_TENSORS
        if self.norm is not None:
            wide = torch.promote_types(y_BCHW.dtype, torch.float32)
            y_BHWC = y_BCHW.to(wide).permute(0, 2, 3, 1)
            levels, moments = self.norm(y_BHWC.flatten(0, 2))
            y_BHWC = levels[0].view(y_BHWC.shape) * self.scale + self.shift
            y_BCHW = y_BHWC.permute(0, 3, 1, 2).to(y_BCHW.dtype)
        return max_pool2d(relu(y_BCHW), POOL), moments


class Linear(nn.Linear):
    """A linear layer with PyTorch's initialization."""

    def initializers(self) -> dict[str, Initializer]:
        """Initializes uniformly, bounded by one over the square root of the inputs."""
        start = uniform(self.in_features**-0.5)
        return {"weight": start, "bias": start}


SCORES = "mixture.gate.scores."
"""Name prefix of the parameters that depend on the kind of gate."""


class MixtureConfig(ImageSettings):
    """A mixture of whole networks; the defaults are the paper's MNIST model with the plain gate."""

    kind: Literal["mixture"] = "mixture"
    """The kind of model."""
    image_size: Count = 28
    """Side of the square input image, in pixels."""
    grey: bool = False
    """Whether images are converted to greyscale: one value per pixel, the mean of red, green and
    blue."""
    num_experts: Annotated[int, Field(ge=2, le=10_000)] = 5
    """Number of experts M."""
    expert: NetworkConfig = NetworkConfig(convolutions=(1,), hidden_sizes=(5, 32))
    """Sizes of each expert, whose output layer predicts the classes."""
    gate_network: NetworkConfig = NetworkConfig(convolutions=(1,), hidden_sizes=(128, 32))
    """Sizes of the gate network, without its last layer."""
    gate: Literal["softmax", "attentive"] = "softmax"
    """How the last hidden layer of the gate network becomes the weights of the experts: `softmax`,
    by a linear layer, or `attentive`, by attention to the experts' last hidden layers, for which
    every expert has to run."""
    top_k: Annotated[int, Field(ge=1)] | None = None
    """Number of experts per image, those with the largest weights, which are renormalized to sum to
    1. null: all experts."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.top_k is not None and self.top_k > self.num_experts:
            raise ValueError(
                f"model.top_k: {self.top_k} is more than model.num_experts: {self.num_experts}"
            )
        for key, network in (("expert", self.expert), ("gate_network", self.gate_network)):
            try:
                network.check(self.image_size)
            except SectionError as error:
                raise ValueError(error.within(f"model.{key}")) from None
        return self

    def has_experts(self) -> bool:
        """Returns True: it chooses among experts before its head."""
        return True

    def gives_log_probabilities(self) -> bool:
        """Returns True: class probabilities are mixed."""
        return True

    def begins_anew_from(self, theirs: ModelSettings) -> tuple[str, ...]:
        """The last layer of the gate, if the other model has another kind of gate."""
        other = isinstance(theirs, MixtureConfig) and theirs.gate != self.gate
        return (SCORES,) if other else ()

    def in_words(self) -> str:
        """Describes the experts and the gate for the user."""
        return f"mixture of {self.num_experts} networks, {self.gate} gate"


class Shares(NamedTuple):
    """The output of the gate."""

    scores_BM: Tensor
    """The scores of all experts, at least fp32, before top-K."""
    log_p_BM: Tensor
    """Logarithm of each expert's weight; minus infinity for weight 0."""


class MixtureGate(nn.Module):
    """A network, and a last layer that turns its last hidden layer into the experts' weights.

    An attentive gate has queries from the gate and keys from the experts, without biases.

    Args:
        config: The model's configuration.
    """

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.network = SmallNetwork(config, config.gate_network, None)
        width, expert_width = config.gate_network.hidden_sizes[-1], config.expert.hidden_sizes[-1]
        self.scores: nn.Module = Linear(width, config.num_experts)
        if config.gate == "attentive":
            query = Linear(width, expert_width, bias=False)
            key = Linear(expert_width, expert_width, bias=False)
            self.scores = nn.ModuleDict({"query": query, "key": key})
        self.top_k = config.top_k

    def forward(self, gate_BG: Tensor, experts_BMD: Tensor | None = None) -> Shares:
        """Computes the weights of the experts.

        Args:
            gate_BG: The last hidden layer of `network`, before its ReLU.
            experts_BMD: Each expert's last hidden layer, before its ReLU; an attentive gate needs
                it.
        """
        if isinstance(self.scores, nn.ModuleDict):
            query_BD, key_BMD = self.scores["query"](gate_BG), self.scores["key"](experts_BMD)
            scores_BM = torch.einsum("BD,BMD->BM", query_BD, key_BMD)
            scores_BM = scores_BM.div(key_BMD.shape[-1] ** 0.5)
        else:
            scores_BM = self.scores(relu(gate_BG))
        scores_BM = scores_BM.to(torch.promote_types(scores_BM.dtype, torch.float32))
        of_chosen_BM = scores_BM
        if self.top_k is not None:
            best_BK = scores_BM.topk(self.top_k, dim=-1).indices
            others_BM = torch.ones_like(scores_BM, dtype=torch.bool).scatter(1, best_BK, False)
            of_chosen_BM = scores_BM.masked_fill(others_BM, float("-inf"))
        return Shares(scores_BM, of_chosen_BM.log_softmax(-1))


class Mixture(StatisticsModule):
    """Experts and their gate.

    Args:
        config: The model's configuration.
    """

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        classes = config.number("num_classes")
        self.experts = nn.ModuleList(
            SmallNetwork(config, config.expert, classes) for _ in range(config.num_experts)
        )
        self.gate = MixtureGate(config)

    def forward(self, x_BCHW: Tensor) -> tuple[Tensor, RoutingStats]:
        """Classifies images.

        Args:
            x_BCHW: Images, preprocessed for the networks.

        Returns:
            Log-probabilities of the classes [B, K], and the statistics of the gate.
        """
        networks = (self.gate.network, *self.experts)
        ran = (run_block(network, x_BCHW, self.config.recompute) for network in networks)
        (gate_BG, *hidden), (_, *outputs), (of_gate, *moments) = zip(*ran, strict=True)
        shares = self.gate(gate_BG, torch.stack(hidden, dim=1))
        log_p_BMK = torch.stack(outputs, dim=1).to(shares.log_p_BM.dtype).log_softmax(-1)
        log_p_BK = (shares.log_p_BM.unsqueeze(-1) + log_p_BMK).logsumexp(1)
        of_norms = [of_norm for each in (*moments, of_gate) for of_norm in each]
        return log_p_BK, self._statistics(shares, gate_BG, of_norms)

    def _statistics(
        self, shares: Shares, gate_BG: Tensor, moments: list[dict[str, Tensor]]
    ) -> RoutingStats:
        scores_BM, log_p_BM = shares
        before_BM = scores_BM.softmax(-1)
        best_BK = log_p_BM.topk(self.config.top_k or 1, dim=-1).indices
        load_M = count(best_BK, log_p_BM.shape[1]).to(scores_BM.dtype) / best_BK.numel()
        losses = {
            "balance_loss": load_balance_loss(
                self.for_loss("balance_loss", before_BM).mean(0), load_M
            ),
            "z_loss": router_z_loss(self.for_loss("z_loss", scores_BM)),
            "importance_loss": importance_loss(self.for_loss("importance_loss", before_BM).mean(0)),
        }
        stats = gate_statistics(GateOutput([log_p_BM.detach().exp()]))
        stats = stats._replace(name="mixture", losses=losses)
        if self.training and moments:
            of_all = {
                f"norm_{name}_N": torch.cat([each[f"score_{name}_S"] for each in moments])
                for name in ("mean", "square")
            }
            stats = stats._replace(measures=stats.measures | of_all)
        return self.with_samples(stats, [before_BM], gate_BG.unsqueeze(1))

    def update(self, stats: RoutingStats, progress: float) -> None:
        """Updates the running statistics of the BatchNorms; called once after each optimizer step.

        Args:
            stats: The mixture's statistics, averaged over the step.
            progress: Fraction of the run's steps that are done.
        """
        if "norm_mean_N" not in stats.measures:
            return
        norms = [norm for norm in self.modules() if isinstance(norm, BatchNorm)]
        sizes = [sum(norm.num_experts) for norm in norms]
        means, squares = (
            stats.measures[name].split_with_sizes(sizes)
            for name in ("norm_mean_N", "norm_square_N")
        )
        for norm, mean_C, square_C in zip(norms, means, squares, strict=True):
            if norm.training:  # a frozen network is not in training mode
                norm.update({"score_mean_S": mean_C, "score_square_S": square_C})


class MixtureModel(nn.Module):
    """A mixture of whole networks; see `Decoder` for how a model is built and filled.

    Args:
        config: Its configuration, with the number of classes filled in.

    Raises:
        ValueError: The number of classes is None.
    """

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        self.mixture = Mixture(config)

    def forward(self, images_BCHW: Tensor) -> ModelOutput:
        """Classifies images.

        Args:
            images_BCHW: Normalized images.

        Returns:
            Log-probabilities of the classes [B, K], and the statistics of the gate.
        """
        x_BCHW = self.as_read(images_BCHW.to(next(self.parameters()).dtype))
        logits_BK, stats = self.mixture(x_BCHW)
        return ModelOutput(logits_BK, (stats,))

    def as_read(self, images_BCHW: Tensor) -> Tensor:
        """Preprocesses images for the networks: to greyscale if the model is grey.

        Args:
            images_BCHW: Normalized images.
        """
        return images_BCHW.mean(1, keepdim=True) if self.config.grey else images_BCHW
