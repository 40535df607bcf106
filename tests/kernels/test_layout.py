"""Layouts: shapes of page tensors and back."""

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.layout import KvLayout, PageShape, page_shape, page_tensor_shapes


@pytest.mark.parametrize("layout", list(KvLayout))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_shape_survives_its_layout(dtype: torch.dtype, layout: KvLayout) -> None:
    shape = PageShape(7, 32, 3, 80)
    k_shape, v_shape = page_tensor_shapes(shape, dtype, layout)
    assert page_shape(torch.empty(k_shape, dtype=dtype), layout) == shape
    assert torch.Size(k_shape).numel() == torch.Size(v_shape).numel() == 7 * 32 * 3 * 80


def test_packing_needs_multiples_of_its_width() -> None:
    with pytest.raises(KernelArgumentError, match="page_tokens 1 must be multiples"):
        page_tensor_shapes(PageShape(2, 1, 2, 64), torch.bfloat16, KvLayout.SHUFFLE)
    with pytest.raises(KernelArgumentError, match="SHUFFLE has 5 axes"):
        page_shape(torch.empty(2, 16, 2, 64), KvLayout.SHUFFLE)
