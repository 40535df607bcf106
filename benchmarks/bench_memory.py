"""What the manager's memory costs: bytes for each resident page, with events on and ghosts full.

`python -m benchmarks.bench_memory [--pages N]`. Prompts of 16 pages of 16 tokens fill the pool, then five times as many
push each other out. The bytes are those of the resident set.
"""

from __future__ import annotations

import gc
import sys
from array import array
from pathlib import Path
from time import process_time

from benchmarks.bench_core import PAGE_TOKENS, publish_prompt
from benchmarks.report import RESULTS, parser, save
from cache_service.core.cache_manager import CacheManager
from cli.replay.replay import make_manager

RUN_PAGES = 16


def one_run(manager: CacheManager, number: int) -> None:
    """Publishes a prompt of 16 pages that no other shares."""
    publish_prompt(manager, number, array("i", range(number, number + RUN_PAGES * PAGE_TOKENS)).tobytes())
    manager.take_events()


def current_rss() -> int:
    """Bytes; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


def measure(num_pages: int) -> dict[str, object]:
    gc.collect()
    blocks, before, start = sys.getallocatedblocks(), current_rss(), process_time()
    manager = make_manager(num_pages, PAGE_TOKENS, "lru", watch=True)
    runs = num_pages // RUN_PAGES
    for number in range(1, runs + 1):
        one_run(manager, number)
    gc.collect()
    filled = current_rss()
    for number in range(runs + 1, 6 * runs + 1):
        one_run(manager, number)
    gc.collect()
    after = current_rss()
    (worker,) = manager.stats().workers
    resident = worker.groups[0].num_evictable
    return {
        "pages": resident,
        "ghost_pages": worker.num_ghost_pages,
        "bytes_per_page_filled": round((filled - before) / resident, 1),
        "bytes_per_page": round((after - before) / resident, 1),
        "python_blocks_per_page": round((sys.getallocatedblocks() - blocks) / resident, 3),
        "cpu_s": round(process_time() - start, 1),
    }


def main() -> None:
    save(measure(parser(__doc__, pages=1_000_000).parse_args().pages), RESULTS / "memory.json")


if __name__ == "__main__":
    main()
