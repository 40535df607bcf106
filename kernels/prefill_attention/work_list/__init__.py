"""The order in which a prefill step's tiles of queries are computed: long ones first, made on the device.

Knows no pages and no layer: one list serves all layers of a step. `kernel` holds the jit function.
"""

import torch

__all__ = ["RECORD", "make_work_list"]

# int32 numbers of one record: 32 bytes.
RECORD = 8
_SPLITS = 4


def make_work_list(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    records: torch.Tensor,
    count: torch.Tensor,
    tile_queries: int,
    tile_keys: int,
) -> None:
    """Fills records int32 [max_tiles, RECORD] and count int32 [1]; reads the lengths on the device only."""
    from kernels.prefill_attention.work_list.kernel import list_tiles

    num_seqs = cu_seqlens_q.shape[0] - 1
    with torch.cuda.device_of(records):
        list_tiles[(max(num_seqs, 1), _SPLITS)](
            cu_seqlens_q,
            cu_seqlens_k,
            records,
            count,
            num_seqs,
            records.shape[0],
            QUERIES=tile_queries,
            KEYS=tile_keys,
            TILES=64,
            SEQS=32,
            num_warps=4,
        )
