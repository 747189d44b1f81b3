"""Documents in, token files out: batches of text are encoded together, memory stays bounded."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from polyad.data.errors import DataError
from polyad.data.text.manifest import SPLITS, SplitInfo, SplitName
from polyad.data.text.split_writer import SplitState, SplitWriter
from polyad.data.text.tokenizers.pieces import PieceCutter
from polyad.data.text.tokenizers.tokenizer import Tokenizer, UnknownWordError

BATCH_CHARACTERS = 512 * 1024
"""Text encoded at once: by its amount, not by documents, whose lengths differ by thousands."""


class _Piece(NamedTuple):
    split: SplitName
    text: str
    is_last: bool
    name: str


class DatasetWriter:
    """Encodes documents of all splits together and writes each to its split.

    A batch is encoded by a thread of its own, which needs Python's lock only at its end, while the
    documents of the next one are read and the tokens of the last one are written.

    Args:
        folder: Where the files go.
        tokenizer: Encodes the text.
        states: Where to go on; None begins.
        held: Text of the document that had not ended there, which is not yet encoded.
        counted: Whether words and bytes of each document go to a file.

    Raises:
        DataError: The files do not hold what `states` says.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        states: dict[SplitName, SplitState] | None = None,
        held: str = "",
        *,
        counted: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._cutter = PieceCutter.of(tokenizer, held)
        self._pending: list[_Piece] = []
        self._pending_characters = 0
        self._running: tuple[list[_Piece], Future[list[list[int]]]] | None = None
        self._splits: dict[SplitName, SplitWriter] = {}
        try:
            for name in SPLITS:
                state = states[name] if states else None
                self._splits[name] = SplitWriter(folder / name, tokenizer, state, counted=counted)
        except BaseException:
            self._close_files()
            raise
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self.dtype = self._splits["train"].dtype

    @property
    def tokens(self) -> int:
        """Tokens written so far, in all splits."""
        return sum(writer.tokens for writer in self._splits.values())

    @property
    def held(self) -> str:
        """Text of a document that has not ended, which waits for what follows it."""
        return self._cutter.held

    @property
    def cut_documents(self) -> int:
        """Documents that were ended because no document can be longer."""
        return sum(writer.cut_documents for writer in self._splits.values())

    @property
    def forced_cuts(self) -> int:
        """Pieces that were cut where the tokens of the whole may be others."""
        return self._cutter.forced

    def add(self, split: SplitName, text: str, name: str, is_last: bool = True) -> None:
        """Appends a document, or the next part of one.

        Args:
            split: The split that it belongs to.
            text: Its text.
            name: Its name, for an error.
            is_last: Whether the document ends here.
        """
        for piece in self._cutter.add(text, is_last=is_last):
            self._add_piece(_Piece(split, piece, False, name))
        if is_last:
            self._add_piece(_Piece(split, self._cutter.take_rest(), True, name))

    def states(self) -> dict[SplitName, SplitState]:
        """Writes all documents that were added and waits until they are on the disk.

        Returns:
            Where another writer can go on.
        """
        self._encode_pending()
        self._write_encoded()
        return {name: writer.state() for name, writer in self._splits.items()}

    def finish(self) -> dict[SplitName, SplitInfo]:
        """Encodes what is pending and completes the files.

        Returns:
            What each split holds.
        """
        self._encode_pending()
        self._write_encoded()
        return {name: writer.finish() for name, writer in self._splits.items()}

    def close(self) -> None:
        """Closes the files of an unfinished data set."""
        self._thread.shutdown(cancel_futures=True)
        self._close_files()

    def _close_files(self) -> None:
        for writer in self._splits.values():
            writer.close()

    def _add_piece(self, piece: _Piece) -> None:
        self._pending.append(piece)
        self._pending_characters += len(piece.text)
        if self._pending_characters >= BATCH_CHARACTERS:
            self._encode_pending()

    def _encode_pending(self) -> None:
        """Starts to encode what is pending when the batch before is done, and writes that one."""
        pieces, self._pending, self._pending_characters = self._pending, [], 0
        before = self._running
        texts = [piece.text for piece in pieces]
        self._running = (pieces, self._thread.submit(self._tokenizer.encode_batch, texts))
        self._write(before)

    def _write_encoded(self) -> None:
        running, self._running = self._running, None
        self._write(running)

    def _write(self, encoded: tuple[list[_Piece], Future[list[list[int]]]] | None) -> None:
        if encoded is None:
            return
        pieces, future = encoded
        try:
            batch = future.result()
        except UnknownWordError as error:
            raise DataError(f"{pieces[error.row].name}: {error}") from None
        for piece, ids in zip(pieces, batch, strict=True):
            self._splits[piece.split].add(ids, piece.text, is_last=piece.is_last, name=piece.name)
