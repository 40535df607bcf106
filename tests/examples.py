"""How many examples a property is tried with: as many as `make test` has time for, or ten times as many."""

from __future__ import annotations

import os

THOROUGH = os.environ.get("STEMCACHE_HYPOTHESIS") == "thorough"


def examples(count: int) -> int:
    """Returns `count`, or more in a thorough run."""
    return 10 * count if THOROUGH else count
