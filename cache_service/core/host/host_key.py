"""The name of one value in the host tier, and back. Readable ASCII; knows nothing of who stores it."""

from __future__ import annotations

from typing import NamedTuple

from session.words import HASH_BYTES, PageHash


class HostKey(NamedTuple):
    fingerprint: bytes
    group: int
    rank: int
    page_hash: PageHash


def key_prefix(prefix: bytes, fingerprint: bytes, group: int) -> str:
    """What the keys of one group start with: the rank in decimal, ":" and the page hash in hex follow."""
    return f"{prefix.decode()}{fingerprint.hex()}:{group}:"


def build_key(prefix: bytes, key: HostKey) -> bytes:
    """prefix, fingerprint hex, group, rank, page hash hex; joined by colons."""
    middle = f"{key.fingerprint.hex()}:{key.group}:{key.rank}:{key.page_hash.hex()}"
    return prefix + middle.encode()


def scan_prefix(prefix: bytes, fingerprint: bytes) -> bytes:
    """What every key of one fingerprint starts with."""
    return prefix + fingerprint.hex().encode() + b":"


def parse_key(prefix: bytes, raw: bytes) -> HostKey | None:
    """The inverse of build_key; None for a key that it did not build."""
    if not raw.startswith(prefix):
        return None
    parts = raw[len(prefix) :].split(b":")
    if len(parts) != 4:
        return None
    try:
        fingerprint, page_hash = bytes.fromhex(parts[0].decode()), bytes.fromhex(parts[3].decode())
        parsed = HostKey(fingerprint, int(parts[1]), int(parts[2]), PageHash(page_hash))
    except ValueError:
        return None
    # Only the canonical spelling counts: no signs, spaces, underscores or capitals.
    return parsed if len(page_hash) == HASH_BYTES and build_key(prefix, parsed) == raw else None
