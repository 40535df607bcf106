"""Drive the manager alone with a trace in Mooncake's format, and measure it.

Each request is acquired, published (prompt, then output) and released before the next one.
"""

from __future__ import annotations

import json
import resource
import sys
from array import array
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from cache_service.core.cache_manager import CacheManager, ManagerConfig
from session.messages import Acquire, Extend, Grant, Hello, Publish, Refusal, Release
from session.words import TOKEN_BYTES, GroupKind, GroupSpec, Namespace, ReleaseReason, SequenceId, WorkerId

READ_AHEAD = 128  # requests, of about 60 KB each
BLOCK_TOKENS = 512  # tokens per hash id of the trace
VOCABULARY = 151_000
MAX_OUTPUT_TOKENS = 1 << 20
UNLIMITED_PAGES = 2**31 - 1
WORKER = WorkerId("replay")
NAMESPACE = Namespace("replay")


class Request(NamedTuple):
    """Packed tokens of one request; `output` replaces what a model would generate."""

    prompt: bytes
    output: bytes


class Replay(NamedTuple):
    """The figures; `hit_rate` is cached tokens over prompt tokens."""

    requests: int
    requests_per_s: float
    hit_rate: float
    p50_ms: float
    p99_ms: float
    evicted_pages: int
    peak_rss_mb: float


class TraceError(Exception):
    """A line of the trace is not a request; the text names the line and says why."""

    def __init__(self, line: int, reason: Exception) -> None:
        super().__init__(f"line {line} is not a request in Mooncake's format ({type(reason).__name__}: {reason})")


def read_trace(path: Path, num_requests: int | None = None) -> Iterator[Request]:
    """Each hash id becomes 512 tokens of its own; the output is unique to the request.

    One request at a time: a whole trace in memory would be far larger than the manager that is measured. Raises OSError
    and TraceError.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            if number == num_requests:
                return
            try:
                request = _request(number, json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise TraceError(number + 1, error) from error
            yield request


def _request(number: int, row: dict[str, Any]) -> Request:
    input_length, output_length, hash_ids = row["input_length"], row["output_length"], row["hash_ids"]
    # Checked before anything is computed: a text times 104,729 is a text of gigabytes.
    for name, values in (("input_length", [input_length]), ("output_length", [output_length]), ("hash_ids", hash_ids)):
        for value in values:
            if type(value) is not int:
                raise TypeError(f"{name}: {value!r} is not an integer")
    if not 0 < input_length <= len(hash_ids) * BLOCK_TOKENS:
        raise ValueError(f"input_length: {input_length} is not within its hash ids' {BLOCK_TOKENS} each")
    if not 0 <= output_length <= MAX_OUTPUT_TOKENS:
        raise ValueError(f"output_length: {output_length} is not within 0..{MAX_OUTPUT_TOKENS}")
    blocks = b"".join([_progression(7919, hash_id * 104_729, BLOCK_TOKENS) for hash_id in hash_ids])
    output = _progression(31, number * 1_000_003, output_length)
    return Request(blocks[: input_length * TOKEN_BYTES], output)


def _progression(step: int, start: int, count: int) -> bytes:
    """Packed tokens (start + k * step) modulo the vocabulary: a slice of one cycle, which passes every token once."""
    cycle, inverse = _cycle(step)
    first = start * inverse % VOCABULARY * TOKEN_BYTES
    rounds, rest = divmod(count, VOCABULARY)
    size = len(cycle) // 2
    return cycle[first : first + size] * rounds + cycle[first : first + rest * TOKEN_BYTES]


@cache
def _cycle(step: int) -> tuple[bytes, int]:
    """Two rounds of k * step, and the step's inverse; it must have no divisor in common with the vocabulary."""
    once = array("i", (k * step % VOCABULARY for k in range(VOCABULARY))).tobytes()
    return once * 2, pow(step, -1, VOCABULARY)


def make_manager(num_pages: int, page_tokens: int, policy: str, *, watch: bool = False) -> CacheManager:
    """One worker with one FULL group and no host tier; 0 pages: unlimited. `watch`: events are made."""
    manager = CacheManager(ManagerConfig(policy=policy, watch=watch), "replay")
    group = GroupSpec("full", GroupKind.FULL, num_pages or UNLIMITED_PAGES)
    hello = Hello(WORKER, "127.0.0.1:0", "replay", bytes(32), page_tokens, (group,))
    manager.hello(hello, 0)
    return manager


def replay(manager: CacheManager, requests: Iterable[Request]) -> Replay:
    """The time of a request is that of its calls; expanding the trace does not count.

    Each prompt is handed over in a buffer that was just filled, as from the decoder of a message: one that was written
    seconds ago would have to come from memory first, which no served request does. And some requests are read ahead, or
    the reader's work between two requests would push the manager out of the processor's caches.
    """
    seconds = array("d")
    cached = total = 0
    for number, (read, output) in enumerate(_read_ahead(requests), 1):
        prompt = bytes(bytearray(read))
        start = perf_counter()
        cached += one_request(manager, SequenceId(number), prompt, output)
        seconds.append(perf_counter() - start)
        total += len(prompt) // TOKEN_BYTES
    ordered = sorted(seconds)
    count = len(ordered)
    evicted = sum(group.num_evicted for worker in manager.stats().workers for group in worker.groups)
    return Replay(
        requests=count,
        requests_per_s=count / sum(ordered) if count else 0.0,
        hit_rate=cached / total if total else 0.0,
        p50_ms=ordered[count // 2] * 1e3 if count else 0.0,
        p99_ms=ordered[min(int(count * 0.99), count - 1)] * 1e3 if count else 0.0,
        evicted_pages=evicted,
        peak_rss_mb=peak_rss_mb(),
    )


def _read_ahead(requests: Iterable[Request]) -> Iterator[Request]:
    source = iter(requests)
    while batch := list(islice(source, READ_AHEAD)):
        yield from batch


def one_request(manager: CacheManager, sequence: SequenceId, prompt: bytes, output: bytes) -> int:
    """Returns the cached tokens. The last output token is never fed back, so it has no KV."""
    grant = manager.acquire(WORKER, Acquire(sequence, NAMESPACE, prompt))
    if isinstance(grant, Refusal):
        return 0
    _publish_all(manager, grant, len(prompt) // TOKEN_BYTES, output)
    manager.release(WORKER, Release(sequence, ReleaseReason.FINISHED))
    return grant.cached_tokens


def _publish_all(manager: CacheManager, grant: Grant, num_prompt: int, output: bytes) -> None:
    sequence = grant.sequence_id
    manager.publish(WORKER, Publish(sequence, b"", num_prompt))
    num_output = len(output) // TOKEN_BYTES
    if num_output > 1:
        length = num_prompt + num_output - 1
        if not isinstance(manager.extend(WORKER, Extend(sequence, length)), Refusal):
            manager.publish(WORKER, Publish(sequence, output, length))


def peak_rss_mb() -> float:
    scale = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale
