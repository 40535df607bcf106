"""What a worker's inventory costs while it is kept, and how long the cache service needs to take it. Fails when an
audit does, or when a page that was offered is not cached.

    python -m benchmarks.bench_inventory [--pages N] [--streams N]

Without a network: Steps go through the codec as bytes, and through the manager. Conversations of 4 to 64 pages share
trunks of 32 pages; the pool is full. `launch_us` is the inventory's part of a decode launch, from the publishes of its
Step to the extends of the reply; `chunk_us` that of a prompt's chunk of 2,048 tokens. Times are those of this thread's
CPU. Writes benchmarks/results/inventory.json.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from array import array
from pathlib import Path
from statistics import median

from benchmarks.host import on_this_machine
from benchmarks.report import RESULTS, parser, save
from cache_service.core.cache_manager import CacheManager, ManagerConfig
from protos.v1 import cache_pb2
from rpc.collector import LONG_LIVED, seldom_collected
from session.limits import SessionLimits
from session.messages import ExtendGrant, Grant, Hello, Step
from session.protocol import CAPABILITIES
from session.wire.reply import encode_reply
from session.wire.step import decode_step, encode_step
from session.words import GroupKind, GroupPages, GroupSpec, Match, MissReason, Namespace, SequenceId, WorkerId
from tests.core import audit
from worker_service.core.inventory import Inventory, Written
from worker_service.core.inventory_recorder import Recorder
from worker_service.core.limits import MessageBudget
from worker_service.core.restoration import Restoration
from worker_service.core.sampling_params import SamplingParams
from worker_service.core.sequence import QueueOrder, Request, Sequence

PAGE_TOKENS = 16
TRUNK_PAGES = 32
NAMESPACE = Namespace("bench")
WORKER = WorkerId("bench")
CHUNK_PAGES = 128


def groups(num_pages: int) -> tuple[GroupSpec, ...]:
    return (GroupSpec("full", GroupKind.FULL, num_pages),)


def filled(num_pages: int) -> tuple[Inventory, list[array[int]]]:
    """Returns a full inventory, and the prompts whose pages it knows."""
    rng = random.Random(1)
    inventory = Inventory(groups(num_pages), PAGE_TOKENS)
    free = list(range(1, num_pages + 1))
    rng.shuffle(free)
    prompts: list[array[int]] = []
    trunk, table = array("i"), array("i")
    while free:
        if len(prompts) % 50 == 0:
            trunk, table = array("i"), array("i")
        first = len(table)
        count = min(rng.randrange(4, 65) + (0 if first else TRUNK_PAGES), len(free))
        tokens = trunk + array("i", [rng.randrange(50_000) for _ in range(count * PAGE_TOKENS)])
        pages = table + array("i", [free.pop() for _ in range(count)])
        inventory.record(Written(NAMESPACE, tokens, [pages], 0, first, len(pages)))
        if not first:
            trunk, table = tokens[: TRUNK_PAGES * PAGE_TOKENS], pages[:TRUNK_PAGES]
        prompts.append(tokens)
    return inventory, prompts


def room_bytes(num_pages: int) -> float:
    """Returns the bytes that a page of the leading group takes, as allocated."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    inventory = Inventory(groups(num_pages), PAGE_TOKENS)
    took = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(inventory.stamps) > num_pages
    return took / num_pages


def decode_us(inventory: Inventory, num_streams: int, num_launches: int) -> float:
    """Returns the inventory's time for one launch of streams that fill a page every PAGE_TOKENS launches."""
    recorder = Recorder(inventory)
    sequences, next_page = [], 1
    for number in range(num_streams):
        tokens = array("i", range(number, number + 64 * PAGE_TOKENS))
        request = Request(SequenceId(number + 1), NAMESPACE, tokens.tobytes(), SamplingParams(1 << 20))
        sequence = Sequence(request, QueueOrder(0, number), 1)
        sequence.tables[0] = array("i", range(next_page, next_page + 64))
        next_page += 64
        recorder.granted(_grant(sequence))
        sequence.computed_len = len(tokens)
        recorder.published(sequence)
        recorder.answered(())
        sequence.published_len = len(tokens)
        sequence.computed_len += number % PAGE_TOKENS
        sequences.append(sequence)
    total = 0.0
    for _ in range(num_launches):
        extends = []
        due = []
        for sequence in sequences:
            sequence.tokens.append(7)
            sequence.computed_len += 1
            if sequence.computed_len % PAGE_TOKENS == 1:
                page = array("i", (next_page,))
                next_page = next_page % (len(inventory.stamps) - 1) + 1
                sequence.tables[0] += page
                extends.append(ExtendGrant(sequence.sequence_id, (GroupPages(0, 0, page.tobytes()),)))
            if sequence.computed_len % PAGE_TOKENS == 0:
                due.append(sequence)
        started = time.thread_time()
        for sequence in due:
            recorder.published(sequence)
        recorder.answered(())
        for extend in extends:
            recorder.extended(extend)
        recorder.take_confirmation()
        total += time.thread_time() - started
        for sequence in due:
            sequence.published_len = sequence.computed_len
    return total / num_launches * 1e6


def chunk_us(inventory: Inventory) -> float:
    """Returns the time for one chunk of a prompt: its pages are granted, and recorded when they are published."""
    recorder = Recorder(inventory)
    times = []
    for number in range(20):
        tokens = array("i", range(number, number + CHUNK_PAGES * PAGE_TOKENS))
        request = Request(SequenceId(number + 1), NAMESPACE, tokens.tobytes(), SamplingParams(1))
        sequence = Sequence(request, QueueOrder(0, number), 1)
        first = 1 + number * CHUNK_PAGES
        sequence.tables[0] = array("i", range(first, first + CHUNK_PAGES))
        started = time.thread_time()
        recorder.granted(_grant(sequence))
        sequence.computed_len = len(tokens)
        recorder.published(sequence)
        recorder.answered(())
        times.append(time.thread_time() - started)
    return median(times) * 1e6


def _grant(sequence: Sequence) -> Grant:
    tables = (GroupPages(0, 0, sequence.tables[0].tobytes()),)
    return Grant(sequence.sequence_id, 0, 0, 0, tables, Match(0, 0, 0, "", MissReason.NEVER_SEEN))


def restore(inventory: Inventory, prompts: list[array[int]], num_pages: int) -> dict[str, object]:
    """Offers the whole inventory to a manager that has just started. Returns times and sizes."""
    manager = CacheManager(ManagerConfig(), "bench")
    hello = Hello(WORKER, "bench:1", "bench", bytes(32), PAGE_TOKENS, groups(num_pages), capabilities=CAPABILITIES)
    limits: SessionLimits = manager.hello(hello, 0).limits
    restoration = Restoration(inventory, groups(num_pages))
    started = time.thread_time()
    restoration.begin()
    plan_s = time.thread_time() - started
    building_s, steps, num_bytes = 0.0, [], 0
    while restoration.is_pending:
        started = time.thread_time()
        found = restoration.take(
            MessageBudget(limits.max_step_items, limits.max_message_bytes // 2), limits.max_adopt_pages
        )
        raw = encode_step(Step(len(steps) + 1, inventory=found)).step.SerializeToString()
        building_s += time.thread_time() - started
        num_bytes += len(raw)
        started = time.thread_time()
        reply = manager.step(WORKER, decode_step(cache_pb2.Step.FromString(raw), manager.limits), 0)
        encode_reply(reply, 1).SerializeToString()
        steps.append(time.thread_time() - started)
        assert not reply.run_refusals, reply.run_refusals[0]
    audit.check(manager)
    cached = sum(manager.match(NAMESPACE, tokens.tobytes() + bytes(4))[0].match.usable_tokens for tokens in prompts)
    share = cached / sum(map(len, prompts))
    assert share == 1.0, f"{share:.4f} of the tokens are cached"
    return {
        "share_of_tokens_cached": share,
        "nodes": manager.stats().workers[0].num_nodes,
        "worker_plan_ms": round(plan_s * 1e3, 1),
        "worker_us_per_page": round(building_s / num_pages * 1e6, 2),
        "manager_us_per_page": round(sum(steps) / num_pages * 1e6, 2),
        "steps": len(steps),
        "step_ms_max": round(max(steps) * 1e3, 1),
        "bytes_per_page": round(num_bytes / num_pages, 1),
    }


def main() -> None:
    told = parser(__doc__, pages=100_000, streams=64)
    told.add_argument("--out", type=Path, default=RESULTS / "inventory.json")
    options = told.parse_args()
    with seldom_collected(LONG_LIVED):
        inventory, prompts = filled(options.pages)
        result = {
            **on_this_machine(),
            "pages": options.pages,
            "page_tokens": PAGE_TOKENS,
            "streams": options.streams,
            "room_bytes_per_page": round(room_bytes(options.pages), 1),
            **restore(inventory, prompts, options.pages),
            "launch_us": round(decode_us(inventory, options.streams, 2_000), 1),
            "chunk_us": round(chunk_us(inventory), 1),
        }
    save(result, options.out)


if __name__ == "__main__":
    main()
