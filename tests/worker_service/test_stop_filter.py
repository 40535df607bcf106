"""Text comes out as soon as it is certain, and ends before a stop string however the tokens cut it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from worker_service.stop_filter import StopFilter


def run(pieces: list[str], stop: tuple[str, ...]) -> tuple[str, bool]:
    stream, shown = StopFilter(stop), ""
    for piece in pieces:
        cut = stream.push(piece)
        shown += cut.text
        if cut.stopped:
            return shown, True
    return shown + stream.flush(), False


def test_only_what_may_still_become_a_stop_string_is_held_back() -> None:
    stream = StopFilter(("###", "END"))
    assert stream.push("a#") == ("a", False)
    assert stream.push("#b") == ("##b", False)
    assert stream.push("xE") == ("x", False)
    assert stream.push("N") == ("", False)
    assert stream.push("D of it") == ("", True)


def test_without_stop_strings_text_passes() -> None:
    assert StopFilter(()).push("anything") == ("anything", False)


def test_the_end_brings_what_was_held_back() -> None:
    assert run(["ab", "EN"], ("END",)) == ("abEN", False)


text = st.text("ab", max_size=24)


@given(
    whole=text,
    cuts=st.lists(st.integers(0, 24), max_size=6),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_cutting_the_text_anywhere_changes_nothing(whole: str, cuts: list[int], stop: list[str]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut <= len(whole)), len(whole)]
    pieces = [whole[start:end] for start, end in pairwise(edges)]
    shown, stopped = run(pieces, tuple(stop))
    assert stopped == any(string in whole for string in stop)
    if not stopped:
        assert shown == whole
    else:
        # A stop string that ends first may start later than another one: what was shown is cut before one of them.
        assert any(whole[len(shown) :].startswith(string) for string in stop)
        assert not any(string in shown for string in stop)
