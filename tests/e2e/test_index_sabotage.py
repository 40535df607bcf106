"""Index keys are replaced by those of another prefix, their latents left as they are: the text must differ.

So it is the indexer that chooses what the answers of tests/e2e/test_kinds.py depend on, from cached keys too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from tests.e2e.client import Client
from tests.e2e.conftest import Starter
from tests.e2e.kinds import make_kind
from tests.e2e.running import Draw
from tests.e2e.sabotage import Stand, open_stand
from tests.e2e.test_kinds_sabotage import Prefix
from worker_service.gpu.page_pools import PagePools

NAME = "deepseek-v32"
GROUP = 0


@pytest.fixture(params=["auto", "fp8_e4m3"])
async def stand(
    request: pytest.FixtureRequest, start: Starter, client: Client, model: Path, tmp_path: Path
) -> AsyncIterator[Stand]:
    folder = tmp_path / "kind"
    make_kind(NAME, folder, model / "tokenizer.json")
    async with open_stand(client, start.cache().address, folder, index_key_dtype=request.param) as opened:
        yield opened


def index_bytes(pages: PagePools, dim: int = 16) -> slice:
    """Returns where the index keys of all layers, and their scales, lie in a page's bytes: behind the latents."""
    layout = pages.layouts[GROUP]
    latents, index, *_ = layout.tensors
    assert index.page_shape[-1] == dim, "not the indexer's keys"
    return slice(len(layout.layers) * latents.layer_bytes, layout.page_bytes)


async def test_index_keys_of_another_prefix_change_the_text(stand: Stand, draw: Draw) -> None:
    prefix, other = Prefix(stand, draw), Prefix(stand, draw)
    await prefix.compute()
    await other.compute()
    sound = await prefix.ask()
    assert sound == await prefix.ask_cold()
    ids, others = prefix.page_ids[GROUP], other.page_ids[GROUP]
    kept = stand.pages.read_pages(GROUP, ids).clone()
    wrong = kept.clone()
    where = index_bytes(stand.pages)
    wrong[:, where] = stand.pages.read_pages(GROUP, others)[:, where]
    assert torch.equal(wrong[:, : where.start], kept[:, : where.start]), "latents were changed"
    middle = prefix.num_pages // 2
    for chosen in (slice(0, prefix.num_pages), slice(middle, middle + 2)):
        stand.pages.write_pages(GROUP, ids[chosen], wrong[chosen])
        assert await prefix.ask() != sound, f"pages {chosen}"
        stand.pages.write_pages(GROUP, ids[chosen], kept[chosen])
    # It was the damage, and it is undone.
    assert await prefix.ask() == sound
