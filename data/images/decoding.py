"""Decodes the bytes of an image file to pixels.

JPEGs are decoded by simplejpeg where it is installed, everything else by Pillow; both give the
same pixels. Orientation tags are ignored, as in the usual ImageNet pipelines.
"""

import io
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError, one_line

Pixels = npt.NDArray[np.uint8]
"""[H, W, 3]."""
MOST_MEMORY = 1 << 30
"""Maximum memory to decode one image, in bytes. A small file can hold an image of any size."""
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
"""Formats that Pillow may read: some of the others start external programs."""
_JPEG = b"\xff\xd8\xff"
_JPEG_BYTES = 9
"""Bytes per pixel of a JPEG: three, and two per channel that a progressive JPEG keeps."""
_PILLOW_BYTES = {"1": 11, "L": 11, "P": 11, "RGB": 10, "I;16": 9, "I;16B": 9, "I;16L": 9, "I": 12}
"""Bytes per pixel by mode: Pillow's image, its RGB copy (4 bytes), and copies of that."""
_OTHER_BYTES = 14
_WEBP_BYTES = 8
"""Further bytes per pixel that the WebP decoder holds."""
_TOO_LARGE = f"takes more than the {MOST_MEMORY:,} bytes of memory that decoding may take"
TILE_WIDTH, TILE_LENGTH, BITS_PER_SAMPLE, PHOTOMETRIC, WHITE_IS_ZERO = 322, 323, 258, 262, 0
"""TIFF tags, and one value."""

try:
    import simplejpeg
except ImportError:
    simplejpeg = None


def decode(content: bytes, name: str) -> Pixels:
    """Decodes an image of any mode to RGB.

    Args:
        content: The content of the file.
        name: The name of the image, for error messages.

    Returns:
        uint8 [H, W, 3].

    Raises:
        DataError: It is truncated, empty, damaged, not an image, or would take too much memory.
    """
    if not content:
        raise DataError(f"{name}: is empty")
    if simplejpeg is not None and content.startswith(_JPEG):
        fast = _jpeg(content, name)
        if fast is not None:
            return fast
    return _any(content, name)


def _jpeg(content: bytes, name: str) -> Pixels | None:
    """Decodes a colour or grey JPEG; None if Pillow has to decode it."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
        _check_memory(height, width, _JPEG_BYTES, name)
        if colours not in ("YCbCr", "Gray", "RGB"):
            return None
        pixels: Pixels = simplejpeg.decode_jpeg(content, colorspace="RGB")
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        return None
    return pixels


def _any(content: bytes, name: str) -> Pixels:
    from PIL import Image, TiffImagePlugin

    # Pillow's own warning counts pixels and ignores the memory that they take.
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            bytes_of_pixel = _PILLOW_BYTES.get(image.mode, _OTHER_BYTES)
            bytes_of_pixel += _WEBP_BYTES if image.format == "WEBP" else 0
            height, width = image.height, image.width
            if isinstance(image, TiffImagePlugin.TiffImageFile):  # a tile may exceed the image
                height = max(height, int(image.tag_v2.get(TILE_LENGTH, 0)))
                width = max(width, int(image.tag_v2.get(TILE_WIDTH, 0)))
            _check_memory(height, width, bytes_of_pixel, name)
            _check_depth(image, name)
            image.load()
            if image.mode.startswith("I"):
                return _grey(image)
            rgb = image if image.mode == "RGB" else image.convert("RGB")
            return np.array(rgb)
    except DataError:
        raise
    except Image.DecompressionBombError:
        raise DataError(f"{name}: {_TOO_LARGE}") from None
    except Exception as error:  # Pillow's readers raise exceptions of many types
        reason = one_line(error, 120)
        if "cannot identify image file" in reason:
            reason = "no image format is known that begins like this"
        raise DataError(f"{name}: cannot be decoded: {reason}") from None


def _check_depth(image: Any, name: str) -> None:
    """Refuses grey images whose format does not define white: they would come out nearly black."""
    wide = image.mode == "I" and image.format == "TIFF"  # PNG and PGM of 16 bits are I, too
    if image.mode == "F" or wide:
        raise DataError(
            f"{name}: holds grey of 32 bits, of which the file does not say what is white; save it "
            f"with 8 or 16 bits"
        )


def _grey(image: Any) -> Pixels:
    """Converts grey of up to 16 bits to three equal 8-bit channels."""
    values = np.asarray(image)
    bits = 16
    if image.format == "TIFF":
        bits = int(image.tag_v2.get(BITS_PER_SAMPLE, (16,))[0])
        if image.tag_v2.get(PHOTOMETRIC) == WHITE_IS_ZERO:
            values = (1 << bits) - 1 - values
    high = (values >> (bits - 8)).astype(np.uint8)
    return np.repeat(high[..., None], 3, axis=-1)


def _check_memory(height: int, width: int, of_pixel: int, name: str) -> None:
    if height * width * of_pixel > MOST_MEMORY:
        raise DataError(f"{name}: {_TOO_LARGE}")
