"""softcap_logits: Gemma 2's final logits, in place or not, each row's bits its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.softcap_logits import softcap_logits
from tests.kernels.compare import assert_same_bits
from tests.kernels.target import Target
from tests.kernels.test_rows import DTYPES, assert_rarely_different, rows

CAP = 30.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 100, 5000])
def test_values(target: Target, vocab: int, dtype: torch.dtype) -> None:
    """Small logits lose what 1 - exp loses: 2e-6 of a cap of 30."""
    logits = rows(3, vocab, dtype=dtype, device=target.device) * 40
    logits[0, 0], logits[1, 0], logits[2, 0] = -3e4, 3e4, 0.0
    got = softcap_logits(logits, CAP, backend=target.backend)
    wanted = (torch.tanh(logits.double() / CAP) * CAP).to(dtype)
    if dtype is torch.float32:
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=3e-6)
    else:
        assert_rarely_different(got, wanted)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_its_own_bits(target: Target, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits = rows(33, 3001, dtype=torch.float32, device=target.device)
        together = softcap_logits(logits, 2.0, backend=target.backend)
        for first, count in ((0, 1), (7, 20), (32, 1)):
            alone = softcap_logits(logits[first : first + count], 2.0, backend=target.backend)
            assert_same_bits(alone, together[first : first + count])
    finally:
        torch.set_num_threads(before)


def test_in_place_and_slices(target: Target) -> None:
    wide = rows(4, 96, device=target.device)
    wanted = softcap_logits(wide[:, 16:80], CAP, backend=target.backend)
    out = torch.full((4, 80), float("nan"), dtype=torch.bfloat16, device=target.device)[:, :64]
    assert softcap_logits(wide[:, 16:80], CAP, out=out, backend=target.backend) is out
    logits = wide[:, 16:80]
    assert softcap_logits(logits, CAP, out=logits, backend=target.backend) is logits
    assert_same_bits(out, wanted)
    assert_same_bits(wide[:, 16:80], wanted)
    assert torch.equal(wide[:, :16], rows(4, 96, device=target.device)[:, :16])


def test_no_rows(target: Target) -> None:
    empty = torch.empty(0, 64, device=target.device)
    assert softcap_logits(empty, CAP, backend=target.backend).shape == (0, 64)


X = rows(4, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cap": 0.0}, r"cap: must be positive, got 0.0"),
        ({"cap": float("nan")}, "cap: must be positive, got nan"),
        ({"logits": X[0]}, r"logits: shape must be \[any, any\], got \[64\]"),
        ({"logits": X.T}, "logits: the last axis must have stride 1"),
        ({"out": X[:, :]}, "out: shares memory with logits"),
        ({"out": X.float()}, "out: dtype must be one of"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        softcap_logits(**{"logits": X, "cap": CAP, **change})
