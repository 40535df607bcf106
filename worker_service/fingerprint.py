"""What must agree before two workers may exchange pages, as one digest: the fingerprint of Hello and of host keys."""

from __future__ import annotations

import hashlib

from tier_client.large_pages import parts_text
from worker_service.compute import Compute
from worker_service.model.device import numerics

NUM_RANKS = 1


def fingerprint(compute: Compute) -> bytes:
    """Returns a digest of what must agree before two workers may exchange pages; each field is framed by its length."""
    fields: tuple[bytes | str, ...] = (
        compute.loaded.digest,
        # Rounds keys and values before fp8 pages do, so their layout does not tell it.
        str(compute.loaded.model.dtype),
        compute.pools.layout_id,
        repr(compute.loaded.spec.ropes),
        str(NUM_RANKS),
        compute.invariance.value,
        numerics(compute.device, compute.loaded.model.backend),
        *((f"segments of {compute.segment_tokens}",) if compute.segment_tokens else ()),
    )
    digest = hashlib.sha256(b"stemcache fingerprint 4")
    largest = max(layout.page_bytes for layout in compute.pools.layouts)
    for field in (*fields, *parts_text(largest, compute.part_bytes)):
        data = field if isinstance(field, bytes) else field.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()
