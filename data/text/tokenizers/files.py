"""A tokenizer from a file, a folder, or the name of one on the hub."""

from pathlib import Path

from tokenizers import models

from polyad.data.errors import DataError, nearest, user_path
from polyad.data.json_reader import read_bounded
from polyad.data.text.manifest import TOKENIZER_FILES
from polyad.data.text.tokenizers.hub import (
    BYTE_LEVEL_FILES,
    fetch_tokenizer,
    is_hub_name,
    named_end_of_text,
    snapshot_of,
)
from polyad.data.text.tokenizers.sentencepiece_model import SentencePieceTokenizer
from polyad.data.text.tokenizers.tokenizer import (
    KNOWN_END_OF_TEXT,
    TRAINED,
    EndOfTextError,
    Tokenizer,
    byte_level,
)
from polyad.data.text.tokenizers.wordpiece import VOCABULARY_FILE, read_vocabulary
from polyad.data.text.tokenizers.words import WordTokenizer, is_word_vocabulary


def load_tokenizer(path: str | Path, end_of_text: str | None = None) -> Tokenizer:
    """Loads a tokenizer that is stored in a file.

    Args:
        path: A `tokenizer.json`, a SentencePiece `.model`, BERT's `vocab.txt`, or a folder that
            holds one of them or GPT-2's `vocab.json` and `merges.txt`; or NAME or OWNER/NAME of the
            Hugging Face hub, where there is no such path.
        end_of_text: The token that ends each document; None takes a well-known one, else the
            one that `tokenizer_config.json` in the folder names.

    Returns:
        The tokenizer.

    Raises:
        DataError: There is no tokenizer, or it has no such token.
    """
    spec, path = str(path), user_path(path)
    if not path.exists() and is_hub_name(spec):
        path = fetch_tokenizer(spec)
    if path.is_dir():
        return _load_folder(snapshot_of(path), end_of_text)
    return _load_file(path, end_of_text)


def _load_folder(folder: Path, end_of_text: str | None) -> Tokenizer:
    known = [folder / name for name in TOKENIZER_FILES]
    file = next((candidate for candidate in known if candidate.exists()), None)

    if file is None and (folder / VOCABULARY_FILE).is_file():
        file = folder / VOCABULARY_FILE

    def loaded(end: str | None) -> Tokenizer:
        return _load_file(file, end) if file else _load_byte_level(folder, end)

    try:
        return loaded(end_of_text)
    except EndOfTextError:
        named = named_end_of_text(folder)
        if named is None:
            raise
        return loaded(named)


def _load_file(path: Path, end_of_text: str | None) -> Tokenizer:
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            f"{path}: no such tokenizer; it is {', '.join(TRAINED)}, a tokenizer.json file, a "
            f"SentencePiece .model, BERT's vocab.txt, the folder of one, or a name of the Hugging "
            f"Face hub"
            f"{nearest(path.name, siblings)}"
        )
    try:
        return _from_file(path, end_of_text)
    except DataError as error:
        raise _kind(error)(f"{path}: {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise DataError(f"{path}: not a tokenizer.json: {error}") from None


def _load_byte_level(folder: Path, end_of_text: str | None) -> Tokenizer:
    vocabulary, merges = (folder / name for name in BYTE_LEVEL_FILES)
    if not (vocabulary.exists() and merges.exists()):
        raise DataError(
            f"{folder}: this folder has neither tokenizer.json nor vocab.txt nor vocab.json and "
            f"merges.txt"
        )
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
    except MemoryError:
        raise
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise DataError(f"{folder}: not GPT-2's vocab.json and merges.txt: {error}") from None
    backend = byte_level(model)
    known = [token for token in KNOWN_END_OF_TEXT if model.token_to_id(token) is not None]
    backend.add_special_tokens(known)
    try:
        return Tokenizer(backend.to_str(), end_of_text)
    except DataError as error:
        raise _kind(error)(f"{folder}: {error}") from None


def _kind(error: DataError) -> type[DataError]:
    return EndOfTextError if isinstance(error, EndOfTextError) else DataError


def _from_file(file: Path, end_of_text: str | None) -> Tokenizer:
    """Finds the class that reads a file."""
    if file.name == VOCABULARY_FILE:
        return read_vocabulary(file, end_of_text)
    if file.suffix == ".model":
        return SentencePieceTokenizer(read_bounded(file), end_of_text)
    content = read_bounded(file).decode("utf-8-sig")
    kind = WordTokenizer if is_word_vocabulary(content) else Tokenizer
    return kind(content, end_of_text)
