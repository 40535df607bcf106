"""Lookups of waiting requests in the tier, made in a thread: the scheduler never waits for long."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Protocol

from session.words import HASH_BYTES, TransferStatus
from tier_client.calls import HostTierCalls
from tier_client.values import Hit, PagePath

# The service takes this many pages in one call.
MAX_PAGES = 16_384
# A result is used for this long; the service's leases last longer.
ANSWER_S = 10.0
NOTHING = Hit(0)


class LoraRequest(Protocol):
    @property
    def lora_name(self) -> str: ...


class Request(Protocol):
    """What the connector reads of vLLM's Request."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> list[bytes]: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def lora_request(self) -> LoraRequest | None: ...
    @property
    def skip_reading_prefix_cache(self) -> bool: ...


def namespace(request: Request) -> tuple[str, str]:
    """Returns adapter and salt. Block hashes have them too; the service keeps tenants apart by them."""
    return (request.lora_request.lora_name if request.lora_request else "", request.cache_salt or "")


@dataclass(slots=True)
class Asked:
    """`end`: leading pages that the request may reuse."""

    local_pages: int
    end: int
    at_s: float
    answer: Future[Hit | None]


class Lookups:
    """At most one lookup for each request. Results that are not taken are released."""

    def __init__(
        self,
        index: HostTierCalls,
        thread: Executor,
        page_tokens: int,
        timeout_s: float,
        inline_wait_s: float,
        now_s: Callable[[], float],
    ) -> None:
        self._index, self._thread, self._page_tokens = index, thread, page_tokens
        self._timeout_s, self._inline_wait_s, self._now_s = timeout_s, inline_wait_s, now_s
        self._asked: dict[str, Asked] = {}

    def tokens(self, request: Request, local_pages: int) -> int | None:
        """Returns how many tokens behind `local_pages` can be read from the tier. None: ask again at the next step."""
        end = min((request.num_tokens - 1) // self._page_tokens, len(request.block_hashes), MAX_PAGES)
        asked = self._asked.get(request.request_id)
        if asked is not None and not self._still_holds(asked, local_pages, end):
            self.drop(request.request_id)
            asked = None
        if end <= local_pages or (asked is None and self._index.is_away()):
            self.drop(request.request_id)
            return 0
        if asked is None:
            asked = self._ask(request, local_pages, end)
        found = self._answered(asked)
        if found is None and self._now_s() - asked.at_s < self._timeout_s:
            return None
        return max((found or NOTHING).usable_pages - local_pages, 0) * self._page_tokens

    def take(self, request_id: str) -> tuple[int, Hit] | None:
        """Returns the result that the scheduler used, and the local pages it was asked for. The caller releases it."""
        asked = self._asked.pop(request_id, None)
        if asked is None:
            return None
        found = self._answered(asked)
        if found is None:
            self._release_later(asked)
        return (asked.local_pages, found) if found is not None else None

    def drop(self, request_id: str) -> None:
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            self._release_later(asked)

    def release(self, hit: Hit, num_pages: int, status: TransferStatus) -> None:
        if hit.lease:
            self._thread.submit(self._index.release, hit, num_pages, status)

    def _still_holds(self, asked: Asked, local_pages: int, end: int) -> bool:
        return (asked.local_pages, asked.end) == (local_pages, end) and self._now_s() - asked.at_s < ANSWER_S

    def _ask(self, request: Request, local_pages: int, end: int) -> Asked:
        page_ids = b"".join(request.block_hashes[:end])
        assert len(page_ids) == end * HASH_BYTES
        adapter, salt = namespace(request)
        path = PagePath(page_ids, adapter=adapter, salt=salt)
        answer = self._thread.submit(self._index.lookup, path, local_pages)
        asked = self._asked[request.request_id] = Asked(local_pages, end, self._now_s(), answer)
        return asked

    def _answered(self, asked: Asked) -> Hit | None:
        """Returns the result, None while there is none; a call that failed found nothing."""
        try:
            return asked.answer.result(timeout=self._inline_wait_s) or NOTHING
        except TimeoutError:
            return None if not asked.answer.done() else NOTHING
        except Exception:
            return NOTHING

    def _release_later(self, asked: Asked) -> None:
        """Releases the result as soon as it is there."""

        def release(answer: Future[Hit | None]) -> None:
            if not answer.cancelled() and answer.exception() is None:
                self.release(answer.result() or NOTHING, 0, TransferStatus.DONE)

        asked.answer.add_done_callback(release)
