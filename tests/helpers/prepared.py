"""Text to prepare, and prepared folders that are changed or damaged."""

import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from polyad.data.text.dataset import PreparedData
from polyad.data.text.manifest import MANIFEST_FILE, ReadOptions
from polyad.data.text.sources import Source, open_splits

Tree = dict[str, Any]


def open_source(spec: str, options: ReadOptions | None = None, split: str = "train") -> Source:
    """Opens one split of a source."""
    return open_splits(spec, options or ReadOptions())[split]


def jsonl(path: Path, texts: Iterable[str]) -> str:
    """Writes a file with a document a line."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def sentencepiece_model(text: str, **options: Any) -> bytes:
    """A file of SentencePiece that is trained on the lines of a text."""
    import sentencepiece

    model, lines = io.BytesIO(), iter(text.splitlines())
    settings = {"vocab_size": 600, "byte_fallback": True, "minloglevel": 2} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, **settings
    )
    return model.getvalue()


def rewrite(folder: Path, change: Callable[[Tree], Tree]) -> None:
    """Changes a manifest."""
    path = folder / MANIFEST_FILE
    path.write_text(json.dumps(change(json.loads(path.read_text())), indent=2) + "\n")


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Flips a bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def windows_of(data: Path, length: int = 32) -> list[tuple[list[int], list[int]]]:
    """Of each window of the validation split the tokens that it reads, the first after the end of
    a text, and those that it predicts."""
    prepared = PreparedData.open(data)
    stream = prepared.split("validation")
    ids = [prepared.tokenizer().end_of_text_id, *stream.read(0, stream.num_tokens).tolist()]
    after = [ids[at + 1 : at + 1 + length] for at in range(0, len(ids) - 1, length)]
    return [(ids[number * length :][: len(each)], each) for number, each in enumerate(after)]
