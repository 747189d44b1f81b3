"""A vocabulary of the characters of the text."""

from collections.abc import Iterator

import tokenizers
from tokenizers import AddedToken, decoders, models

from polyad.data.errors import DataError
from polyad.data.text.tokenizers.tokenizer import Tokenizer

UNKNOWN = "<unk>"


def train_characters(texts: Iterator[str], end_of_text: str) -> Tokenizer:
    """Collects the characters of texts: each code point is a token.

    Args:
        texts: The texts, read once.
        end_of_text: The token that ends each document.

    Returns:
        The vocabulary: `<unk>` for characters that these texts do not have, the end-of-text token,
        and the characters in the order of their code points.

    Raises:
        DataError: There is no character, or one was asked to end documents.
    """
    if len(end_of_text) < 2 or end_of_text == UNKNOWN:
        raise DataError(
            f"{end_of_text!r} cannot end a document of characters; choose a token of several "
            f"characters other than {UNKNOWN} with --end-of-text TOKEN"
        )
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    if not characters:
        raise DataError("characters: the text of the train split has none")
    special = (UNKNOWN, end_of_text)
    vocabulary = {token: number for number, token in enumerate([*special, *sorted(characters)])}
    # BPE without merges takes a text apart into its characters, and leaves white space as it is.
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return Tokenizer(backend.to_str(), end_of_text)
