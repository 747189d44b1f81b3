"""The first command of a newcomer."""

from typing import Annotated

from polyad.launch.command import Argument, command


@command("quickstart", "polyad quickstart", "polyad quickstart --images digits")
def quickstart(
    *,
    images: Annotated[
        str | None,
        Argument("train on images in place of text: digits, or a source as of `prepare`", "SOURCE"),
    ] = None,
) -> int:
    """Trains a small mixture of experts here, from raw data to a score: minutes on two cores.

    Everything is written below runs/quickstart, or runs/quickstart-images. A quickstart that was
    interrupted continues when it is started again.
    """
    from polyad.launch.quickstart import main

    return main(images)
