"""Tokens of sequences that wait for pages, so that they cross the wire once."""

from __future__ import annotations

from collections import OrderedDict

from session.words import TOKEN_BYTES, SequenceId


class KeptPrompts:
    """Packed tokens by sequence id, at most `max_bytes` together; the one that was named longest ago goes first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._tokens: OrderedDict[SequenceId, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tokens)

    def keep(self, sequence_id: SequenceId, tokens: bytes) -> None:
        """Replaces what was kept for the sequence; more than the bound is not kept at all."""
        self.drop(sequence_id)
        if len(tokens) > self.max_bytes:
            return
        self._tokens[sequence_id] = tokens
        self.num_bytes += len(tokens)
        while self.num_bytes > self.max_bytes:
            self.drop(next(iter(self._tokens)))

    def head(self, sequence_id: SequenceId, num_tokens: int) -> bytes | None:
        """Returns the first tokens of what was kept; None where there are fewer."""
        tokens = self._tokens.get(sequence_id, b"")
        num_bytes = num_tokens * TOKEN_BYTES
        return tokens[:num_bytes] if num_bytes <= len(tokens) else None

    def drop(self, sequence_id: SequenceId) -> bool:
        """Drops what is kept for the sequence. Returns whether there was anything."""
        tokens = self._tokens.pop(sequence_id, None)
        if tokens is None:
            return False
        self.num_bytes -= len(tokens)
        return True

    def check(self) -> None:
        """For audits: raises AssertionError."""
        num_bytes = sum(map(len, self._tokens.values()))
        assert self.num_bytes == num_bytes, f"{self.num_bytes} bytes of kept prompts counted, {num_bytes} there"
        assert num_bytes <= self.max_bytes, f"{num_bytes} bytes of kept prompts; at most {self.max_bytes}"
