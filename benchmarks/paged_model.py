"""A model of random weights, with pages and a runner, from the fields of a config.json; benchmarks share it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from kernels.grouped_linear import Fp8Experts, Mxfp4Experts
from kernels.grouped_linear.stored import FP8_BLOCK, MX_BLOCK
from session.words import GroupKind, PageId, StateSlot
from worker_service.core.batch import Batch, build_batch
from worker_service.core.launch_plan import Row
from worker_service.core.sampling_params import SamplingParams
from worker_service.core.sequence import NO_PENALTY_SLOT
from worker_service.core.sequence import Sequence as CoreSequence
from worker_service.gpu.page_pools import PagePools
from worker_service.model.config import parse_model_spec
from worker_service.model.decoder import Decoder
from worker_service.model.layer_weights import ExpertWeight
from worker_service.model.page_layouts import page_layouts
from worker_service.model.runner import Runner, RunnerLimits
from worker_service.model.spec import ModelSpec
from worker_service.model.weight_formats import ExpertFormat

PAGE = 16
# Of A_log: a state keeps 98 % of itself from a token to the next, or nothing would show which one it began from.
LONG_MEMORY = -4.0
# Of the numbers of e4m3 that even bytes stand for, and of those of e2m1, each equally likely.
E4M3_DEVIATION = 103.7
E2M1_DEVIATION = 2.93


@dataclass
class PagedTokens:
    """What batch building reads of a sequence; of a STATE group that is the slots, and not its table."""

    tokens: array[int]
    tables: list[array[int]]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    num_pending: int = 0
    sample_index: int = 0
    prompt_len: int = 0
    penalty_slot: int = NO_PENALTY_SLOT
    counted_len: int = -1
    start_len: int = 0
    working: tuple[StateSlot, ...] = ()
    restore: tuple[StateSlot, ...] = ()
    snapshots: tuple[StateSlot, ...] = ()
    rolling: tuple[StateSlot, ...] = ()

    @property
    def planned_len(self) -> int:
        return len(self.tokens) + self.num_pending


class RandomTensors:
    """A source of tensors for a decoder: matrices of N(0, 1 / columns), and ones in every vector but A_log.

    Experts may be in a stored format, made there: their values have that deviation, and another distribution. Factors
    of fp8 are numbers of the dtype `factors`.
    """

    def __init__(
        self,
        generator: torch.Generator,
        dtype: torch.dtype,
        experts: ExpertFormat | None = None,
        factors: torch.dtype = torch.float32,
    ) -> None:
        self._generator = generator
        self._dtype = dtype
        self._experts = experts
        self._factors = factors

    def take(self, name: str, *shape: int, wide: bool = False) -> torch.Tensor:
        dtype = torch.float32 if wide else self._dtype
        if len(shape) == 1:
            value = LONG_MEMORY if name.endswith("A_log") else 1.0
            return torch.full(shape, value, dtype=dtype, device=self._generator.device)
        values = torch.empty(shape, dtype=dtype, device=self._generator.device)
        return values.normal_(std=shape[-1] ** -0.5, generator=self._generator)

    def take_experts(self, names: Sequence[Sequence[str]], rows: int, columns: int) -> ExpertWeight:
        return self.take_transposed_experts(names[0][0], len(names), len(names[0]) * rows, columns)

    def take_transposed_experts(self, name: str, num_experts: int, rows: int, columns: int) -> ExpertWeight:
        shape = (num_experts, rows, columns)
        if self._experts is None:
            return self.take(name, *shape)
        return self._fp8(*shape) if self._experts is Fp8Experts else self._mxfp4(*shape)

    def _fp8(self, num_experts: int, rows: int, columns: int) -> Fp8Experts:
        # Even bytes: those of NaN, 0x7f and 0xff, are odd.
        values = self._bytes(128, num_experts, rows, columns).mul_(2).view(torch.float8_e4m3fn)
        scales = torch.empty(num_experts, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK), device=values.device)
        return Fp8Experts(values, scales.fill_(columns**-0.5 / E4M3_DEVIATION).to(self._factors).float())

    def _mxfp4(self, num_experts: int, rows: int, columns: int) -> Mxfp4Experts:
        values = self._bytes(256, num_experts, rows, columns // 2)
        exponent = 127 + round(math.log2(columns**-0.5 / E2M1_DEVIATION))
        scales = torch.empty(num_experts, rows, columns // MX_BLOCK, dtype=torch.uint8, device=values.device)
        return Mxfp4Experts(values, scales.fill_(exponent))

    def _bytes(self, end: int, *shape: int) -> torch.Tensor:
        """Returns random bytes below `end`."""
        made = torch.empty(shape, dtype=torch.uint8, device=self._generator.device)
        return made.random_(0, end, generator=self._generator)

    def stored_alike(self, names: Sequence[str], rows: int, columns: int) -> bool:
        """Returns True: the shared experts of the models that are published in fp8 are in fp8, too."""
        return True

    def holds(self, name: str) -> bool:
        """Returns False: of what may be stored joined or apart, all is apart."""
        return False


class PagedModel:
    """Holds the model, its pages (random too: zeros would be read faster) and the runner.

    All groups of pages have as many; groups of states have `num_slots`, two for each sequence and one for each of its
    snapshots.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        num_pages: int,
        limits: RunnerLimits,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        num_slots: int = 8,
        experts: ExpertFormat | None = None,
        factors: torch.dtype = torch.float32,
    ) -> None:
        self.config = parse_model_spec(fields)
        self.generator = torch.Generator(device).manual_seed(0)
        self.model = Decoder(self.config, RandomTensors(self.generator, dtype, experts, factors), device)
        self.page_tokens = page_tokens_of(self.config)
        layouts = page_layouts(self.config, dtype, self.page_tokens, kv_dtype)
        self.state_groups = [group for group, layout in enumerate(layouts) if layout.kind is GroupKind.STATE]
        counts = [num_slots if layout.kind is GroupKind.STATE else num_pages for layout in layouts]
        self.pages = PagePools(layouts, counts, self.page_tokens, device)
        self._groups = self.pages.specs()
        for layer in range(len(self.config.layers)):
            for pages in self.pages.planes(layer):
                # By way of the model's type: nothing draws fp8.
                drawn = torch.empty(pages[1:].shape, dtype=dtype, device=device)
                pages[1:].copy_(drawn.normal_(generator=self.generator))
        self.runner = Runner(self.model, self.pages, device, limits)
        self._next_page = self._next_slot = 1

    def sequence(self, length: int, snapshots: Sequence[int] = ()) -> PagedTokens:
        """Returns `length` random tokens with pages and a state of their own, and a slot for each snapshot.

        `snapshots`: after how many tokens each one is taken.
        """
        tokens = torch.randint(
            0, self.config.vocab_size, (length,), generator=self.generator, device=self.generator.device
        )
        count = -(-length // self.page_tokens)
        first, self._next_page = self._next_page, self._next_page + count
        ids = array("i", range(first, first + count))
        made = PagedTokens(array("i", tokens.tolist()), [ids] * self.pages.num_groups)
        if self.state_groups:
            made.working, made.rolling = self._slots(0), self._slots(0)
            made.snapshots = tuple(slot for boundary in snapshots for slot in self._slots(boundary))
        return made

    def _slots(self, boundary: int) -> tuple[StateSlot, ...]:
        """Returns one slot in each group of states."""
        slot, self._next_slot = PageId(self._next_slot), self._next_slot + 1
        return tuple(StateSlot(group, boundary, slot) for group in self.state_groups)

    def begin(self, sequence: PagedTokens, first: int) -> None:
        """The sequence's next launch starts at `first`, from the snapshot that it left there. Raises ValueError where
        the model has states and there is none."""
        sequence.start_len = first
        sequence.restore = tuple(slot for slot in sequence.snapshots if slot.boundary_tokens == first)
        if first and self.state_groups and not sequence.restore:
            raise ValueError(f"first: the sequence has no snapshot at {first}")

    def free_pages(self) -> None:
        """Later sequences take the first pages and slots again."""
        self._next_page = self._next_slot = 1

    def batch(self, sequences: Sequence[PagedTokens], first: int, end: int | None = None) -> Batch:
        """Positions `first` .. `end` - 1 of each sequence; end None: all of it."""
        rows = [
            Row(cast(CoreSequence, entry), first, (len(entry.tokens) if end is None else end) - first)
            for entry in sequences
        ]
        num_decode = sum(row.num_tokens == 1 for row in rows)
        return build_batch(rows, num_decode, self._groups, self.page_tokens)

    def weight_bytes(self) -> int:
        """What a launch reads of the weights: every projection, the head among them."""
        return sum(linear.weight.nbytes for linear in self.model.linears())

    def kv_bytes(self, num_keys: int) -> int:
        return num_keys * self.pages.page_bytes(0) // self.page_tokens


def page_tokens_of(config: ModelSpec) -> int:
    """Returns PAGE, or the model's own pages where these are larger: snapshots and compressed entries end with them."""
    return max(config.page_tokens, PAGE)
