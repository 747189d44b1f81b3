"""Bytes of an image file to pixels.

simplejpeg decodes JPEGs where it is installed, and Pillow the rest; both give the same pixels.
Orientation tags are not followed, as in the usual ImageNet pipelines.
"""

import io
from typing import Any

import numpy as np
import numpy.typing as npt

from data.errors import DataError

Pixels = npt.NDArray[np.uint8]
"""[H, W, 3]."""
MAX_PIXELS = 178_956_970
"""Pixels of an image: Pillow's limit. A small file can hold more, to fill the memory."""
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
"""Of Pillow's formats: some of the others start programs."""
_JPEG = b"\xff\xd8\xff"

try:
    import simplejpeg
except ImportError:
    simplejpeg = None


def decode(content: bytes, name: str) -> Pixels:
    """Decodes an image of any mode to red, green and blue.

    Args:
        content: Of the file.
        name: Of the image, for the error.

    Returns:
        uint8 [H, W, 3].

    Raises:
        DataError: It is truncated, empty, damaged, no image, or too large.
    """
    if not content:
        raise DataError(f"{name}: is empty")
    if simplejpeg is not None and content.startswith(_JPEG):
        fast = _jpeg(content, name)
        if fast is not None:
            return fast
    return _any(content, name)


def _jpeg(content: bytes, name: str) -> Pixels | None:
    """A JPEG of three colours or of grey; None leaves it to Pillow."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
        _check_size(height * width, name)
        if colours not in ("YCbCr", "Gray", "RGB"):
            return None
        pixels: Pixels = simplejpeg.decode_jpeg(content, colorspace="RGB")
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        return None
    return pixels


def _any(content: bytes, name: str) -> Pixels:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            _check_size(image.width * image.height, name)
            image.load()
            if image.mode.startswith("I"):
                return _grey(np.asarray(image))
            return np.array(image.convert("RGB"))
    except DataError:
        raise
    except Image.DecompressionBombError:
        _check_size(MAX_PIXELS + 1, name)
        raise
    except Exception as error:  # Pillow's readers raise many kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        if "cannot identify image file" in reason:
            reason = "no image format is known that begins like this"
        raise DataError(f"{name}: cannot be decoded: {reason[:120]}") from None


def _grey(values: npt.NDArray[Any]) -> Pixels:
    """Grey of 16 bits as three equal colours of 8."""
    high = (values.astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
    return np.repeat(high[..., None], 3, axis=-1)


def _check_size(pixels: int, name: str) -> None:
    if pixels > MAX_PIXELS:
        raise DataError(
            f"{name}: has more pixels than the {MAX_PIXELS:,} that are allowed: it would fill the "
            f"memory"
        )
