"""Random weights in the shape of Llama-3-8B on a CUDA device, with pages and a runner; benchmarks share it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from worker_service.core.batch import Batch, build_batch
from worker_service.core.launch_plan import Row
from worker_service.core.sampling_params import SamplingParams
from worker_service.core.sequence import NO_SLOT
from worker_service.core.sequence import Sequence as CoreSequence
from worker_service.gpu.page_pools import PagePools
from worker_service.model.config import parse_model_spec
from worker_service.model.decoder import Decoder, expected_shapes
from worker_service.model.page_layouts import page_layouts
from worker_service.model.runner import Runner, RunnerLimits
from worker_service.model.tensors import LoadedTensors

PAGE = 16
FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}


@dataclass
class PagedTokens:
    """What batch building reads of a sequence."""

    tokens: array[int]
    tables: list[array[int]]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    num_pending: int = 0
    sample_index: int = 0
    prompt_len: int = 0
    penalty_slot: int = NO_SLOT
    counted_len: int = -1

    @property
    def planned_len(self) -> int:
        return len(self.tokens) + self.num_pending


class Llama8B:
    """Holds the model, its pages (random too: zeros would be read faster) and the runner."""

    def __init__(
        self,
        num_pages: int,
        limits: RunnerLimits,
        device: torch.device,
        num_layers: int = 32,
        kv_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.config = parse_model_spec({**FIELDS, "num_hidden_layers": num_layers})
        self.generator = torch.Generator(device).manual_seed(0)
        tensors = {name: self._weight(shape, device) for name, shape in expected_shapes(self.config).items()}
        self.model = Decoder(self.config, LoadedTensors(tensors), device)
        self.pages = PagePools(page_layouts(self.config, kv_dtype, PAGE), [num_pages], PAGE, device)
        for layer in range(num_layers):
            for pages in self.pages.layer_pages(layer).planes:
                # By way of bf16: nothing draws fp8.
                drawn = torch.empty(pages[1:].shape, dtype=torch.bfloat16, device=device)
                pages[1:].copy_(drawn.normal_(generator=self.generator))
        self.runner = Runner(self.model, self.pages, device, limits)
        self._next_page = 1

    def _weight(self, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=device)
        values = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return values.normal_(std=shape[1] ** -0.5, generator=self.generator)

    def sequence(self, length: int) -> PagedTokens:
        """Random tokens with pages of their own."""
        tokens = torch.randint(
            0, self.config.vocab_size, (length,), generator=self.generator, device=self.generator.device
        )
        count = -(-length // PAGE)
        first, self._next_page = self._next_page, self._next_page + count
        return PagedTokens(array("i", tokens.tolist()), [array("i", range(first, first + count))])

    def free_pages(self) -> None:
        """Later sequences take the first pages again."""
        self._next_page = 1

    def batch(self, sequences: Sequence[PagedTokens], first: int) -> Batch:
        """Everything from position `first` on, of each sequence."""
        rows = [Row(cast(CoreSequence, entry), first, len(entry.tokens) - first) for entry in sequences]
        num_decode = sum(row.num_tokens == 1 for row in rows)
        return build_batch(rows, num_decode, self.pages.specs(), PAGE)

    def weight_bytes(self) -> int:
        """What a launch reads of the weights: every projection, the head among them."""
        return sum(linear.weight.nbytes for linear in self.model.linears())

    def kv_bytes(self, num_keys: int) -> int:
        return num_keys * self.pages.page_bytes(0) // PAGE
