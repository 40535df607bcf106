"""What a worker has within reach, as the command weighs it."""

from __future__ import annotations

import pytest

from cli.routing import _choice
from protos.v1 import cache_pb2, types_pb2


@pytest.mark.parametrize(
    ("reason", "host_tokens"),
    [
        (types_pb2.MISS_REASON_PAGE_TAIL, 64),
        (types_pb2.MISS_REASON_FETCH_SLOWER, 0),
        (types_pb2.MISS_REASON_FETCH_BUSY, 0),
        (types_pb2.MISS_REASON_BREAKER_OPEN, 0),
    ],
)
def test_what_would_be_computed_is_not_within_reach(reason: types_pb2.MissReason.ValueType, host_tokens: int) -> None:
    found = types_pb2.MatchResult(matched_tokens=16, usable_tokens=16, host_tokens=64, miss_reason=reason)
    choice = _choice(cache_pb2.WorkerMatch(worker_id="w", match=found), 3)
    assert (choice.usable_tokens, choice.host_tokens, choice.num_requests) == (16, host_tokens, 3)
    assert choice.rank[1] == 16 + host_tokens
