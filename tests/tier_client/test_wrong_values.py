"""The client of HostTier given what no page, path or request can be: nothing is raised, and the log says it once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from session.redis_url import RedisUrlError, parse_redis_url
from session.words import TransferStatus
from tests.tier_client.stage import FULL, STATE, Stage, all_pages, path, payload
from tier_client.client import Saved
from tier_client.page_store import as_bytes
from tier_client.values import Loaded, PagePath, PageRange, fingerprint_of

PROMPT = path(range(6))


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


STRANGE: list[Any] = [
    "text" * 64,
    None,
    256,
    [0] * 256,
    np.zeros(128, np.float32),
    np.zeros((16, 32), np.uint8)[:, ::2],
    np.zeros(32, object),
    np.zeros(32, "datetime64[s]"),
]


@pytest.mark.parametrize(
    "strange", STRANGE, ids=[f"{type(one).__name__}-{number}" for number, one in enumerate(STRANGE)]
)
def test_a_payload_that_is_no_page_is_given_up_and_told_once(
    shared: Stage, caplog: pytest.LogCaptureFixture, strange: Any
) -> None:
    client, before = shared.client(), shared.stats().attachments
    for first in (2, 4):
        assert (
            client.save(PROMPT, all_pages(6), lambda _, page, of=first: payload(0, page) if page < of else strange) == 0
        )
    after = shared.stats().attachments
    assert (after.given_up_pages - before.given_up_pages, after.refused_pages - before.refused_pages) == (12, 0)
    assert after.num_tickets == 0
    (text,) = told(caplog)
    assert text.startswith("payload: of page 2 of group 0 ")
    assert client.save(PROMPT, all_pages(6), payload) == 6, "others may write it"


@pytest.mark.parametrize(
    "payloads", [None, 7, [], [b"x" * 256] * 5, b"x" * 6], ids=["none", "number", "empty", "few", "bytes"]
)
def test_payloads_that_are_not_one_of_each_page(shared: Stage, caplog: pytest.LogCaptureFixture, payloads: Any) -> None:
    client = shared.client()
    for _ in range(2):
        assert client.save_batches(PROMPT, all_pages(6), lambda group, pages: payloads) == Saved(0, 0)
    (text,) = told(caplog)
    assert text.startswith("payload")
    assert client.save(PROMPT, all_pages(6), payload) == 6


def test_of_several_groups_those_before_the_wrong_one_are_saved(shared: Stage) -> None:
    client = shared.client(FULL, STATE)
    ranges = [PageRange(0, 0, 6), PageRange(1, 5, 6)]
    assert client.save(PROMPT, ranges, lambda group, page: payload(0, page) if not group else "") == 6  # type: ignore[return-value]
    assert client.save(PROMPT, ranges, payload) == 1
    assert client.fetch(PROMPT).usable_pages == 6


def test_a_rank_that_writes_no_bytes_writes_what_is_before_them(
    shared: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    client = shared.client()
    ticket = client.calls.reserve(PROMPT, all_pages(6))
    assert ticket is not None
    values: list[Any] = [payload(0, 0), payload(0, 1), "text", payload(0, 3), payload(0, 4), payload(0, 5)]
    assert client.store.write(0, ticket.pages[0].keys(0), values) == (2, TransferStatus.DONE)
    assert len(told(caplog)) == 1
    assert client.calls.commit(ticket, 0, [(0, 2)], TransferStatus.DONE) == 2


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("engine", {"engine": "\ud800"}),
        ("engine", {"engine": None}),
        ("model", {"model": "/models/\udcff"}),
        ("page_tokens", {"page_tokens": -16}),
        ("page_tokens", {"page_tokens": 16.0}),
        ("num_ranks", {"num_ranks": 2**40}),
        ("fingerprint", {"fingerprint": "f" * 32}),
        ("groups[1].name", {"groups": (FULL, FULL._replace(name="\ud800"))}),
        ("groups[0].page_bytes", {"groups": (FULL._replace(page_bytes=-1),)}),
        ("groups[0].page_bytes", {"groups": (FULL._replace(page_bytes="256"),)}),  # type: ignore[arg-type]
        ("groups[0].kind", {"groups": (FULL._replace(kind=None),)}),  # type: ignore[arg-type]
        ("groups[0].window_tokens", {"groups": (FULL._replace(window_tokens=2**32),)}),
    ],
)
def test_what_no_attach_can_carry_is_told_once_by_its_field(
    shared: Stage, caplog: pytest.LogCaptureFixture, field: str, settings: dict[str, Any]
) -> None:
    groups = settings.pop("groups", (FULL,))
    client = shared.client(*groups, **settings)
    for _ in range(2):
        assert client.fetch(PROMPT, 1) == Loaded(1, {})
        assert client.save(PROMPT, all_pages(6), payload) == 0
    assert client.calls.is_away()
    (text,) = told(caplog)
    assert text.startswith(f"the host tier's service was not asked: {field}: "), text


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("path.salt", {"salt": "\ud800"}),
        ("path.salt", {"salt": None}),
        ("path.adapter", {"adapter": 7}),
        ("path.page_ids", {"page_ids": "text"}),
        ("path.tokens", {"tokens": ["a"] * 40}),
        ("path.tokens", {"tokens": np.zeros((40, 2), np.int32), "page_ids": b""}),
        ("path", {"tokens": None}),
    ],
)
def test_what_no_path_can_be_is_told_once_by_its_field(
    shared: Stage, caplog: pytest.LogCaptureFixture, field: str, changed: dict[str, Any]
) -> None:
    client, asked = shared.client(), PROMPT._replace(**changed)
    for _ in range(2):
        assert client.fetch(asked) == Loaded(0, {})
        assert client.save(asked, all_pages(2), payload) == 0
    (text,) = told(caplog)
    assert text.startswith(f"the host tier's service was not asked: {field}: "), text
    assert client.save(PROMPT, all_pages(6), payload) == 6


@pytest.mark.parametrize("asked", [None, 7, "text", b"id" * 16, (PROMPT.page_ids, "")])
def test_a_path_that_is_none(shared: Stage, asked: Any) -> None:
    client = shared.client()
    assert client.fetch(asked) == Loaded(0, {})
    assert client.save(asked, all_pages(2), payload) == 0


@pytest.mark.parametrize("local_pages", [None, -1, 1.0, "two", np.arange(2)])
def test_local_pages_that_are_no_number(shared: Stage, caplog: pytest.LogCaptureFixture, local_pages: Any) -> None:
    client = shared.client()
    assert client.save(PROMPT, all_pages(6), payload) == 6
    loaded = client.fetch(PROMPT, local_pages)
    assert loaded.usable_pages is local_pages and not loaded.values
    (text,) = told(caplog)
    assert "not asked: local_pages: " in text
    assert shared.stats().attachments.num_leases == 0


@pytest.mark.parametrize(
    ("field", "ranges"),
    [
        ("ranges[0].group", [PageRange(None, 0, 3)]),  # type: ignore[arg-type]
        ("ranges[1].group", [PageRange(0, 0, 3), PageRange(-1, 0, 3)]),
        ("ranges[0].first_page", [PageRange(0, -1, 3)]),
        ("ranges[0]", [PageRange(0, 0, None)]),  # type: ignore[arg-type]
        ("ranges[0]", [(0, 0, 3)]),
        ("ranges[0].num_pages", [PageRange(0, 0, 2.5)]),  # type: ignore[arg-type]
        ("ranges[0].num_pages", [PageRange(0, 0, np.float32(2))]),  # type: ignore[arg-type]
        ("'NoneType' object is not iterable", None),
    ],
)
def test_ranges_that_are_none(shared: Stage, caplog: pytest.LogCaptureFixture, field: str, ranges: Any) -> None:
    client = shared.client()
    for _ in range(2):
        assert client.save(PROMPT, ranges, payload) == 0
    (text,) = told(caplog)
    assert f"not asked: {field}" in text


def test_a_mistake_with_other_numbers_is_told_once(shared: Stage, caplog: pytest.LogCaptureFixture) -> None:
    client = shared.client()
    for number in range(1, 5):
        assert client.fetch(PROMPT, -number) == Loaded(-number, {})
        ranges = [PageRange(0, 0, 2)] * number + [PageRange(0, -number, 2)]
        assert client.save(PROMPT, ranges, payload) == 0
        assert client.save(PROMPT, all_pages(6), lambda _, page, most=number: bytes(most + page)) == 0
    assert len(told(caplog)) == 3


def test_empty_and_negative_ranges_ask_for_nothing_and_count_nothing(shared: Stage) -> None:
    client = shared.client()
    ranges = [PageRange(0, 0, 6), PageRange(0, 5, 2), PageRange(0, 3, 3)]
    values = [payload(0, page) for page in range(6)]
    assert client.save_batches(PROMPT, ranges, lambda group, pages: values) == Saved(6, 6)


def test_pages_beyond_what_the_service_takes_are_not_there(shared: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    client = shared.client()
    assert client.calls.attached() is not None
    monkeypatch.setattr(client.calls, "_max_pages", 4)
    saved = client.save_batches(PROMPT, all_pages(6), lambda group, pages: [payload(0, page) for page in pages])
    assert saved == Saved(4, 4)


@pytest.mark.parametrize(
    "ask",
    [
        lambda calls, ticket, hit: calls.commit(ticket, -1, [(0, 6)], TransferStatus.DONE) is None,
        lambda calls, ticket, hit: calls.commit(ticket, 0, [(1, 6)], TransferStatus.DONE) is None,
        lambda calls, ticket, hit: calls.commit(ticket, 0, [(0, -6)], TransferStatus.DONE) is None,
        lambda calls, ticket, hit: calls.commit(ticket, 0, [(0, None)], TransferStatus.DONE) is None,
        lambda calls, ticket, hit: calls.commit(ticket, 0, [0], TransferStatus.DONE) is None,
        lambda calls, ticket, hit: calls.commit(ticket, 0, None, TransferStatus.DONE) is None,
        lambda calls, ticket, hit: calls.commit(ticket, 0, [(0, 6)], None) is None,
        lambda calls, ticket, hit: calls.release(hit, -1, TransferStatus.DONE) is False,
        lambda calls, ticket, hit: calls.release(hit, None, TransferStatus.DONE) is False,
        lambda calls, ticket, hit: calls.release(hit, 2, None) is False,
    ],
)
def test_commits_and_releases_of_no_number(shared: Stage, ask: Callable[..., bool]) -> None:
    client = shared.client()
    assert client.save(PROMPT, all_pages(6), payload) == 6
    ticket, hit = client.calls.reserve(path("new"), all_pages(3)), client.calls.lookup(PROMPT, 0)
    assert ticket is not None and hit is not None
    assert ask(client.calls, ticket, hit)
    assert client.calls.commit(ticket, 0, [], TransferStatus.DONE) == 0
    assert client.calls.release(hit, 6, TransferStatus.DONE)


@pytest.mark.parametrize("host", ["a" * 70, "a..b"])
def test_a_host_that_no_name_can_be_is_away(shared: Stage, host: str) -> None:
    client = shared.client(redis_url=f"redis://{host}:6379/0")
    assert client.fetch(PROMPT) == Loaded(0, {})
    assert client.save(PROMPT, all_pages(6), payload) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_address", "\ud800:1"),
        ("call_timeout_s", math.inf),
        ("store_timeout_s", math.nan),
        ("compute_tokens_per_s", math.nan),
    ],
)
def test_a_configuration_that_nobody_can_keep(shared: Stage, field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        shared.client(**{field: value})


def test_a_redis_url_that_is_no_utf8() -> None:
    with pytest.raises(RedisUrlError, match="must be UTF-8"):
        parse_redis_url("redis://:pass\udcff@host:6379/0")


def test_fingerprints_of_paths_that_are_no_utf8() -> None:
    prints = {fingerprint_of({"model": name}) for name in ("/models/\udcff", "/models/\udcfe", "/models/")}
    assert len(prints) == 3


def test_bytes_in_one_piece() -> None:
    assert as_bytes(np.arange(6, dtype=np.float32).reshape(2, 3), 24).nbytes == 24
    released = memoryview(b"page")
    released.release()
    with pytest.raises(TypeError, match="released"):
        as_bytes(released)


def test_tokens_of_numpy_are_tokens(shared: Stage) -> None:
    client = shared.client()
    tokens: Any = np.arange(6 * 16)
    assert client.save(PagePath(tokens=tokens), all_pages(6), payload) == 6
    assert client.fetch(PagePath(tokens=list(range(6 * 16)))).usable_pages == 5
