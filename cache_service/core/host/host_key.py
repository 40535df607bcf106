"""The name of one value in the host tier, and back. Readable ASCII."""

from __future__ import annotations

from typing import NamedTuple

from session.limits import MAX_GROUPS, MAX_RANKS
from session.protocol import HOST_KEY_PREFIX
from session.words import HASH_BYTES, PageHash


class HostKey(NamedTuple):
    fingerprint: bytes
    group: int
    rank: int
    page_hash: PageHash


def key_prefix(fingerprint: bytes, group: int) -> str:
    """What the keys of one group start with: the rank in decimal, ":" and the page hash in hex follow."""
    return f"{HOST_KEY_PREFIX.decode()}{fingerprint.hex()}:{group}:"


def build_key(key: HostKey) -> bytes:
    """HOST_KEY_PREFIX, fingerprint hex, group, rank, page hash hex; joined by colons."""
    middle = f"{key.fingerprint.hex()}:{key.group}:{key.rank}:{key.page_hash.hex()}"
    return HOST_KEY_PREFIX + middle.encode()


def scan_prefix(fingerprint: bytes) -> bytes:
    """What every key of one fingerprint starts with."""
    return HOST_KEY_PREFIX + fingerprint.hex().encode() + b":"


def parse_key(raw: bytes) -> HostKey | None:
    """The inverse of build_key; None for a key that it did not build for any group and rank of a session."""
    if not raw.startswith(HOST_KEY_PREFIX):
        return None
    parts = raw[len(HOST_KEY_PREFIX) :].split(b":")
    if len(parts) != 4:
        return None
    try:
        fingerprint, page_hash = bytes.fromhex(parts[0].decode()), bytes.fromhex(parts[3].decode())
        parsed = HostKey(fingerprint, int(parts[1]), int(parts[2]), PageHash(page_hash))
    except ValueError:
        return None
    if not (0 <= parsed.group < MAX_GROUPS and 0 <= parsed.rank < MAX_RANKS):
        return None
    # Only the canonical spelling counts: no signs, spaces, underscores or capitals.
    return parsed if len(page_hash) == HASH_BYTES and build_key(parsed) == raw else None
