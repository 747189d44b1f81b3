"""Tokenizers of the Hugging Face hub: by name, from its cache or over the network."""

import contextlib
import re
from pathlib import Path

from polyad.data.errors import DataError
from polyad.data.json_reader import read_json
from polyad.data.text.manifest import SENTENCEPIECE_FILE, TOKENIZER_FILE

BYTE_LEVEL_FILES = ("vocab.json", "merges.txt")
"""GPT-2's own files."""
KINDS = ((TOKENIZER_FILE,), (SENTENCEPIECE_FILE,), ("vocab.txt",), BYTE_LEVEL_FILES)
"""Kinds of files that a tokenizer may be stored in; the first that exists is used."""
ABOUT_FILE = "tokenizer_config.json"
SECONDS = 10.0
"""Seconds after which a hub that does not answer counts as out of reach."""

_NAME = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_FILE_ENDINGS = (".json", ".model", ".txt", ".bin")


def is_hub_name(spec: str) -> bool:
    """Tells whether a text that is not an existing path may name a tokenizer of the hub.

    Args:
        spec: What the user wrote.

    Returns:
        Whether it is written as one, and is no misspelled path: of a file, or into a folder that
        exists.
    """
    if not _NAME.fullmatch(spec) or spec.endswith(_FILE_ENDINGS):
        return False
    return "/" not in spec or not Path(spec).parent.is_dir()


def fetch_tokenizer(name: str) -> Path:
    """Finds a tokenizer in the hub's cache, else downloads it into that.

    Args:
        name: NAME or OWNER/NAME.

    Returns:
        The folder of its files.

    Raises:
        DataError: There is no such tokenizer, or no way to the hub.
    """
    from huggingface_hub import get_session, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    reason = f"it has no {', '.join(kind[0] for kind in KINDS)}"
    try:
        if cached := _fetched(name, local=True):
            return cached
        # One request first: the download itself tries for half a minute without a network.
        get_session().head(hf_hub_url(name, TOKENIZER_FILE), timeout=SECONDS)
        if found := _fetched(name, local=False):
            with contextlib.suppress(EntryNotFoundError):
                hf_hub_download(name, ABOUT_FILE)
            return found
    except Exception as error:  # of any network library that the hub's client uses
        reason = " ".join(str(error).split())[:200] or type(error).__name__
    raise DataError(
        f"{name}: no such tokenizer here or in the Hugging Face cache, and the hub does not give "
        f"it: {reason}; where there is a network run `hf download {name} --include '*token*' "
        "--local-dir DIR`, copy DIR here, and name DIR as the tokenizer"
    )


def _fetched(name: str, *, local: bool) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for kind in KINDS:
        try:
            files = [hf_hub_download(name, file, local_files_only=local) for file in kind]
        except EntryNotFoundError as error:
            if isinstance(error, LocalEntryNotFoundError) and not local:
                raise  # the network, not the hub, fails
            continue
        return Path(files[0]).parent
    return None


def snapshot_of(folder: Path) -> Path:
    """Finds the snapshot in a folder of the hub's cache.

    Args:
        folder: Any folder.

    Returns:
        The snapshot of `main`, or the only one; any other folder is returned unchanged.
    """
    snapshots = folder / "snapshots"
    if not snapshots.is_dir():
        return folder
    main = folder / "refs" / "main"
    if main.is_file() and (named := snapshots / main.read_text().strip()).is_dir():
        return named
    found = [path for path in snapshots.iterdir() if path.is_dir()]
    return found[0] if len(found) == 1 else folder


def named_end_of_text(folder: Path) -> str | None:
    """Reads which token ends a document from `tokenizer_config.json`.

    Args:
        folder: Where that file may be.

    Returns:
        Its `eos_token`; None where there is none.

    Raises:
        DataError: The file cannot be read.
    """
    file = folder / ABOUT_FILE
    if not file.is_file():
        return None
    tree = read_json(file)
    if not isinstance(tree, dict):
        raise DataError(f"{file}: is no JSON object")
    token = tree.get("eos_token")
    end_of_text = token.get("content") if isinstance(token, dict) else token
    return end_of_text if isinstance(end_of_text, str) else None
