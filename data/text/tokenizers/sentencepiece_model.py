"""SentencePiece models, read by the library that made them."""

import os
from collections.abc import Sequence

from polyad.data.errors import DataError
from polyad.data.fingerprint import bytes_fingerprint
from polyad.data.text.manifest import SENTENCEPIECE_FILE, TokenizerFile
from polyad.data.text.tokenizers.limits import check_charsmap
from polyad.data.text.tokenizers.tokenizer import Tokenizer, choose_end_of_text


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer from a `.model` file: unigram, BPE, words or characters, whatever it says.

    Args:
        model: The content of the file.
        end_of_text: The piece that ends each document; None takes a well-known one, `</s>` mostly.

    Raises:
        DataError: It is no such model, or has no such piece.
    """

    file_name: TokenizerFile = SENTENCEPIECE_FILE

    def __init__(self, model: bytes, end_of_text: str | None = None) -> None:
        import sentencepiece

        if not model:  # the library would print an error of its own
            raise DataError("not a SentencePiece model")
        _check_normalizers(model)
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            size = self._processor.get_piece_size()
        except RuntimeError:
            size = 0
        if size == 0:
            raise DataError("not a SentencePiece model")
        self._model = model
        self.growth = 1
        vocabulary = self.vocabulary()
        self.end_of_text = choose_end_of_text(vocabulary, end_of_text)
        self.end_of_text_id = vocabulary[self.end_of_text]
        self.vocab_size = size
        self.fingerprint = bytes_fingerprint(model, self.end_of_text)
        self._threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else -1

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts, in parallel; see `Tokenizer.encode_batch`.

        Args:
            texts: Any texts.

        Returns:
            The ids of each, never the end-of-text piece's.

        Raises:
            DataError: A text cannot be told from the end of a document in this vocabulary.
        """
        batch: list[list[int]] = self._processor.encode(
            list(texts), out_type=int, add_bos=False, add_eos=False, num_threads=self._threads
        )
        for ids in batch:
            # A control piece is never found in a text; a piece of another kind may be.
            if self.end_of_text_id in ids:
                raise DataError(
                    f"a text contains what this model reads as its end-of-text piece "
                    f"{self.end_of_text!r}; choose another one with --end-of-text TOKEN"
                )
        return batch

    def vocabulary(self) -> dict[str, int]:
        """Every piece and its id."""
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
        """Gives the model, byte for byte."""
        return self._model

    def chance(self) -> None:
        """Returns None: the library samples pieces only if it is asked to."""
        return None


def _check_normalizers(model: bytes) -> None:
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    try:
        content = sentencepiece_model_pb2.ModelProto.FromString(model)
    except DecodeError:
        raise DataError("not a SentencePiece model") from None
    for part in (content.normalizer_spec, content.denormalizer_spec):
        check_charsmap(part.precompiled_charsmap)
