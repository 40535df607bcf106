"""What `make test` tries, and what only `make nightly` does: more examples of a property, more cases.

A case goes to the thorough run if another one goes the same way with other sizes. What guards a fault
that was found once stays in every run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

THOROUGH = os.environ.get("STEMCACHE_HYPOTHESIS") == "thorough"
# Why a case is skipped in a normal run.
LEFT_TO_THOROUGH = "tried in the thorough run"


def examples(count: int) -> int:
    """Returns `count`, or more in a thorough run."""
    return 10 * count if THOROUGH else count


def thorough(*values: object) -> Any:
    """Returns the values of one case of `pytest.mark.parametrize`, which only the thorough run tries."""
    return pytest.param(*values, marks=pytest.mark.skipif(not THOROUGH, reason=LEFT_TO_THOROUGH))


def usual(names: Iterable[Any], *always: Any) -> list[Any]:
    """Returns all names as cases; those beside `always` are tried in the thorough run only."""
    names = list(names)
    unknown = set(always) - set(names)
    assert not unknown, f"no such cases: {sorted(unknown)}"
    return [name if name in always else thorough(name) for name in names]
