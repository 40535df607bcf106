"""The work of a mla_decode step, divided on the device by the sequences' lengths.

The division changes speed only, no result, unless a plan is asked to cut by load.
"""

import torch

from kernels._checks import check_lengths
from kernels.errors import KernelArgumentError
from kernels.mla_decode.cut_sizes import MANY_PARTS, MANY_ROWS, MOST_MERGED, PIECES, tile_rows_of
from kernels.mla_decode.tree_sizes import MOST_HEADS_TRANSPOSED, TILE, is_transposed, tree_of

__all__ = ["MlaDecodePlan"]

MAX_SEQS = 1024
# From this number of tiles of 64 rows on, programs that cut by load fold the parts together: 8 sequences of 8,192 with
# 64 heads take 43.0 us where a launch behind takes 43.4, but 2 of them 32.6 for 26.0 (H200).
LEAST_TILES_TOGETHER = 8
# Up to this number of leaves that a launch may have, counted for each tile of 64 rows, weights have a launch of their
# own: two sequences of 8,192 with 128 heads, 32 leaves, take 34.3 us for 41.1, but four 52.7 for 45.5 (H200). That
# launch has room for the queries of this number of tiles. From the next number of leaves on, programs of the launch
# behind have 128 columns of values, not 64: 34.3 us with 32 leaves for 37.2, but 24.9 with 16 for 23.4.
MOST_LEAVES_APART, MOST_TILES_APART, LEAST_LEAVES_WIDE = 32, 2, 24


class MlaDecodePlan:
    """Static buffers for one batch shape: prepared once per step, read by every layer and by a captured graph.

    A sequence's rows (query tokens x heads) are cut into tiles of rows. One program computes a tile, or several compute
    its keys in pieces: leaves or groups of leaves, by load a run of key tiles. Partial results are merged by a second
    launch; by load, from LEAST_TILES_TOGETHER tiles on (always with few heads), by the attention launch itself, where
    its programs all run at once. Without max_q_tokens the plan serves calls without cu_seqlens_q, of one query for each
    sequence. Launches of one plan share its buffers and counters, so they must follow each other in a stream.

    With by_load, cuts are where programs get equally many latents, at any tile of them: faster on Hopper, but a
    result's last bits then depend on the batch, and parts are rounded to 16 bits. It changes nothing for several
    queries of up to 16 heads, or for other implementations. Few heads' launches may begin while earlier ones run, and
    read at once what was in the pages when the plan was prepared: all latents but each sequence's last one.
    """

    def __init__(
        self,
        max_seqs: int,
        max_seqlen_k: int,
        heads: int,
        *,
        max_q_tokens: int | None = None,
        by_load: bool = False,
        programs: int | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        if not 0 <= max_seqs <= MAX_SEQS:
            raise KernelArgumentError(f"max_seqs: must be in 0..{MAX_SEQS}, got {max_seqs}")
        self.one_query = max_q_tokens is None
        by_load = self.by_load = by_load and (self.one_query or heads > MOST_HEADS_TRANSPOSED)
        max_q_tokens = max_q_tokens or 1
        self.max_seqs, self.max_seqlen_k, self.heads, self.max_q_tokens = max_seqs, max_seqlen_k, heads, max_q_tokens
        if programs is None:
            programs = torch.cuda.get_device_properties(device).multi_processor_count
        self.programs, self.tree = programs, tree_of(heads, self.one_query)
        tree_rows = 16 if is_transposed(heads, self.one_query) else MANY_ROWS
        self.rows = tile_rows_of(heads, self.one_query) if by_load else tree_rows
        # Queries are the narrow side of products, latents the other one: the kernels for few heads.
        self.transposed = self.rows < MANY_ROWS
        self.slot_rows = self.rows if self.transposed and not by_load else min(self.rows, heads * max_q_tokens)
        tiles = self.tiles = -(-heads * max_q_tokens // self.rows)
        leaves = self.leaves = self.tree.most_leaves(max_seqlen_k)
        # A tile is shared out only if it is longer than a program's part of the batch: see the kernels that plan.
        self.max_shared = max(min(max_seqs * tiles, programs), 1)
        if self.by_load:
            # A cut ends one program's run: there are fewer of them than programs, and each adds a part.
            self.max_items, slots = max_seqs * tiles + programs, self.max_shared + programs
        else:
            self.max_items, slots = max(max_seqs * tiles * leaves, 1), self.max_shared * leaves
        self.max_seqs_apart = self._max_seqs_apart(tiles * leaves, slots)
        self.fit_at_once = _fit_at_once(programs, device)
        self._allocate(slots, tiles * leaves, device)

    def _allocate(self, slots: int, leaves: int, device: torch.device | str) -> None:
        """Makes the buffers, for parts in `slots`; `leaves` are those of all tiles of a sequence."""

        def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # Sequence, first query, queries, tile of rows, first leaf, leaves, latents of the sequence, slot; by load the
        # first latent and the one behind the last in place of the first leaf and the number of leaves. -1: no slot.
        # By load with few heads, in place of queries and tile: for a first part that merges the others, how many there
        # are, -1 for each of these, and else 0; and which part of its sequence it is.
        self.items = buffer(self.max_items, 8, dtype=torch.int32)
        # Items, leaves in an item of a sequence that is shared out, such sequences, and the most tiles of latents of a
        # leaf; by load items, tiles of latents of a program, and tiles of rows that are shared out.
        self.counts = buffer(4, dtype=torch.int32)
        # First query, queries, parts of a tile, first slot of each of these; by load first row, rows and parts of each
        # tile or piece of one, and where in all slots its first part's rows begin.
        self.shared = buffer(
            max(self.max_seqs, self.max_shared * (PIECES if self.by_load else 1)), 4, dtype=torch.int32
        )
        # By load: each program's first item, and the end of the last one's.
        self.firsts = buffer(self.programs + 1 if self.by_load else 0, dtype=torch.int32)
        if self.by_load:
            self.parts = torch.empty((slots, self.slot_rows, 512), dtype=torch.bfloat16, device=device)
            self.levels = torch.empty((slots, self.slot_rows), dtype=torch.float32, device=device)
        else:
            of_parts = torch.float32 if self.transposed else torch.bfloat16
            self.acc = torch.empty((slots, self.slot_rows, 512), dtype=of_parts, device=device)
            self.row_max = torch.empty((slots, self.slot_rows), dtype=torch.float32, device=device)
            self.row_sum = torch.empty((slots, self.slot_rows), dtype=torch.float32, device=device)
        # What work_queue.py counts: items drawn, and programs that are done.
        self.drawn = buffer(0 if self.by_load else 2, dtype=torch.int32)
        # Of tiles of latents and rows whose weights have a launch of their own: these, their tops and their sums.
        apart = self.max_seqs_apart * leaves * (self.tree.leaf // TILE) * 64
        self.weights = buffer(apart, TILE, dtype=torch.bfloat16)
        self.tops, self.tile_sums = (buffer(apart, dtype=torch.float32) for _ in range(2))
        # By load: the counters of the barrier at which programs meet to fold, 0 between launches; with few heads what
        # `meet` has, and the tiles that programs have yet to ask for. Of each sequence that is cut, at its first slot,
        # parts that are stored. Tiles and parts are 0 between launches.
        self.arrivals = buffer((4 if self.transposed else 2) if self.by_load else 0, dtype=torch.int32)
        self.stored = buffer(slots if self.by_load and self.transposed else 0, dtype=torch.int32)
        if self.transposed or self.by_load:
            # Running totals of leaves; by load there are none.
            totals = 0 if self.by_load else self.programs
            self.sums = torch.empty((totals, self.rows, 512), dtype=torch.float32, device=device)
        else:
            # What programs keep of the tree of leaves: of each level a sum, bases and sums of weights by halves.
            kept = max((self.leaves - 1).bit_length(), 1), self.programs
            self.nodes = torch.empty((*kept, 64, 512), dtype=torch.bfloat16, device=device)
            self.sums = torch.empty((*kept, 2, 2, 64), dtype=torch.float32, device=device)

    def folds_together(self, num_seqs: int) -> bool:
        """Returns whether the attention's programs fold this number of sequences; if not, a launch behind it does."""
        return self.by_load and self.fit_at_once and (self.transposed or num_seqs * self.tiles >= LEAST_TILES_TOGETHER)

    def begins_early(self, num_seqs: int) -> bool:
        """Returns whether a launch of few heads asks for latents before the launch before it has ended.

        It pays where programs end at different times, as they do where most sequences have two parts at most.
        """
        return 2 * num_seqs >= self.programs - self.programs // 32

    def _max_seqs_apart(self, leaves: int, slots: int) -> int:
        """Returns up to how many sequences weights have a launch of their own.

        `leaves` are those of all tiles of a sequence.
        """
        if self.by_load or self.transposed or not self.one_query or self.tiles > MOST_TILES_APART:
            return 0
        return min(MOST_LEAVES_APART, slots) // leaves

    def has_weights_apart(self, num_seqs: int) -> bool:
        """Returns whether weights of this number of sequences have a launch of their own: the same bits, sooner."""
        return 0 < num_seqs <= self.max_seqs_apart

    def columns_apart(self, num_seqs: int) -> int:
        """Returns how many columns of the values a program has where weights have a launch of their own."""
        return 128 if num_seqs * self.tiles * self.leaves >= LEAST_LEAVES_WIDE else 64

    def check(self, num_seqs: int, max_seqlen_k: int, heads: int, max_q_tokens: int | None) -> None:
        """Refuses a batch that the buffers do not hold; None means a call without cu_seqlens_q."""
        if (max_q_tokens is None) != self.one_query:
            form = "without" if self.one_query else "with"
            raise KernelArgumentError(f"plan: made for calls {form} cu_seqlens_q")
        max_q_tokens = max_q_tokens or 1
        held = (self.max_seqs, self.max_seqlen_k, self.max_q_tokens)
        if any(has < needs for has, needs in zip(held, (num_seqs, max_seqlen_k, max_q_tokens), strict=True)):
            raise KernelArgumentError(
                f"plan: holds {held} sequences, latents and queries, got {(num_seqs, max_seqlen_k, max_q_tokens)}"
            )
        if heads != self.heads:
            raise KernelArgumentError(f"plan: made for {self.heads} heads, got {heads}")

    def prepare(self, seqlens_k: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None) -> None:
        """Fills the plan for these lengths; the same tensors go to the attention."""
        num_seqs = seqlens_k.shape[0]
        if num_seqs > self.max_seqs:
            raise KernelArgumentError(f"seqlens_k: the plan holds {self.max_seqs} sequences, got {num_seqs}")
        check_lengths("seqlens_k", seqlens_k, num_seqs, self.items.device)
        if self.by_load:
            from kernels.mla_decode.splits_triton import launch as launch_splits

            together = self.folds_together(num_seqs)
            lists = (self.items, self.counts, self.shared, self.firsts)
            launch_splits(
                lists,
                seqlens_k,
                cu_seqlens_q,
                programs=self.programs,
                heads=self.heads,
                rows=self.rows,
                slot_rows=self.slot_rows,
                many_parts=MANY_PARTS if self.transposed and together else self.programs + 1,
                most_merged=MOST_MERGED if self.transposed and together else 1,
            )
            return
        from kernels.mla_decode.plan_triton import launch

        launch(
            (self.items, self.counts, self.shared),
            seqlens_k,
            cu_seqlens_q,
            programs=self.programs,
            heads=self.heads,
            rows=self.rows,
            tree=self.tree,
            by_leaf=self.has_weights_apart(num_seqs),
        )


def _fit_at_once(programs: int, device: torch.device | str) -> bool:
    """Returns whether a card holds all programs at once: each multiprocessor has shared memory for one."""
    if torch.device(device).type != "cuda":
        return True  # no program waits for another there
    return programs <= torch.cuda.get_device_properties(device).multi_processor_count
