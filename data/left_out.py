"""What a source has and a preparation leaves out: counted by reason, told, or refused."""

from collections import Counter
from collections.abc import Mapping, Sequence

from polyad.data.errors import DataError

HIDDEN = frozenset({"__MACOSX", "Thumbs.db", "desktop.ini"})
"""What systems put beside files, with all names that begin with a point."""


class LeftOut:
    """What a source has and the prepared folder has not, by reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.doubts: list[str] = []
        """What is taken, and probably not meant so."""
        self._mistakes: dict[str, str] = {}

    def add(self, reason: str, name: str, *, mistake: bool = True) -> None:
        """Counts something that is left out.

        Args:
            reason: What it is, in the plural.
            name: Of this one.
            mistake: Whether leaving it out is probably not what is wanted.
        """
        reason = reason.encode("utf-8", "backslashreplace").decode()  # as it is written down
        self.counts[reason] += 1
        if mistake:
            self._mistakes.setdefault(reason, name)

    def mistakes(self) -> list[str]:
        """What is probably not wanted, each with its number and the first one's name."""
        return [f"{why}: {self.counts[why]:,} (as {name})" for why, name in self._mistakes.items()]

    def check(self, place: str, more: Sequence[str] = (), *, accept: bool) -> None:
        """Refuses what is probably a mistake.

        Args:
            place: The option and its value.
            more: What else is one.
            accept: Whether all of it is meant.

        Raises:
            DataError: There is such a thing, and it is not accepted.
        """
        mistakes = [f"would leave out {', '.join(self.mistakes())}"] if self._mistakes else []
        mistakes += [*self.doubts, *more]
        if mistakes and not accept:
            raise DataError(f"{place}: {'; '.join(mistakes)}; if that is meant, add --accept")


def in_words(counts: Mapping[str, int]) -> str:
    """What was left out, for a person."""
    return "; ".join(f"{reason}: {count:,}" for reason, count in counts.items())


def is_hidden(name: str) -> bool:
    """Whether one part of a path is a system's own, and no data."""
    return name.startswith(".") or name in HIDDEN
