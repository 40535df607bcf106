"""Ends a text at a stop string, and holds back what may turn out to be the start of one.

Takes text of whole characters: model/tokenizer.py makes it of tokens, and output_stream.py joins the two.
"""

from __future__ import annotations

from typing import NamedTuple


class Cut(NamedTuple):
    """Text that may be shown now, and whether a stop string ended it (which is not part of the text)."""

    text: str
    stopped: bool


class StopFilter:
    """Cuts a stream of text before the first stop string in it."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self._held = ""

    def push(self, text: str) -> Cut:
        if not self._stop:
            return Cut(text, False)
        self._held += text
        first = min((at for at in map(self._held.find, self._stop) if at >= 0), default=-1)
        if first >= 0:
            return Cut(self._take(first), True)
        return Cut(self._take(len(self._held) - self._held_len()), False)

    def flush(self) -> str:
        """Returns the text that was held back, since the text ends here."""
        return self._take(len(self._held))

    def _take(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _held_len(self) -> int:
        """Returns the length of the longest end of the text that some stop string starts with."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
