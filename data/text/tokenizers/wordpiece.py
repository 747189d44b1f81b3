"""WordPiece, BERT's vocabulary: words, and pieces of words after the first that begin with ##.

Source: Devlin et al. 2019 and the released code, whose `vocab.txt` has a token a line.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from polyad.data.errors import DataError
from polyad.data.json_reader import read_json
from polyad.data.text.tokenizers.tokenizer import Tokenizer

VOCABULARY_FILE = "vocab.txt"
ABOUT_FILE = "tokenizer_config.json"
UNKNOWN = "[UNK]"
SPECIAL = ("[PAD]", UNKNOWN, "[CLS]", "[SEP]", "[MASK]")
"""In the order of a vocabulary that is trained here."""
PREFIX = "##"
LARGEST_ALPHABET = 1000
"""Characters of a vocabulary that is trained here: the most frequent ones; words with others are
unknown."""


def wordpiece(
    vocabulary: dict[str, int],
    lowercase: bool,
    *,
    strip_accents: bool | None = None,
    split_chinese: bool = True,
) -> tokenizers.Tokenizer:
    """Gives a tokenizer that cuts text as BERT does.

    Args:
        vocabulary: Tokens and their ids.
        lowercase: Whether text loses its case first.
        strip_accents: Whether it loses its accents; None: with its case.
        split_chinese: Whether each Chinese character is a word.
    """
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=split_chinese
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=PREFIX)
    known = [AddedToken(token, special=True) for token in SPECIAL if token in vocabulary]
    backend.add_special_tokens(known)
    if {
        "[CLS]",
        "[SEP]",
    } <= vocabulary.keys():  # for other readers of the file: here it is not used
        marks = [(token, vocabulary[token]) for token in ("[SEP]", "[CLS]")]
        backend.post_processor = processors.BertProcessing(*marks)
    return backend


def read_vocabulary(file: Path, end_of_text: str | None = None) -> Tokenizer:
    """Reads a `vocab.txt`.

    Args:
        file: With a token a line; a `tokenizer_config.json` beside it says whether text loses its
            case, and without one it does if no token has an upper-case letter.
        end_of_text: The token that ends each document; None takes a well-known one, [SEP].

    Raises:
        DataError: It is no such vocabulary.
    """
    try:
        # Not splitlines: Chinese vocabularies have a token that is one of the other line ends.
        tokens = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}") from None
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if UNKNOWN not in vocabulary:
        raise DataError(f"not the vocab.txt of a BERT: it has no token {UNKNOWN}")
    if len(vocabulary) < len(tokens):
        twice, _ = Counter(tokens).most_common(1)[0]
        raise DataError(f"not the vocab.txt of a BERT: {twice!r} is there twice")
    about = _about(file.parent / ABOUT_FILE)
    lowercase = about.get("do_lower_case")
    if lowercase is None:
        ordinary = (token for token in vocabulary if token not in SPECIAL)
        lowercase = not any(token != token.lower() for token in ordinary)
    backend = wordpiece(
        vocabulary,
        lowercase,
        strip_accents=about.get("strip_accents"),
        split_chinese=about.get("tokenize_chinese_chars", True),
    )
    return Tokenizer(backend.to_str(), end_of_text)


def _about(file: Path) -> dict[str, bool]:
    """The switches of a `tokenizer_config.json`; none where there is no such file."""
    if not file.is_file():
        return {}
    try:
        tree = dict(read_json(file))
    except TypeError:
        raise DataError(f"{file}: is no JSON object") from None
    return {key: value for key, value in tree.items() if isinstance(value, bool)}


def train_wordpiece(
    texts: Callable[[], Iterator[str]], vocab_size: int, end_of_text: str | None = None
) -> Tokenizer:
    """Trains an uncased vocabulary; the same texts give the same one.

    Args:
        texts: Gives the texts; they are read twice, for the characters and for the pieces.
        vocab_size: Entries wanted: 5 special tokens, two of each character, and merges.
        end_of_text: The token that ends each document; None: [SEP].

    Returns:
        The tokenizer. Texts with few different words give a smaller vocabulary.

    Raises:
        DataError: There is no text, or `end_of_text` is not a token of it.
    """
    empty = wordpiece({UNKNOWN: 0}, lowercase=True)
    counts: Counter[str] = Counter()
    for text in texts():
        counts.update(empty.normalizer.normalize_str(text))
    letters = [letter for letter in counts if not letter.isspace()]
    if not letters:
        raise DataError("wordpiece: the text of the train split has no word")
    most = max(1, min(LARGEST_ALPHABET, (vocab_size - len(SPECIAL)) // 2))
    alphabet = sorted(sorted(letters, key=lambda c: (-counts[c], c))[:most])
    # The library numbers pieces by the order of a hash table, which differs from run to run, unless
    # it knows all of them before; equally frequent pairs are merged in the order of their numbers.
    known = [*SPECIAL, *alphabet, *(PREFIX + letter for letter in alphabet)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=known,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=PREFIX,
        show_progress=False,
    )
    trained = tokenizers.Tokenizer(models.WordPiece({UNKNOWN: 0}, unk_token=UNKNOWN))
    trained.normalizer, trained.pre_tokenizer = empty.normalizer, empty.pre_tokenizer
    trained.train_from_iterator(texts(), trainer=trainer)
    vocabulary = trained.get_vocab(with_added_tokens=True)
    return Tokenizer(wordpiece(vocabulary, lowercase=True).to_str(), end_of_text)
