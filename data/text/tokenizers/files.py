"""Loads a tokenizer from a file, a folder, or the Hugging Face hub."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import BertWordPieceTokenizer, models

from polyad.data.errors import DataError, nearest, one_line, user_path
from polyad.data.json_reader import read_bytes, read_json
from polyad.data.text.manifest import (
    SENTENCEPIECE_FILE,
    TOKENIZER_FILES,
    TokenizerFile,
)
from polyad.data.text.tokenizers.tokenizer import (
    KNOWN_END_OF_TEXT,
    TRAINED,
    Tokenizer,
    byte_level,
    choose_end_of_text,
    fingerprint,
)


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer from a `.model` file of any type: unigram, BPE, words or characters.

    Args:
        model: The content of the file.
        end_of_text: The piece that ends each document; None for a well-known one, mostly `</s>`.

    Raises:
        DataError: It is not such a model, or lacks the piece.
    """

    file: TokenizerFile = SENTENCEPIECE_FILE

    def __init__(self, model: bytes, end_of_text: str | None = None) -> None:
        import sentencepiece

        if not model:  # the library would print its own error
            raise DataError("not a SentencePiece model")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            size = self._processor.get_piece_size()
        except RuntimeError:
            size = 0
        if size == 0:
            raise DataError("not a SentencePiece model")
        self._model = model
        vocabulary = self.vocabulary()
        self.end_of_text = choose_end_of_text(vocabulary, end_of_text)
        self.end_of_text_id = vocabulary[self.end_of_text]
        self.begin_of_text = self.begin_of_text_id = None
        self.vocab_size = size
        self.fingerprint = fingerprint(model, self.end_of_text)
        self._threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else -1

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts in parallel, without control pieces at their ends.

        Args:
            texts: Any texts.

        Returns:
            The ids of each text, never that of the end-of-text piece.

        Raises:
            DataError: A text cannot be distinguished from the end of a document in this vocabulary.
        """
        batch: list[list[int]] = self._processor.encode(
            list(texts), out_type=int, add_bos=False, add_eos=False, num_threads=self._threads
        )
        for ids in batch:
            # Control pieces are never found in a text; pieces of another type may be.
            if self.end_of_text_id in ids:
                raise DataError(
                    f"a text contains what this model reads as its end-of-text piece "
                    f"{self.end_of_text!r}; choose another one with --end-of-text TOKEN"
                )
        return batch

    def vocabulary(self) -> dict[str, int]:
        """Returns every piece and its id."""
        pieces = self._processor.id_to_piece(list(range(self._processor.get_piece_size())))
        return {piece: number for number, piece in enumerate(pieces)}

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids, the end-of-text piece included.

        Args:
            ids: Token ids.

        Returns:
            Their text, as the model normalized it.
        """
        documents: list[list[int]] = [[]]
        for token in ids:
            if token == self.end_of_text_id:
                documents.append([])
            else:
                documents[-1].append(int(token))
        return self.end_of_text.join(self._processor.decode(part) for part in documents)

    def _is_special(self, token: int) -> bool:
        return bool(self._processor.is_control(token) or self._processor.is_unknown(token))

    def file_bytes(self) -> bytes:
        """Returns the model, byte for byte."""
        return self._model

    def with_begin_of_text(self, token: str | None) -> "SentencePieceTokenizer":
        """Returns this tokenizer: its file cannot store a token that begins each document."""
        return self


BYTE_LEVEL_FILES = ("vocab.json", "merges.txt")
"""The two files of GPT-2."""
VOCABULARY_FILE, ABOUT_FILE = "vocab.txt", "tokenizer_config.json"
FILES = (*TOKENIZER_FILES, VOCABULARY_FILE, *BYTE_LEVEL_FILES, ABOUT_FILE)
"""The files of a tokenizer."""
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""The special tokens of BERT."""
_NAME = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_FILE_ENDINGS = (".json", ".model", ".txt", ".bin")


def is_hub_name(spec: str) -> bool:
    """Returns whether a string that is not an existing path may name a tokenizer on the hub.

    Returns:
        True if it has the form of a name, and does not look like a misspelled path to a file or
        into an existing folder.
    """
    if not _NAME.fullmatch(spec) or spec.endswith(_FILE_ENDINGS):
        return False
    return "/" not in spec or not Path(spec).parent.is_dir()


def fetch_tokenizer(name: str) -> Path:
    """Finds a tokenizer in the hub's cache, or downloads it there.

    Returns:
        The folder of its files.

    Raises:
        DataError: There is no such tokenizer, or the hub is unreachable.
    """
    from huggingface_hub import snapshot_download

    reason = "it has no tokenizer"
    for local in (True, False):
        try:
            folder = snapshot_download(name, allow_patterns=list(FILES), local_files_only=local)
        except Exception as error:  # of any network library that the hub's client uses
            reason = one_line(error, 200)
        else:
            if any((Path(folder) / file).is_file() for file in FILES):
                return Path(folder)
    raise DataError(
        f"{name}: no such tokenizer here, in the Hugging Face cache or on the hub: {reason}; on a "
        f"machine with network access run `hf download {name} --include '*token*' --local-dir "
        "DIR`, copy DIR here, and give DIR as the tokenizer"
    )


def snapshot_of(folder: Path) -> Path:
    """Finds the snapshot of `main` in a folder of the hub's cache; any other folder is returned
    unchanged."""
    main = folder / "refs" / "main"
    if not main.is_file():
        return folder
    return folder / "snapshots" / main.read_text().strip()


def read_vocabulary(file: Path, end_of_text: str | None = None) -> Tokenizer:
    """Reads BERT's `vocab.txt`, with one token per line.

    WordPiece has words, and pieces that continue a word and begin with ## (Devlin et al. 2019 and
    the released code).

    Args:
        file: The file; a `tokenizer_config.json` beside it says whether text is lower-cased.
            Without one it is, if no token has an upper-case letter.
        end_of_text: The token that ends each document; None for a well-known one, [SEP].

    Raises:
        DataError: It is not such a vocabulary.
    """
    # Not splitlines: Chinese vocabularies contain a token that is another line separator.
    tokens = read_bytes(file).decode().removesuffix("\n").split("\n")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice, _ = Counter(tokens).most_common(1)[0]
        raise DataError(f"not the vocab.txt of a BERT: {twice!r} appears twice")
    about = read_about(file.parent)
    lowercase = about.get("do_lower_case")
    if lowercase is None:
        ordinary = (token for token in vocabulary if token not in SPECIAL)
        lowercase = not any(token != token.lower() for token in ordinary)
    try:
        backend = BertWordPieceTokenizer(
            vocabulary,
            lowercase=lowercase,
            strip_accents=about.get("strip_accents"),
            handle_chinese_chars=about.get("tokenize_chinese_chars", True),
        )
    except TypeError as error:
        raise DataError(f"not the vocab.txt of a BERT: {error}") from None
    return Tokenizer(backend.to_str(), end_of_text)


def read_about(folder: Path) -> dict[str, Any]:
    """Reads `tokenizer_config.json`.

    Returns:
        Its keys; empty if there is no such file.

    Raises:
        DataError: The file cannot be read.
    """
    file = folder / ABOUT_FILE
    if not file.is_file():
        return {}
    tree = read_json(file)
    if not isinstance(tree, dict):
        raise DataError(f"{file}: is not a JSON object")
    return tree


def _token(about: dict[str, Any], key: str, place: Path) -> str | None:
    """Returns a token named there, given as text or as an object."""
    token = about.get(key)
    content = token.get("content") if isinstance(token, dict) else token
    if content is not None and not isinstance(content, str):
        raise DataError(f"{place}: {key}: {token!r:.60} is not allowed; a token, or null")
    return content


def load_tokenizer(path: str | Path, end_of_text: str | None = None) -> Tokenizer:
    """Loads a tokenizer that is stored in a file.

    Args:
        path: A `tokenizer.json`, a SentencePiece `.model`, BERT's `vocab.txt`, or a folder that
            holds one of them or GPT-2's `vocab.json` and `merges.txt`; or NAME or OWNER/NAME of the
            Hugging Face hub, where there is no such path.
        end_of_text: The token that ends each document; None takes the one that
            `tokenizer_config.json` in the folder names, else a well-known one.

    Returns:
        The tokenizer. A token begins each document where `add_bos_token` of that file says so; a
        file without this key leaves it to the post-processor of `tokenizer.json`.

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
    place, about = folder / ABOUT_FILE, read_about(folder)
    begin, end = (_token(about, key, place) for key in ("bos_token", "eos_token"))
    names = (*TOKENIZER_FILES, VOCABULARY_FILE)
    file = next((folder / name for name in names if (folder / name).is_file()), folder)
    tokenizer = _load_file(file, end_of_text or end)
    if (adds := about.get("add_bos_token")) is None:
        return tokenizer
    try:
        return tokenizer.with_begin_of_text(begin if adds else None)
    except DataError as error:
        raise DataError(f"{place}: {error}") from None


def _load_file(path: Path, end_of_text: str | None) -> Tokenizer:
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            f"{path}: no such tokenizer; give {', '.join(TRAINED)}, a tokenizer.json file, a "
            "SentencePiece .model, BERT's vocab.txt, a folder with one, or a name on the Hugging "
            f"Face hub{nearest(path.name, siblings)}"
        )
    try:
        if path.is_dir():
            return _byte_level_of(path, end_of_text)
        if path.name == VOCABULARY_FILE:
            return read_vocabulary(path, end_of_text)
        if path.suffix == ".model":
            return SentencePieceTokenizer(read_bytes(path), end_of_text)
        return Tokenizer(read_bytes(path).decode("utf-8-sig"), end_of_text)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise DataError(f"{path}: not a tokenizer: {one_line(error)}") from None


def _byte_level_of(folder: Path, end_of_text: str | None) -> Tokenizer:
    """Reads the files of GPT-2."""
    vocabulary, merges = (folder / name for name in BYTE_LEVEL_FILES)
    if not (vocabulary.exists() and merges.exists()):
        raise DataError(
            "this folder has neither tokenizer.json nor vocab.txt nor vocab.json and merges.txt"
        )
    model = models.BPE.from_file(str(vocabulary), str(merges))
    backend = byte_level(model)
    ends = [token for token in KNOWN_END_OF_TEXT if model.token_to_id(token) is not None]
    backend.add_special_tokens(ends)
    return Tokenizer(backend.to_str(), end_of_text)
