"""Time a fetch grant of 8,191 pages, from the Acquire's bytes to the Grant's. Fails when a grant or an audit is wrong.

    python -m benchmarks.bench_fetch_grant [--pages N] [--rounds N]

Without a network: a Step goes through the codec as bytes, and through the manager; every page of the prompt is in
the host tier, none on the worker. `grant` is all pages at once, with enough tickets for it; `grant_default_limits` is
what one sequence gets of 64 open tickets. `hashing` is the share that SHA-256 takes alone. They take turns; the figures
are medians and the best turn. Writes benchmarks/results/fetch_grant.json; times are those of this thread's CPU.
"""

from __future__ import annotations

from array import array
from statistics import median
from time import thread_time

from benchmarks.host import on_this_machine
from benchmarks.report import RESULTS, parser, save
from cache_service.core.base.page_hash import namespace_digest, page_hashes
from cache_service.core.cache_manager import CacheManager, ManagerConfig
from cache_service.core.host.host_key import HostKey, build_key
from protos.v1 import cache_pb2, types_pb2
from session.messages import Hello
from session.wire.reply import encode_reply
from session.wire.seal import open_request, open_response, seal_request, seal_response
from session.wire.step import decode_step
from session.words import GroupKind, GroupSpec, HostTierKind, Namespace, PageHash, WorkerId
from tests.core import audit

PAGE_TOKENS = 16
PAGE_BYTES = 4 * PAGE_TOKENS
HASH_BYTES = 32
MODEL, TIER = "bench", "bench-tier"
FINGERPRINT = bytes(32)
NAME = WorkerId("bench")
NUM_GROUPS = 1


class FetchBench:
    """A worker without pages whose prompt lies in the host tier whole."""

    def __init__(self, num_pages: int, max_open_tickets: int) -> None:
        self.num_pages = num_pages
        self.config = ManagerConfig(max_open_tickets=max_open_tickets)
        self.manager = CacheManager(self.config, "bench")
        # One token more than the pages: the last token is always computed.
        self.tokens = array("i", range(num_pages * PAGE_TOKENS + 1)).tobytes()
        groups = (GroupSpec("full", GroupKind.FULL, num_pages + 1, page_bytes=1024),)
        tier = (HostTierKind.SHARED, TIER)
        hello = Hello(NAME, "bench:1", "bench", FINGERPRINT, PAGE_TOKENS, groups, *tier, model=MODEL)
        self.manager.hello(hello, 0)
        digest = namespace_digest(Namespace(MODEL))
        self.hashes = page_hashes(digest, b"", self.tokens[: num_pages * PAGE_BYTES], PAGE_BYTES)
        keys = [build_key(HostKey(FINGERPRINT, 0, 0, PageHash(one))) for one in self._each()]
        assert self.manager.tiers.add_scanned(TIER, FINGERPRINT, keys) == num_pages
        self.step_id = 0

    def _each(self) -> list[bytes]:
        return [self.hashes[at : at + HASH_BYTES] for at in range(0, len(self.hashes), HASH_BYTES)]

    def ask(self, step: cache_pb2.Step) -> tuple[cache_pb2.StepReply, float]:
        """The reply, and the seconds from the request's bytes to the reply's."""
        self.step_id += 1
        step.step_id = self.step_id
        request = seal_request(cache_pb2.WorkerMessage(step=step)).SerializeToString()
        started = thread_time()
        message = open_request(cache_pb2.SessionRequest.FromString(request)).step
        reply = self.manager.step(NAME, decode_step(message, self.manager.limits), self.step_id)
        response = seal_response(encode_reply(reply, NUM_GROUPS)).SerializeToString()
        seconds = thread_time() - started
        answer = open_response(cache_pb2.SessionResponse.FromString(response))
        assert not answer.step_reply.refusals, answer.step_reply.refusals
        return answer.step_reply, seconds

    def round(self, expected_pages: int) -> float:
        """Seconds for one grant; everything is given back afterwards."""
        acquire = cache_pb2.Acquire(sequence_id=1, namespace=types_pb2.Namespace(model=MODEL), tokens=self.tokens)
        reply, seconds = self.ask(cache_pb2.Step(acquires=[acquire]))
        (grant,) = reply.grants
        self._check(grant, expected_pages)
        release = cache_pb2.Release(sequence_id=1, reason=cache_pb2.RELEASE_REASON_ABORTED)
        self.ask(cache_pb2.Step(releases=[release]))
        done = cache_pb2.TRANSFER_STATUS_DONE
        acks = [cache_pb2.Ack(ticket=fetch.ticket, num_done=fetch.num_pages, status=done) for fetch in grant.fetches]
        self.ask(cache_pb2.Step(acks=acks))
        audit.check(self.manager)
        self.manager.tiers.take_touches()
        return seconds

    def _check(self, grant: types_pb2.Grant, expected_pages: int) -> None:
        """Consecutive runs of at most `transfer_pages`, with the right hashes, onto the pages of the table."""
        page_ids = grant.tables[0].page_ids
        page = 0
        for fetch in grant.fetches:
            assert fetch.first_page == page and fetch.num_pages <= self.config.transfer_pages
            end = page + fetch.num_pages
            assert fetch.groups[0].page_hashes == self.hashes[page * HASH_BYTES : end * HASH_BYTES]
            assert fetch.groups[0].page_ids == page_ids[page * 4 : end * 4]
            page = end
        assert page == expected_pages, f"{page} pages are fetched, {expected_pages} expected"


def hashing_s(bench: FetchBench) -> float:
    """Seconds that SHA-256 takes for all pages of the prompt."""
    digest, tokens = namespace_digest(Namespace(MODEL)), bench.tokens[: bench.num_pages * PAGE_BYTES]
    started = thread_time()
    page_hashes(digest, b"", tokens, PAGE_BYTES)
    return thread_time() - started


def spread(name: str, seconds: list[float]) -> dict[str, float]:
    return {f"{name}_ms": round(median(seconds) * 1e3, 3), f"{name}_ms_best": round(min(seconds) * 1e3, 3)}


def main() -> None:
    told = parser(__doc__, pages=8_191, rounds=25).parse_args()
    default = ManagerConfig()
    num_tickets = -(-told.pages // default.transfer_pages)
    default_pages = min(told.pages, default.max_open_tickets // 2 * default.transfer_pages)
    whole, limited = FetchBench(told.pages, 2 * num_tickets), FetchBench(told.pages, default.max_open_tickets)
    grants, default_grants, hashing = [], [], []
    for _ in range(told.rounds):  # in turns, since the machine may be shared
        grants.append(whole.round(told.pages))
        default_grants.append(limited.round(default_pages))
        hashing.append(hashing_s(whole))
    result = {
        "num_pages": told.pages,
        "transfer_pages": default.transfer_pages,
        "num_tickets": num_tickets,
        **spread("grant", grants),
        "default_limits_num_pages": default_pages,
        **spread("grant_default_limits", default_grants),
        **spread("hashing", hashing),
        **on_this_machine(),
    }
    save(result, RESULTS / "fetch_grant.json")


if __name__ == "__main__":
    main()
