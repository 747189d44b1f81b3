"""Names of splits, classes and domains, as files and users give them.

A domain has samples of one kind, as the sketches among pictures, and can be left out of training:
with `data.leave_out` a run trains on and validates with the other domains, and its test split is
all that there is of those left out (Gulrajani & Lopez-Paz 2021, "In search of lost domain
generalization").
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from polyad.data.errors import DataError, listed, nearest
from polyad.data.json_reader import parse_json

SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    "test": "test",
}
"""What folders and files of splits are called, and the split that is meant."""


def named_classes(metadata: Mapping[bytes, bytes] | None, column: str) -> list[str] | None:
    """The names of the numbers in a column, which `datasets` writes beside a schema.

    Args:
        metadata: The metadata of the schema of a Parquet or Arrow file.
        column: The column of the labels.

    Returns:
        A name for each number from 0; None: the file names none.
    """
    try:
        about = parse_json((metadata or {}).get(b"huggingface", b"{}"), "huggingface")
        return names_of_feature(about["info"]["features"][column])
    except (ValueError, KeyError, TypeError):
        return None


def names_of_feature(feature: Any) -> list[str] | None:
    """The names in the description of a column, as `dataset_info.json` has it."""
    names = feature.get("names") if isinstance(feature, dict) else None
    return each_once(list(map(str, names))) if isinstance(names, list) and names else None


def schema_of(file: Path) -> Any:
    """The schema of a Parquet or Arrow file.

    Raises:
        DataError: It cannot be read.
    """
    import pyarrow
    import pyarrow.parquet

    kind = "Parquet" if file.suffix.lower() == ".parquet" else "Arrow"
    try:
        if kind == "Parquet":
            return pyarrow.parquet.read_schema(file)
        with pyarrow.memory_map(str(file)) as mapped:
            try:
                return pyarrow.ipc.open_stream(mapped).schema
            except pyarrow.ArrowInvalid:
                return pyarrow.ipc.open_file(mapped).schema
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read as {kind}: {str(error)[:120]}") from None


def each_once(names: Sequence[str]) -> list[str]:
    """Names of which none stands twice: of ImageNet's two cranes the number tells them apart."""
    count = Counter(names)
    return [f"{name} ({number})" if count[name] > 1 else name for number, name in enumerate(names)]


def _each_once(names: list[str] | None) -> list[str] | None:
    if names is None:
        return None
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ValueError(f"{name!r} is listed twice; list each domain once")
    return sorted(names)


LeaveOut = Annotated[list[str] | None, Field(min_length=1), AfterValidator(_each_once)]
"""Names of domains, sorted, as their order means nothing; or None."""


def check_leave_out(
    leave_out: Sequence[str] | None, domains: Sequence[str], place: str, made_by: str
) -> None:
    """Checks that the domains to leave out are there, and not all that there are.

    Args:
        leave_out: As `data.leave_out`.
        domains: The domains of the data; empty: it has none.
        place: The data, for errors.
        made_by: What gives data of this kind domains, for errors.

    Raises:
        DataError: They are not.
    """
    if leave_out is None:
        return
    if not domains:
        raise DataError(
            f"data.leave_out: {listed(leave_out)} is not allowed: {place} has no domains; set it "
            f"to null, or use {made_by}"
        )
    for name in leave_out:
        if name not in domains:
            raise DataError(
                f"data.leave_out: {name!r} is not a domain of {place}{nearest(name, domains)}; "
                f"domains: {listed(domains)}"
            )
    if set(leave_out) == set(domains):
        raise DataError(
            f"data.leave_out: all domains of {place} are left out ({listed(domains)}), so there is "
            "nothing to train on"
        )


def check_classes(domain: str, classes: Iterable[str], trained: Iterable[str]) -> None:
    """Checks that what is left out can be learned from the rest.

    Args:
        domain: One that is left out.
        classes: Names of those that it has.
        trained: Names of those that are trained on.

    Raises:
        DataError: It has more.
    """
    missing = sorted(set(classes) - set(trained))
    if missing:
        raise DataError(
            f"data.leave_out: {domain!r} has the class {listed(missing, 3)}, which the other "
            "domains do not have: a class that is never seen cannot be learned"
        )
