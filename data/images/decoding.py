"""Decodes the bytes of an image file to pixels.

JPEGs are decoded by simplejpeg where it is installed, everything else by Pillow; both give the
same pixels. Orientation tags are ignored, as in the usual ImageNet pipelines.
"""

import contextlib
import io
import warnings

import numpy as np
import numpy.typing as npt

from polyad.data.errors import DataError, one_line

Pixels = npt.NDArray[np.uint8]
"""[H, W, 3]."""
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
"""Formats that Pillow may read: some of the others start external programs."""
_JPEG = b"\xff\xd8\xff"

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
        DataError: It is truncated, empty, damaged or not an image.
    """
    if not content:
        raise DataError(f"{name}: is empty")
    if simplejpeg is not None and content.startswith(_JPEG):
        with contextlib.suppress(ValueError):  # Pillow names the fault
            if simplejpeg.decode_jpeg_header(content)[2] in ("YCbCr", "Gray", "RGB"):
                pixels: Pixels = simplejpeg.decode_jpeg(content, colorspace="RGB")
                return pixels
    from PIL import Image

    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.mode.startswith(("I", "F")):
                raise DataError(f"{name}: holds grey of more than 8 bits; save it with 8 bits")
            return np.array(image.convert("RGB"))
    except DataError:
        raise
    except Exception as error:  # Pillow's readers raise exceptions of many types
        reason = one_line(error, 120)
        if "cannot identify image file" in reason:
            reason = "no image format is known that begins like this"
        raise DataError(f"{name}: cannot be decoded: {reason}") from None
