"""Which words of the protocol this service speaks. Values only."""

from __future__ import annotations

PROTOCOL_VERSION = 2
# Optional parts that are spoken beyond the version's own; a Hello that names another is refused.
CAPABILITIES: frozenset[str] = frozenset()
