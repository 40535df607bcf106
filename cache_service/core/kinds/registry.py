"""Which class says what a kind of group means: a new kind is a file in this folder and a line here."""

from __future__ import annotations

from cache_service.core.kinds.full import FullGroup
from cache_service.core.kinds.state import StateGroup
from cache_service.core.kinds.window import WindowGroup
from session.words import GroupKind

KINDS: dict[GroupKind, type[FullGroup] | type[WindowGroup] | type[StateGroup]] = {
    GroupKind.FULL: FullGroup,
    GroupKind.WINDOW: WindowGroup,
    GroupKind.STATE: StateGroup,
}
