"""Files that are there whole or not at all, whatever moment a process is killed at."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file beside its place, and moves it there; one that was there stays until then.

    Args:
        path: the file.
        text: all that it holds.
    """
    partial = partial_of(path)
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def partial_of(path: Path) -> Path:
    """Where `write_whole` writes; what a killed process leaves there may be overwritten."""
    return path.with_name(f".{path.name}.partial")
