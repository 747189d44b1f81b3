"""Small BERTs: ours, and transformers' with random weights."""

import re
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from polyad.data.text.prepare import prepare
from polyad.model.bert import Bert, BertConfig
from tests.helpers.prepared import open_source
from tests.helpers.random_model import built
from tests.helpers.routing import scatter

SMALL = {
    "num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": 16, "vocab_size": 61,
}  # fmt: skip
THEIRS = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 16, "type_vocab_size": 3,
}  # fmt: skip
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""The special tokens of its vocabularies."""
LENGTHS = (16, 11, 1)
"""Number of tokens in each row of `padded_input`."""


def word_pieces(folder: Path, texts: Iterable[str], size: int = 300) -> str:
    """Writes a vocab.txt: special tokens, characters, and the most frequent words."""
    text = " ".join(texts).lower()
    letters = [letter for letter, _ in Counter("".join(text.split())).most_common(90)]
    words = [word for word, _ in Counter(re.findall(r"[^\W_]{2,}", text)).most_common(size)]
    tokens = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *words]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(tokens[:size]) + "\n", encoding="utf-8")
    return str(folder)


def prepare_pieces(source: Path, folder: Path) -> None:
    """Prepares text with such a vocabulary of its own."""
    texts = (document.text for document in open_source(str(source)).documents())
    with tempfile.TemporaryDirectory() as vocabulary:
        prepare(str(source), word_pieces(Path(vocabulary), texts), folder)


def small_bert(dtype: torch.dtype = torch.float32, **keys: Any) -> Bert:
    """A small BERT in evaluation mode."""
    model: Bert = built(BertConfig.model_validate(SMALL | keys), dtype=dtype)
    return model.eval()


def padded_input(segments: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, mask and segments, each [3, 16]; two rows have padding."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(61, (3, 16), generator=generator)
    mask = torch.arange(16) < torch.tensor(LENGTHS).unsqueeze(1)
    return ids, mask, torch.randint(segments, (3, 16), generator=generator)


def their_bert(kind: str, **keys: Any) -> Any:
    """transformers' `kind`, for example `BertForMaskedLM`, with random weights and no dropout."""
    import transformers

    torch.manual_seed(5)
    given = THEIRS | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} | keys
    model = getattr(transformers, kind)(transformers.BertConfig(**given)).eval()
    return scatter(model, 0.2)
