"""The limits of a session, each decided once: bounds of single fields, and the defaults of what Welcome tells.

What else can be set about the manager is in its ManagerConfig; what both ends of any connection hold, in
rpc/options.py.
"""

from __future__ import annotations

from typing import NamedTuple

# Each grant has a table for each group, and a model has as many groups as it has kinds of attention: 1 to 3 so far.
MAX_GROUPS = 32
# 16 to 128 are usual. A page's key in the radix tree is then at most 256 KiB.
MAX_PAGE_TOKENS = 65_536
# Block tables are int32 on the workers' devices.
MAX_PAGES = 2**31 - 1
MAX_RANKS = 1_024
MAX_SEQUENCE_ID = 2**64 - 1
# Characters of a salt and of any other name: they are kept for each root, lease and event.
MAX_NAME_CHARS = 256
# Boundaries in one `leave_at`: few requests that wait for a sequence part from it at places of their own.
MAX_SNAPSHOT_BOUNDARIES = 64
# A running sequence works in one slot, and what another one resumes from is in a second.
MIN_STATE_SLOTS = 2
# Items in each repeated field of a Step: an engine sends at most a few for each sequence that it runs.
MAX_STEP_ITEMS = 8_192
# Of one message, on every connection of ours: what Welcome tells, what gRPC takes, and what attached engines read.
MAX_MESSAGE_BYTES = 64 << 20


class SessionLimits(NamedTuple):
    """What the cache service takes from one worker, as Welcome tells it. The defaults are those of its settings."""

    # As int32 these are 4 MiB, of which a message holds 15.
    max_sequence_tokens: int = 1_048_576
    max_live_sequences: int = 4_096
    max_step_items: int = MAX_STEP_ITEMS
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_name_chars: int = MAX_NAME_CHARS
    # An adopted page takes 2 us of the manager, 5 us with watchers: 5 and 9 ms for a Step, with a collection up to 20.
    max_adopt_pages: int = 2_048
    # Eight prompts of the greatest length.
    max_kept_bytes: int = 32 << 20
    # A worker that restarts or connects anew is back before; its leases and pages wait for it.
    grace_ms: int = 60_000
