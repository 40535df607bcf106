"""Why no more of a prompt is reused on a worker: one reason for each request, the first of these that applies.

    BYPASSED                     the request reuses nothing: `admission.py`
    BREAKER_OPEN                 the host tier has more, and the worker's fetches are paused: `fetch_policy.py`
    FETCH_BUSY, FETCH_SLOWER     the host tier has more, which is computed all the same: `fetch_policy.py`
    WINDOW_GONE, NO_SNAPSHOT     a group cannot resume where the matched tokens end: `miss_reason` of its kind
    PAGE_TAIL                    every whole page is here
    EVICTED, CLEARED             what the ghosts remember of the first page that is not here
    NEVER_SEEN                   they remember nothing of it

Explain also looks for the tokens under another salt (OTHER_SALT, `explaining.py`). What attached engines are told is in
`attachments/lookup.py` and `attachments/gone_rows.py`.
"""

from __future__ import annotations

from cache_service.core.device.ghost_table import GhostKind
from cache_service.core.device.radix_node import Root
from cache_service.core.device.radix_tree import RadixTree
from cache_service.core.kinds.group import Group
from session.words import MissReason


def miss_reason(
    tree: RadixTree, root: Root, tokens: bytes, matched_pages: int, limit_pages: int, limiting: Group | None = None
) -> MissReason:
    """Returns why the device has no more of the prompt than it has; `limiting` is the group that cannot resume."""
    if limiting is not None:
        return limiting.miss_reason
    if matched_pages == limit_pages:
        return MissReason.PAGE_TAIL
    ghost = tree.run_marks.find(root, tokens, matched_pages) if tree.ghosts.num_pages else None
    if ghost is None:
        return MissReason.NEVER_SEEN
    return MissReason.CLEARED if ghost.kind is GhostKind.CLEARED else MissReason.EVICTED
