"""The checked arguments of one rotate_append_kv call."""

from typing import NamedTuple

import torch

from kernels.fp8 import Scales
from kernels.layout import KvLayout, PageShape


class Rotary(NamedTuple):
    """A table of cosines and sines [max_positions, 2, rotary_dim / 2] and how many elements of a head it turns."""

    cos_sin: torch.Tensor
    dim: int


class HeadNorms(NamedTuple):
    """Weights of the norms of query heads and key heads."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


class RotateAppendCall(NamedTuple):
    """Named as the op names them; `shape` is that of the pages. All queries have a place in `out` or `packed_out`."""

    qkv: torch.Tensor
    positions: torch.Tensor
    rotary: Rotary
    norms: HeadNorms | None
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    slot_mapping: torch.Tensor
    scales: Scales | None
    shape: PageShape
    layout: KvLayout
    out: torch.Tensor
    packed_out: torch.Tensor
    num_unpacked: int
