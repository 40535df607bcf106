"""The protocol's version, its optional parts, and the names of keys in the host tier's store.

Limits are in limits.py, messages in messages.py.
"""

from __future__ import annotations

PROTOCOL_VERSION = 2
# The worker keeps an inventory of its pages: it is told of Clear calls, and offers the inventory to a service that has
# lost its state.
INVENTORY = "inventory"
# The service takes back pages that a running sequence holds ahead.
SHRINK = "shrink"
# Optional parts that are spoken beyond the version's own; a Hello that names another is refused. So a worker names only
# those by which it is to be treated otherwise.
CAPABILITIES: tuple[str, ...] = (INVENTORY, SHRINK)
WORKER_CAPABILITIES: tuple[str, ...] = (INVENTORY,)

# All keys in the store start with it; its number changes when keys or values change their form.
HOST_KEY_PREFIX = b"stemcache:1:"
# Holds the store's identity, so that a flush, or another store, is noticed.
SENTINEL_KEY = HOST_KEY_PREFIX + b"sentinel"
# The store's identity has 1 to this many bytes; another value of the key was not written by a worker.
MAX_SENTINEL_BYTES = 64
