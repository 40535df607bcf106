"""Layouts and the one mapping from logical blocks to kernel pages."""

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.layout import KvLayout, PageShape, expand_block_tables, page_shape, page_tensor_shapes


def test_block_of_256_tokens_as_16_pages() -> None:
    """Logical block 3 is pages 48 to 63, once; block 0, the hole, stays within the reserved pages."""
    assert expand_block_tables(torch.tensor([[3]], dtype=torch.int32), 16).tolist() == [list(range(48, 64))]
    tables = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    expanded = expand_block_tables(tables, 2)
    assert expanded.tolist() == [[6, 7, 0, 1], [2, 3, 4, 5]]
    assert expanded.dtype is torch.int32
    assert torch.equal(expand_block_tables(tables, 1), tables)
    with pytest.raises(KernelArgumentError, match="block_ratio must be at least 1, got 0"):
        expand_block_tables(tables, 0)


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
