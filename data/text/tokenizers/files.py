"""Loads a tokenizer from a file, a folder, or the Hugging Face hub, or trains one on text."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, BertWordPieceTokenizer, models, pre_tokenizers, trainers

from polyad.data.errors import DataError, one_line, user_path
from polyad.data.files import read_bytes, read_json
from polyad.data.text.manifest import SENTENCEPIECE_FILE, TOKENIZER_FILES, TokenizerFile
from polyad.data.text.tokenizers.tokenizer import (
    END_OF_TEXT,
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

        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._model = model
        vocabulary = self.vocabulary()
        self.end_of_text = choose_end_of_text(vocabulary, end_of_text)
        self.end_of_text_id = vocabulary[self.end_of_text]
        self.begin_of_text = self.begin_of_text_id = None
        self.vocab_size = len(vocabulary)
        self.fingerprint = fingerprint(model, self.end_of_text)

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._processor.encode(list(texts), out_type=int)
        return ids

    def parsing(self) -> "SentencePieceTokenizer":
        """Refuses: the library reads no control pieces in a text."""
        raise DataError(
            "a SentencePiece .model reads no special tokens in a text; a tokenizer.json does"
        )

    def vocabulary(self) -> dict[str, int]:
        """Returns every piece and its id."""
        pieces = self._processor.id_to_piece(list(range(self._processor.get_piece_size())))
        return {piece: number for number, piece in enumerate(pieces)}

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids; control pieces, such as the end of a text, are left out.

        Args:
            ids: Token ids.

        Returns:
            Their text, as the model normalized it.
        """
        text: str = self._processor.decode([int(token) for token in ids])
        return text

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        model, numbers = self._processor, range(self.vocab_size)
        return frozenset(n for n in numbers if model.is_control(n) or model.is_unknown(n))

    def file_bytes(self) -> bytes:
        """Returns the model, byte for byte."""
        return self._model

    def with_begin_of_text(self, token: str | None) -> "SentencePieceTokenizer":
        """Returns this tokenizer: its file cannot store a token that begins each document."""
        return self


BYTE_LEVEL_FILES = ("vocab.json", "merges.txt")
"""The two files of GPT-2."""
VOCABULARY_FILE, ABOUT_FILE = "vocab.txt", "tokenizer_config.json"
FILES = (*TOKENIZER_FILES, VOCABULARY_FILE, *BYTE_LEVEL_FILES, ABOUT_FILE, "chat_template.jinja")
"""The files of a tokenizer."""


def fetch_tokenizer(name: str) -> Path:
    """Downloads the files of a tokenizer to the hub's cache, or finds them there.

    Returns:
        The folder of its files.

    Raises:
        DataError: There is no such tokenizer, or the hub is unreachable.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except Exception as error:  # of any network library that the hub's client uses
        raise DataError(
            f"{name}: no such tokenizer here, in the Hugging Face cache or on the hub: "
            f"{one_line(error, 200)}; give {', '.join(TRAINED)}, a file, a folder or a name"
        ) from None


def _found(name: str | Path) -> Path:
    """Returns the path of a tokenizer, or the folder of a downloaded one."""
    path = user_path(name)
    return path if path.exists() else fetch_tokenizer(str(path))


def read_vocabulary(file: Path, end_of_text: str | None = None) -> Tokenizer:
    """Reads BERT's `vocab.txt`, with one token per line.

    WordPiece has words, and pieces that continue a word and begin with ## (Devlin et al. 2019 and
    the released code).

    Args:
        file: The file; a `tokenizer_config.json` beside it says whether text is lower-cased.
            Without one it is.
        end_of_text: The token that ends each document; None for a well-known one, [SEP].

    Raises:
        DataError: It is not such a vocabulary.
    """
    about = read_about(file.parent)
    backend = BertWordPieceTokenizer.from_file(
        str(file),
        lowercase=about.get("do_lower_case", True),
        strip_accents=about.get("strip_accents"),
        handle_chinese_chars=about.get("tokenize_chinese_chars", True),
    )
    return Tokenizer(backend.to_str(), end_of_text)


def read_about(folder: Path) -> dict[str, Any]:
    """Reads `tokenizer_config.json`.

    Returns:
        Its keys; empty if there is no such file.

    Raises:
        DataError: The file cannot be read.
    """
    file = folder / ABOUT_FILE
    return dict(read_json(file)) if file.is_file() else {}


def chat_renderer(name: str) -> Callable[[Any], str]:
    """Returns what renders a conversation, a list of messages with `role` and `content`.

    Args:
        name: A tokenizer, as for `load_tokenizer`. Its chat template is read when it is needed.
    """

    @cache
    def tokenizer() -> Any:
        from transformers import PreTrainedTokenizerFast

        path = _found(name)
        folder = path if path.is_dir() else path.parent
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)

    def render(messages: Any) -> str:
        try:
            return str(tokenizer().apply_chat_template(messages, tokenize=False))
        except Exception as error:  # of any class: the library's own checks, and the template's
            raise DataError(
                f"the chat template of {name} does not render it: {one_line(error, 200)}"
            ) from None

    return render


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
    path = _found(path)
    try:
        return _load_folder(path, end_of_text) if path.is_dir() else _load_file(path, end_of_text)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise DataError(f"{path}: not a tokenizer: {one_line(error)}") from None


def _load_folder(folder: Path, end_of_text: str | None) -> Tokenizer:
    about = read_about(folder)
    begin, end = (
        token["content"] if isinstance(token := about.get(key), dict) else token
        for key in ("bos_token", "eos_token")
    )
    names = (*TOKENIZER_FILES, VOCABULARY_FILE, BYTE_LEVEL_FILES[0])
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise DataError(f"this folder has no tokenizer: {', '.join(names)}")
    tokenizer = _load_file(file, end_of_text or end)
    if (adds := about.get("add_bos_token")) is None:
        return tokenizer
    return tokenizer.with_begin_of_text(begin if adds else None)


def _load_file(path: Path, end_of_text: str | None) -> Tokenizer:
    if path.name == VOCABULARY_FILE:
        return read_vocabulary(path, end_of_text)
    if path.name == BYTE_LEVEL_FILES[0]:
        return _byte_level_of(path.parent, end_of_text)
    if path.suffix == ".model":
        return SentencePieceTokenizer(read_bytes(path), end_of_text)
    return Tokenizer(read_bytes(path).decode("utf-8-sig"), end_of_text)


def _byte_level_of(folder: Path, end_of_text: str | None) -> Tokenizer:
    """Reads the files of GPT-2."""
    model = models.BPE.from_file(*(str(folder / name) for name in BYTE_LEVEL_FILES))
    backend = byte_level(model)
    ends = [token for token in KNOWN_END_OF_TEXT if model.token_to_id(token) is not None]
    backend.add_special_tokens(ends)
    return Tokenizer(backend.to_str(), end_of_text)


UNKNOWN = "<unk>"
"""The entry for words that a vocabulary of words lacks."""
LARGEST_VOCABULARY = 10_000_000
"""Ten times the largest in use; the library aborts the process if memory runs out."""
_LONG_WORD = re.compile(r"(\S{256}(?=\S)|\s{256}(?=\s))")


def _without_long_words(texts: Iterator[str]) -> Iterator[str]:
    """Cuts runs of letters or white space longer than any real word: base64, blank pages.

    Training time is quadratic in the length of a word; merges are never that long.
    """
    for text in texts:
        if _LONG_WORD.search(text) is None:
            yield text
        else:
            yield from (piece for piece in _LONG_WORD.split(text) if piece)


def train_tokenizer(
    texts: Iterator[str], vocab_size: int, end_of_text: str = END_OF_TEXT
) -> Tokenizer:
    """Trains a byte-level BPE with GPT-2's pre-tokenizer; the same texts give the same tokenizer.

    Args:
        texts: The texts, read once.
        vocab_size: Entries, at least 257: those of all bytes and the end-of-text token.
        end_of_text: The token that ends each document.
    """
    backend = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_of_text],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_without_long_words(texts), trainer=trainer)
    return Tokenizer(backend.to_str(), end_of_text)


def train_words(texts: Iterator[str], vocab_size: int | None, end_of_text: str) -> Tokenizer:
    """Collects the words of texts; each distinct word is kept in memory.

    Args:
        texts: The texts, read once; none begins or ends inside a word.
        vocab_size: Maximum number of entries, including `<unk>` and the end-of-text token; None for
            no limit.
        end_of_text: The token that ends each document.

    Returns:
        The vocabulary: `<unk>`, the end-of-text token, and words by descending frequency, ties in
            the order of their code points.

    Raises:
        DataError: There are no words, or `<unk>` is the end-of-text token.
    """
    if end_of_text == UNKNOWN or not end_of_text:
        raise DataError(f"{end_of_text!r} cannot end a document of words; choose another token")
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
    special = (UNKNOWN, end_of_text)
    for token in special:
        counts.pop(token, None)
    if not counts:
        raise DataError(
            "words: the text of the train split has no words to build a vocabulary from"
        )
    words = sorted(counts, key=lambda word: (-counts[word], word))
    entries = [*special, *words][:vocab_size]
    vocabulary = {word: number for number, word in enumerate(entries)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return Tokenizer(backend.to_str(), end_of_text)


SIZES = {"train": 257, "words": 3}
"""The smallest size of a vocabulary of bytes and the end of text; of a word, `<unk>` and it."""


def trainer_of(spec: str) -> Callable[[Iterator[str], str], Tokenizer] | None:
    """Reads the specification of a tokenizer that is trained on the train split.

    Args:
        spec: `train:VOCAB_SIZE`, `words` or `words:VOCAB_SIZE`; or what `load_tokenizer` reads.

    Returns:
        Trains the tokenizer, from texts and the end-of-text token; None for a path or a name on the
        hub.

    Raises:
        DataError: The part after the colon is not a valid size.
    """
    name, colon, digits = spec.partition(":")
    if spec == "words":
        return lambda texts, end_of_text: train_words(texts, None, end_of_text)
    if name not in SIZES or (spec != "train" and not colon):
        return None
    size = int(digits) if digits.isdecimal() and len(digits) < 20 else -1
    if not SIZES[name] <= size <= LARGEST_VOCABULARY:
        raise DataError(
            f"tokenizer {spec!r:.60}: VOCAB_SIZE in {name}:VOCAB_SIZE is a whole number of at "
            f"least {SIZES[name]} and at most {LARGEST_VOCABULARY:,}"
        )
    train = train_words if name == "words" else train_tokenizer
    return lambda texts, end_of_text: train(texts, size, end_of_text)
