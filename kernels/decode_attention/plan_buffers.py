"""DecodePlan: the buffers of decode steps, and of their splits, which are made on the device.

Into how many splits a step is cut is decided in plan_triton.py, where in splits_triton.py.
One plan serves every layer of a step and, as its counters return to zero, every captured graph. Layers with a window
may have a plan of their own, whose splits divide what the window can touch: one sequence of 65,536 keys with a window
of 4,096 (32 heads over 8, dim 128) takes 53.5 us with the plan of all keys, and 16.6 with its own (H200).
"""

import torch

from kernels._checks import check_lengths
from kernels.decode_attention.tree_sizes import LEAF, LEAVES_PER_GROUP, TILE
from kernels.errors import KernelArgumentError

__all__ = ["DecodePlan"]

# Columns of one launch: with 64 of them registers spill, and reading the keys twice takes less time than that.
MAX_COLUMNS = 32
# Up to this number of (sequence, kv head) pairs, one program of three stages on a multiprocessor beats two of two.
FEW_PAIRS = 8
# Pairs for each multiprocessor, least and most, where programs claim places (hopper/places.py). 16 sequences of 1 to
# 8,192 keys and 8 kv heads take 68 to 95 us, where one program a multiprocessor took 73 to 101 (twelve draws, H200).
# With fewer pairs short steps lose (2 of 4,097 keys: 22.4 us for 21.1); with more, mixed lengths gain nothing.
PLACED_SHARES = (0.65, 1.5)
# Fields of a split: sequence, kv head, first leaf within the pair, leaves, the sequence's length, splits of the pair
# (below 0 where it is cut at groups), its first partial less the groups before its origin; and the number of splits,
# the same for all, so that a program starts with one load.
SPLIT_FIELDS = 8
# Splits for each program beyond one for each pair, at most.
MAX_ROUNDS = 4
# What the plan's model counts with, by programs on a multiprocessor: the share of a tile's time among all programs that
# it takes one alone, what a split of a cut pair costs in tiles, and what each split adds to the pair's merge. Fitted to
# one H200: 132 programs for up to 8 pairs, 264 for more.
COSTS = {1: (0.8, 1.5, 0.45), 2: (0.52, 0.85, 0.2)}
# And where programs claim places: the share of the programs that takes all that memory gives, what a split of a cut
# pair costs in tiles, how much of the time counts for which fewer programs are left, by what share programs without a
# split make a step of cut pairs longer, if all were; by what share equal splits do where multiprocessors have one or
# two; and what each group of the longest cut pair adds to its merge.
COSTS_AT_ONCE = (0.45, 1.6, 0.9, 0.08, 0.08, 0.15)


class DecodePlan:
    """Room for steps of up to max_seqs sequences of up to max_seqlen_k keys and max_q_tokens new tokens each.

    With a window (0: none) a plan serves calls with that window alone; a plan without one serves all. Results have the
    same bits with either.

    Lengths are read on the device alone: `prepare` may be captured in a graph, and what a replay finds in its
    seqlens_k is what it plans for. One launch at a time may use a plan. A CPU needs no plan and gets an empty one.
    """

    def __init__(
        self,
        max_seqs: int,
        max_seqlen_k: int,
        q_heads: int,
        kv_heads: int,
        dim: int,
        *,
        max_q_tokens: int = 1,
        window: int = 0,
        device: torch.device | str,
    ) -> None:
        given = {"max_seqs": max_seqs, "kv_heads": kv_heads, "dim": dim, "max_q_tokens": max_q_tokens}
        for name, value in given.items():
            if value < 1:
                raise KernelArgumentError(f"{name}: must be positive, got {value}")
        if q_heads < 1 or q_heads % kv_heads:
            raise KernelArgumentError(f"q_heads: {q_heads} are not a multiple of {kv_heads} kv heads")
        if max_seqlen_k < 0:
            raise KernelArgumentError(f"max_seqlen_k: must not be negative, got {max_seqlen_k}")
        if window < 0:
            raise KernelArgumentError(f"window: must not be negative, got {window}")
        self.max_seqs, self.max_seqlen_k, self.max_q_tokens = max_seqs, max_seqlen_k, max_q_tokens
        self.window = window
        # The newest keys, those that any of max_q_tokens tokens can see; 0: all.
        newest = window + max_q_tokens - 1
        self.planned_tokens = newest if window and newest < max_seqlen_k else 0
        self.q_heads, self.kv_heads, self.dim = q_heads, kv_heads, dim
        self.device = torch.device(device)
        group = q_heads // kv_heads
        # Tokens of a launch: as many as the columns of a product hold.
        self.tokens = max(1, min(max_q_tokens, MAX_COLUMNS // group))
        self.rows = self.tokens * group
        if self.device.type == "cuda":
            self._allocate()

    def _allocate(self) -> None:
        self.multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
        pairs = self.max_seqs * self.kv_heads
        max_splits = pairs + MAX_ROUNDS * 2 * self.multiprocessors
        groups = pairs * self._max_groups()
        # A partial for each group, and behind each cut for the leaves of a group that another split began.
        partials = groups + (LEAVES_PER_GROUP - 1) * (max_splits - pairs)
        self.acc, self.row_max, self.row_sum = (
            torch.empty(partials * self.rows * width, dtype=torch.float32, device=self.device)
            for width in (self.dim, 1, 1)
        )
        self.splits = torch.empty(max_splits * SPLIT_FIELDS, dtype=torch.int32, device=self.device)
        # What hopper/places.py counts, and arrivals of each pair. All return to what they are here with every launch.
        counters = torch.zeros(4 + pairs, dtype=torch.int32, device=self.device)
        self.work, self.arrivals = counters[:4], counters[4:]
        self.work[3:].fill_(-1)  # an assignment would wait for the device

    def _max_groups(self) -> int:
        """Returns how many groups a pair's planned keys may touch: the newest ones can begin within a group."""
        group = LEAF * LEAVES_PER_GROUP
        most = max(1, -(-self.max_seqlen_k // group))
        return min(most, (self.planned_tokens + group - 2) // group + 1) if self.planned_tokens else most

    def prepare(self, seqlens_k: torch.Tensor) -> None:
        """Plans a step for these lengths, int32 [num_seqs]; call it once, before the first layer."""
        check_lengths("seqlens_k", seqlens_k, None, self._same_device_as(seqlens_k.device))
        num_seqs = seqlens_k.shape[0]
        if num_seqs > self.max_seqs:
            raise KernelArgumentError(f"seqlens_k: the plan has room for {self.max_seqs} sequences, got {num_seqs}")
        if num_seqs == 0 or self.device.type != "cuda":
            return
        from kernels.decode_attention.splits_triton import launch

        launch(
            seqlens_k,
            self.splits.view(-1, SPLIT_FIELDS),
            kv_heads=self.kv_heads,
            programs=self.programs(num_seqs),
            tile=TILE,
            leaf=LEAF,
            leaves_per_group=LEAVES_PER_GROUP,
            planned_tokens=self.planned_tokens,
            costs=COSTS[self.programs_per_multiprocessor(num_seqs)],
            costs_at_once=COSTS_AT_ONCE if self.is_placed(num_seqs) else None,
        )

    def programs_per_multiprocessor(self, num_seqs: int) -> int:
        """Two, unless one needs the registers or memory of both or there is little to do."""
        return 1 if num_seqs * self.kv_heads <= FEW_PAIRS or self.dim > 128 or self.rows > 16 else 2

    def is_placed(self, num_seqs: int) -> bool:
        """Returns whether programs claim places: where two share a multiprocessor, and it has about one pair."""
        least, most = (share * self.multiprocessors for share in PLACED_SHARES)
        return self.programs_per_multiprocessor(num_seqs) == 2 and least <= num_seqs * self.kv_heads <= most

    def programs(self, num_seqs: int) -> int:
        """Returns the number of programs of a launch over `num_seqs` sequences."""
        return self.programs_per_multiprocessor(num_seqs) * self.multiprocessors

    def check(self, sizes: dict[str, int], heads: tuple[int, int, int], window: int, device: torch.device) -> None:
        """Refuses a call that the plan is not for or has no room for; heads are (q_heads, kv_heads, dim)."""
        own = (self.q_heads, self.kv_heads, self.dim)
        if own != heads:
            raise KernelArgumentError(f"plan: made for (q_heads, kv_heads, dim) {own}, got {heads}")
        if self.window not in (0, window):
            raise KernelArgumentError(f"plan: made for window {self.window}, got {window}")
        room = {"num_seqs": self.max_seqs, "max_seqlen_k": self.max_seqlen_k, "max_q_tokens": self.max_q_tokens}
        for name, size in sizes.items():
            if size > room[name]:
                raise KernelArgumentError(f"plan: made for {name} up to {room[name]}, got {size}")
        if self._same_device_as(device) != device:
            raise KernelArgumentError(f"plan: made for {self.device}, the tensors are on {device}")

    def _same_device_as(self, device: torch.device) -> torch.device:
        """The plan's device; "cuda" alone means the tensor's."""
        return device if self.device.index is None and device.type == self.device.type else self.device
