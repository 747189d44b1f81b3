"""The configurations that come with Polyad, which are found by their names: gpt2/124m."""

import difflib
from pathlib import Path

# The folder `configs` of a clone, and of an installed package.
SHIPPED = Path(__file__).resolve().parents[2] / "configs"


def find_config(path: Path) -> Path:
    """Finds the file that a user means.

    Args:
        path: a file, or the name of a configuration that comes with Polyad: `gpt2/124m`, also
            written as it stands in the repository, `configs/gpt2/124m.yaml`.

    Returns:
        The file; the path itself if there is neither.
    """
    if path.exists() or path.is_absolute() or ".." in path.parts:
        return path
    name = path.as_posix().removeprefix("configs/").removesuffix(".yaml")
    shipped = SHIPPED / f"{name}.yaml"
    return shipped if shipped.is_file() else path


def near_config(path: Path) -> str:
    """The end of an error about a file that is not there: the nearest one that is."""
    names: dict[str, str] = {}
    if not path.is_absolute():
        for file in SHIPPED.rglob("*.yaml"):
            name = file.relative_to(SHIPPED).with_suffix("").as_posix()
            names[name] = names[f"{name}.yaml"] = names[f"configs/{name}.yaml"] = name
    if path.parent.is_dir():
        files = [file for file in path.parent.iterdir() if file.suffix in {".yaml", ".yml"}]
        names |= {str(file): str(file) for file in files}
    close = difflib.get_close_matches(str(path), names, n=1, cutoff=0.7)
    return f"; the nearest is {names[close[0]]}" if close else ""
