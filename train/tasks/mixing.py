"""Images and labels of a micro-batch as a model and its loss take them: normalized, and mixed.

Image b of a micro-batch is mixed with its neighbour b xor 1. The share and the box of each were
drawn with the sample, from the run's seed and its number, so a mixed image is the same on any
number of processes.

Shapes: B images of a micro-batch, C channels, H x W pixels, K classes.
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import one_hot


def normalize(images_BCHW: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Subtracts a mean and divides by a standard deviation, of each channel.

    Args:
        images_BCHW: Pixels from 0 to 255.
        mean: Of pixels from 0 to 1.
        std: Likewise.

    Returns:
        fp32.
    """
    mean_C11, std_C11 = _on_device(mean, std, images_BCHW.device)
    return (images_BCHW.float() - mean_C11) / std_C11


@functools.cache
def _on_device(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Both in units of a pixel: made once, as a copy to a GPU would wait for it in each step."""
    of_each = ([255 * x for x in values] for values in (mean, std))
    with torch.inference_mode(False):  # whoever asks first, all may use them
        mean_C11, std_C11 = (torch.tensor(x, device=device).view(-1, 1, 1) for x in of_each)
    return mean_C11, std_C11


def mix_images(images_BCHW: Tensor, mix_B: Tensor, box_B4: Tensor) -> Tensor:
    """Mixes each image with its neighbour.

    Args:
        images_BCHW: Pixels; B is even.
        mix_B: Share of each image in what it becomes; 1 leaves it as it is.
        box_B4: Top, left, bottom and right of the box that is the neighbour's (CutMix, Yun et al.
            2019). An empty box: all pixels are weighted means (mixup, Zhang et al. 2018).

    Returns:
        fp32 of the same shape.
    """
    images_BCHW = images_BCHW.float()
    others_BCHW = neighbours(images_BCHW)
    top, left, bottom, right = box_B4.to(torch.int64).unbind(-1)
    rows_H = torch.arange(images_BCHW.shape[-2], device=images_BCHW.device)
    columns_W = torch.arange(images_BCHW.shape[-1], device=images_BCHW.device)
    in_rows_BH = (rows_H >= top.unsqueeze(-1)) & (rows_H < bottom.unsqueeze(-1))
    in_columns_BW = (columns_W >= left.unsqueeze(-1)) & (columns_W < right.unsqueeze(-1))
    in_box_BHW = in_rows_BH.unsqueeze(-1) & in_columns_BW.unsqueeze(-2)
    boxed_B = (bottom > top) & (right > left)
    share_B = torch.where(boxed_B, torch.ones_like(mix_B), mix_B).view(-1, 1, 1, 1)
    blended_BCHW = torch.lerp(others_BCHW, images_BCHW, share_B)
    return torch.where(in_box_BHW.unsqueeze(1), others_BCHW, blended_BCHW)


def soft_targets(labels_B: Tensor, mix_B: Tensor | None, classes: int, smoothing: float) -> Tensor:
    """The share of each class in the target of each image.

    Args:
        labels_B: Class of each image; or 0 or 1 of each of its attributes [B, K].
        mix_B: Share of each image's own label; the rest is its neighbour's. None: not mixed.
        classes: K.
        smoothing: Share that is spread evenly over all classes (Szegedy et al. 2016); of attributes
            over yes and no.

    Returns:
        fp32 [B, K]; of classes each row sums to 1.
    """
    has_attributes = labels_B.dim() == 2
    targets_BK = (labels_B if has_attributes else one_hot(labels_B, classes)).float()
    if mix_B is not None:
        targets_BK = torch.lerp(neighbours(targets_BK), targets_BK, mix_B.unsqueeze(-1))
    even = 1 / 2 if has_attributes else 1 / classes
    return targets_BK * (1 - smoothing) + smoothing * even if smoothing else targets_BK


def neighbours(x: Tensor) -> Tensor:
    """The rows of each pair changed over: row b is row b xor 1 of x [B, ...], B even."""
    return x.view(-1, 2, *x.shape[1:]).flip(1).view_as(x)
