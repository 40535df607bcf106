"""key_rows: whose each row of a launch is, and how many keys it sees (R18, R24, R25)."""

from __future__ import annotations

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.key_rows import key_rows


def vector(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_decode_rows_then_new_tokens_of_prompts_then_padding() -> None:
    """Cached tokens count among the keys, never among the rows; a query at offset j of c cached sees c + j + 1."""
    rows = key_rows(vector(7, 0, 30), vector(0, 2, 2, 5), vector(0, 12, 20, 23), 10)
    assert rows.sequences.tolist() == [0, 1, 2, 3, 3, 5, 5, 5, -1, -1]
    assert rows.num_keys.tolist() == [7, 0, 30, 11, 12, 1, 2, 3, 0, 0]


def test_decode_rows_alone_and_prompts_alone() -> None:
    alone = key_rows(vector(4, 5), vector(0), vector(0), 3)
    assert (alone.sequences.tolist(), alone.num_keys.tolist()) == ([0, 1, -1], [4, 5, 0])
    prompts = key_rows(vector(), vector(0, 3), vector(0, 3), 3)
    assert (prompts.sequences.tolist(), prompts.num_keys.tolist()) == ([0, 0, 0], [1, 2, 3])
    assert key_rows(vector(), vector(0), vector(0), 0).sequences.shape == (0,)


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(KernelArgumentError, match="num_rows: must be at least the 2"):
        key_rows(vector(4, 5), vector(0), vector(0), 1)
    with pytest.raises(KernelArgumentError, match="cu_seqlens_k: shape"):
        key_rows(vector(4, 5), vector(0, 1), vector(0), 3)
    with pytest.raises(KernelArgumentError, match="decode_seqlens_k: dtype"):
        key_rows(torch.tensor([4]), vector(0, 1), vector(0, 1), 3)
