"""Which tokens are words or parts of words, and not only punctuation.

Shapes: B windows, T tokens of a window, V tokens of the vocabulary.
"""

import unicodedata

import torch
from torch import Tensor

from polyad.data.text.tokenizers.tokenizer import Tokenizer

_UNKNOWN = -1


def has_word(text: str) -> bool:
    """Whether there is a letter, a digit or a picture in a text; else it is punctuation, operators,
    white space or control characters alone.

    Half a character, as a byte-level vocabulary has some, counts as a letter.

    Args:
        text: of a token.
    """
    categories = map(unicodedata.category, text)
    # L, M and N are letters, their marks and numbers; So are pictures, and U+FFFD for half of one.
    return any(category[0] in "LMN" or category == "So" for category in categories)


class WordTokens:
    """Tells words from punctuation by the ids of tokens; each id is decoded once.

    Args:
        tokenizer: of the ids. Its end of text is no word.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_word_V = torch.full((tokenizer.vocab_size,), _UNKNOWN, dtype=torch.int8)

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """Looks at tokens.

        Args:
            ids_BT: on the CPU.

        Returns:
            Boolean, [B, T]: whether each is a word or a part of one.
        """
        for token in set(ids_BT[self._is_word_V[ids_BT] == _UNKNOWN].tolist()):
            ends = token == self._tokenizer.end_of_text_id
            self._is_word_V[token] = not ends and has_word(self._tokenizer.decode([token]))
        return self._is_word_V[ids_BT].bool()
