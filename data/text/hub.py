"""Data sets of the Hugging Face hub: by name, from a local copy, or saved to disk.

Nothing here runs code that comes with a data set.
"""

import contextlib
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from polyad.data.errors import DataError, listed, nearest, one_line, user_path
from polyad.data.prepared import SPLITS, LeftOut, SplitName
from polyad.data.text.source import EMPTY, WHOLE, Document, Part, Source

HUB, ARROW = "hub:", "arrow:"
README = "README.md"  # its metadata assigns files to configurations and splits
BATCH_ROWS = 256
"""Rows read at a time."""

NETWORK_LIBRARIES = frozenset({"httpx", "httpx2", "aiohttp", "requests", "urllib3"})
"""Libraries whose errors need not be OSErrors; `datasets` uses any of them, by version."""

# WikiText is stored line by line. A level-1 heading between blank lines opens an article:
# " = Title = "; " = = Section = = " is of level 2.
_HEADING = re.compile(r" = (?!= ).*(?<! =) = \n?")
_BLANK_LINE = " \n"
"""A blank line in WikiText's own files; the hub has an empty string instead."""


class HubDataset(NamedTuple):
    """The location of a data set.

    Attributes:
        spec: The data set as the user wrote it.
        name: OWNER/NAME on the hub, or a local folder.
        config: Its configuration; None if it has only one.
        kind: On the hub, a folder with the same layout, or a folder made by `save_to_disk`.
    """

    spec: str
    name: str
    config: str | None
    kind: Literal["hub", "copy", "saved"] = "hub"


SHORT_NAMES: dict[str, tuple[str, str | None]] = {
    "openwebtext": ("Skylion007/openwebtext", None),
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-raw-v1"),
    "wikitext-103-v1": ("Salesforce/wikitext", "wikitext-103-v1"),
}
"""Short names of data sets. `wikitext-103-v1` has rare words as <unk>."""


def find_dataset(spec: str) -> HubDataset | None:
    """Reads the name of a Hugging Face data set.

    Args:
        spec: One of `SHORT_NAMES`; `hub:OWNER/NAME[:CONFIG]`; `hub:FOLDER[:CONFIG]`, a local copy
            of a data set's files; `arrow:FOLDER`, or FOLDER alone, that `save_to_disk` made.

    Returns:
        The data set; None if the name is not that of a Hugging Face data set.

    Raises:
        DataError: It is meant to be one, but is not written as one, or the folder does not exist.
    """
    if spec in SHORT_NAMES:
        return HubDataset(spec, *SHORT_NAMES[spec])
    if spec.startswith(ARROW):
        folder = user_path(spec.removeprefix(ARROW) or spec)
        if not _is_saved(folder):
            raise DataError(f"{spec}: not a folder that `save_to_disk` of `datasets` made")
        return HubDataset(spec, str(folder), None, "saved")
    if not spec.startswith(HUB):
        folder = user_path(spec)
        return HubDataset(spec, str(folder), None, "saved") if _is_saved(folder) else None
    name = spec.removeprefix(HUB)
    head, _, tail = name.rpartition(":")
    for place, config in ((name, None), (head, tail)):
        if place and (folder := user_path(place)).is_dir():
            return HubDataset(spec, str(folder), config, "saved" if _is_saved(folder) else "copy")
    if match := re.fullmatch(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?::([\w.-]+))?", name, re.ASCII):
        return HubDataset(spec, match[1], match[2])
    raise DataError(
        f"{spec}: neither hub:OWNER/NAME[:CONFIG] nor hub:FOLDER[:CONFIG] with a folder that exists"
    )


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    )


@dataclass(frozen=True)
class DatasetSource:
    """One split of a Hugging Face data set.

    Attributes:
        spec: What the user wrote.
        split: Which split.
        text_key: Column of the text.
        total_bytes: Size of the split's text, about; 0 where the data set does not say.
        digest: Names the version of the data set.
        rows: Reads it: `datasets.Dataset`, or `datasets.IterableDataset` if streamed.
        by_article: Whether rows are lines of WikiText, which are joined to articles.
        part: Which of its documents are read.
        left_out: Splits with other names.
    """

    spec: str
    split: SplitName
    text_key: str
    total_bytes: int
    digest: str
    rows: Any
    by_article: bool
    part: Part = WHOLE
    left_out: LeftOut = field(default_factory=LeftOut, compare=False)

    def listing_digest(self) -> str:
        """Returns a SHA-256 of the version, from the hub or from the files' times."""
        return hashlib.sha256(f"{self.split}\0{self.digest}".encode()).hexdigest()

    def share(self, part: Part) -> "DatasetSource":
        """Returns a part of the split: of its rows, or of the files of a stream, else of its
        documents."""
        can_skip = hasattr(self.rows, "select") or self.rows.num_shards >= part.parts
        if can_skip and not self.by_article:
            rows = self.rows.shard(part.parts, part.number)
            return replace(self, rows=rows, total_bytes=self.total_bytes // part.parts)
        return replace(self, part=part)

    def documents(self, left_out: LeftOut | None = None) -> Iterator[Document]:
        """Reads the split from its beginning; see `data.text.source.Source`."""
        counted = left_out if self.part.number == 0 else None
        return self.part.of(self._documents(LeftOut() if counted is None else counted))

    def _documents(self, left_out: LeftOut) -> Iterator[Document]:
        texts = join_articles(self._texts()) if self.by_article else self._texts()
        for number, text in enumerate(texts):
            if text:
                yield Document(f"{self.spec} {self.split}#{number}", text)
            else:
                left_out.add(EMPTY)

    def _texts(self) -> Iterator[str]:
        row = 0
        with _one_line(self.spec):
            for batch in self.rows.iter(batch_size=BATCH_ROWS):
                if self.text_key not in batch:
                    raise DataError(_no_column(self.spec, self.text_key, list(batch)))
                for text in batch[self.text_key]:
                    if not isinstance(text, str):
                        raise DataError(
                            f"{self.spec}: {self.split} row {row}: {self.text_key!r} is "
                            f"{text!r:.60}, not a string"
                        )
                    row += 1
                    yield text


def join_articles(lines: Iterator[str]) -> Iterator[str]:
    """Joins lines of WikiText, as stored on the hub, into the original articles.

    Args:
        lines: Lines in order, with or without the line feed; a blank line is an empty string.

    Yields:
        Each article from its heading to the line before the next; all of them together are the
        text of WikiText's own file.
    """
    article: list[str] = []
    begun, after_blank = False, True
    for line in lines:
        if after_blank and _HEADING.fullmatch(line):
            if begun:
                yield "".join(article)
                article.clear()
            begun = True
        after_blank = not line.strip()
        article.append(_BLANK_LINE if after_blank else line if line.endswith("\n") else line + "\n")
    if article:
        yield "".join(article)


def open_dataset(
    dataset: HubDataset, *, text_key: str = "text", streaming: bool = False
) -> dict[SplitName, Source]:
    """Opens a data set; one on the hub is downloaded to its cache, unless streamed.

    Args:
        dataset: The data set.
        text_key: Column of the text.
        streaming: Whether to read data on the hub without a copy on disk.

    Returns:
        Those of the splits train, validation and test that it has.

    Raises:
        DataError: There is no such data set, configuration or column, it has no train split, or it
            cannot be reached.
    """
    digest, config, splits = _open(dataset, streaming)
    if "train" not in splits:
        raise DataError(f"{dataset.spec}: no train split; {other_splits(dataset, splits)}")
    by_article = (config or "").startswith("wikitext-")
    found: dict[SplitName, Source] = {}
    left_out = LeftOut()
    for name in splits:
        if name not in SPLITS:
            left_out.add(f"splits other than {', '.join(SPLITS)}")
    for name in SPLITS:
        if name not in splits:
            continue
        rows, columns = splits[name], splits[name].column_names
        if columns is not None:  # a streamed data set may not know its columns before the first row
            if text_key not in columns:
                raise DataError(_no_column(dataset.spec, text_key, columns))
            rows = rows.select_columns([text_key])
        size = (splits[name].info.splits or {}).get(name)
        found[name] = DatasetSource(
            spec=dataset.spec,
            split=name,
            text_key=text_key,
            total_bytes=(size.num_bytes or 0) if size else 0,
            digest=digest,
            rows=rows,
            by_article=by_article,
            left_out=left_out,
        )
    return found


def other_splits(dataset: HubDataset, splits: Iterable[str]) -> str:
    """Says which splits a data set has, and how to name one whose name is not train."""
    names = sorted(splits, key=lambda name: not name.startswith("train"))
    if not names:
        return "it has none"
    if dataset.kind == "saved":
        way = f"name the folder of one, such as {dataset.name}/{names[0]}"
    else:
        config = "" if dataset.config is None else f"{dataset.config!r}, "
        way = (
            f"save one with `datasets.load_dataset({dataset.name!r}, {config}split={names[0]!r})"
            ".save_to_disk(DIR)` and name DIR"
        )
    return f"it has {', '.join(names)}; {way}"


class _Opened(NamedTuple):
    """A data set opened by the library."""

    digest: str
    """Identifies its version."""
    config: str | None
    splits: Mapping[str, Any]
    """By split, a `datasets.Dataset` or `datasets.IterableDataset`."""


def _open(dataset: HubDataset, streaming: bool) -> _Opened:
    with _one_line(dataset.spec, dataset):
        if dataset.kind == "saved":
            return _load_saved(Path(dataset.name))
        return _load(dataset, streaming)


def _arguments(dataset: HubDataset) -> dict[str, Any]:
    """Returns the arguments for `datasets.load_dataset`."""
    if dataset.kind == "copy" and dataset.config and not (Path(dataset.name) / README).is_file():
        # A copy without the README that defines configurations: folders are named after them.
        return {"path": dataset.name, "data_dir": dataset.config}
    return {"path": dataset.name, "name": dataset.config}


def _load(dataset: HubDataset, streaming: bool) -> _Opened:
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    arguments = _arguments(dataset)
    if dataset.kind == "copy":
        folder = Path(dataset.name)
        # Always streamed: the library caches a copy of what it has loaded, and would return that
        # even if the files have changed.
        splits = datasets.load_dataset(**arguments, streaming=True)
        return _Opened(_listing(folder, dataset.config), dataset.config, dict(splits))
    builder = datasets.load_dataset_builder(**arguments)
    splits = datasets.load_dataset(**arguments, streaming=streaming)
    return _Opened(f"{builder.config.name}\0{builder.hash}", dataset.config, dict(splits))


def _load_saved(folder: Path) -> _Opened:
    import datasets

    loaded = datasets.load_from_disk(str(folder))
    # A single split that was saved alone is the train split, whatever its name.
    splits = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
    config = next(iter(splits.values())).info.config_name if splits else None
    return _Opened(_listing(folder, config), config, splits)


def _listing(folder: Path, config: str | None) -> str:
    """Digests names, sizes and times of the files of a local folder."""
    digest = hashlib.sha256(f"{config}\0".encode())
    for path in sorted(folder.rglob("*")):
        # Hidden files belong to tools: the hub's client keeps its state there.
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            status = path.stat()
            digest.update(
                f"{name.as_posix()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(
                    errors="surrogateescape"
                )
            )
    return digest.hexdigest()


@contextlib.contextmanager
def _one_line(spec: str, dataset: HubDataset | None = None) -> Iterator[None]:
    """Turns any exception of the library into a one-line error."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # bare ones of several libraries: pyarrow, the network
        reason = one_line(error)
        library = type(error).__module__.split(".")[0]
        of_network = isinstance(error, OSError) or library in NETWORK_LIBRARIES
        if dataset and dataset.kind == "hub" and of_network:
            reason += f"; {_what_to_do(dataset)}"
        raise DataError(f"{spec}: {reason}") from None


def _what_to_do(dataset: HubDataset) -> str:
    config = f":{dataset.config}" if dataset.config else ""
    return (
        f"where there is a network run `hf download --repo-type dataset {dataset.name} --local-dir "
        f"DIR`, copy DIR here, and name it as --source hub:DIR{config} (HF_HUB_OFFLINE=1 uses only "
        "what is in the cache of HF_HOME, and does not try the network)"
    )


def _no_column(spec: str, text_key: str, columns: list[str]) -> str:
    return (
        f"{spec}: no column {text_key!r}; columns present: "
        f"{listed(columns)}{nearest(text_key, columns)}; choose one with "
        "--text-key"
    )
