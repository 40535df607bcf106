"""What a worker's pages really hold: a mark for each token slot, so that a wrong page is seen at once."""

from __future__ import annotations

from collections.abc import Sequence

from session.words import Namespace

Value = tuple[object, ...]
POISON = "poison"


def marks_of(namespace: Namespace, tokens: Sequence[int]) -> list[int]:
    """One mark for each token: it stands for the namespace and every token up to this one, as real KV does."""
    marks: list[int] = []
    mark = hash(namespace)
    for token in tokens:
        mark = hash((mark, token))
        marks.append(mark)
    return marks


def extend_marks(marks: list[int], namespace: Namespace, tokens: Sequence[int]) -> None:
    mark = marks[-1] if marks else hash(namespace)
    for token in tokens:
        mark = hash((mark, token))
        marks.append(mark)


def state_value(marks: Sequence[int], boundary: int) -> Value:
    """A recurrent state after `boundary` tokens; at 0 it is the zero state."""
    return ("state", marks[boundary - 1] if boundary else 0)


class Shadow:
    """Contents by group and page id. A page that was never written holds poison, as uninitialised memory does."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._values: dict[tuple[int, int], list[object]] = {}

    def poison(self, group: int, page: int) -> None:
        self._values.pop((group, page), None)

    def write(self, group: int, page: int, offset: int, mark: object) -> None:
        assert page, "a launch wrote to the reserved page"
        slots = self._values.setdefault((group, page), [POISON] * self.page_tokens)
        slots[offset] = mark

    def store(self, group: int, page: int, value: Value) -> None:
        assert page, "something was stored into the reserved page"
        self._values[group, page] = list(value)

    def slot(self, group: int, page: int, offset: int) -> object:
        slots = self._values.get((group, page))
        return POISON if slots is None else slots[offset]

    def value(self, group: int, page: int) -> Value:
        return tuple(self._values.get((group, page), (POISON,)))
