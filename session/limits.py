"""The bounds of single fields, decided once for the codec and the core. What can be set is in ManagerConfig."""

from __future__ import annotations

MAX_GROUPS = 32
MAX_PAGE_TOKENS = 65_536
# Tables of page ids are signed 32-bit numbers on the workers' devices.
MAX_PAGES = 2**31 - 1
MAX_RANKS = 1_024
MAX_SEQUENCE_ID = 2**64 - 1
# Characters of a salt and of any other name.
MAX_NAME_CHARS = 256
# Items in each repeated field of a Step.
MAX_STEP_ITEMS = 8_192
