"""What pages of published models with latents, index keys or compressed entries hold, by formulas of their papers."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

from session.words import GroupKind
from tests.worker_service.published_configs import PUBLISHED
from worker_service.core.errors import ModelError
from worker_service.gpu.group_layout import GroupLayout
from worker_service.model.config import parse_model_spec
from worker_service.model.families import family_of
from worker_service.model.page_layouts import page_layouts

BF16_BYTES = 2
FLASH, PRO = "deepseek-ai/DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Pro"
Fields = dict[str, Any]


def pages_of(fields: Fields) -> tuple[int, tuple[GroupLayout, ...]]:
    """The tokens of a page where nobody asks for another number, and the groups of such pages."""
    spec = parse_model_spec(fields)
    page_tokens = family_of(spec.architecture).page_tokens
    return page_tokens, page_layouts(spec, torch.bfloat16, page_tokens)


def bytes_per_token(page_tokens: int, layouts: tuple[GroupLayout, ...]) -> dict[str, Fraction]:
    return {layout.name: Fraction(layout.page_bytes, page_tokens) for layout in layouts}


def v4_bytes(fields: Fields) -> dict[str, Fraction]:
    """One entry of 4 or 128 tokens, with an index key where it is of 4; a window row in each layer; raw rows with
    values and gates, twice where blocks overlap."""
    ratios = fields["compress_ratios"][: fields["num_hidden_layers"]]
    num_sparse, num_heavy = ratios.count(4), ratios.count(128)
    entry, key = fields["head_dim"], fields["index_head_dim"]
    elements = {
        "entries4": Fraction(num_sparse * (entry + key), 4),
        "entries128": Fraction(num_heavy * entry, 128),
        "window1": Fraction(num_heavy * 2 * entry),
        "window8": Fraction(num_sparse * 2 * 2 * (entry + key)),
        "window128": Fraction(len(ratios) * entry),
    }
    return {name: count * BF16_BYTES for name, count in elements.items()}


@pytest.mark.parametrize(("name", "counts"), [(FLASH, (2, 21, 20)), (PRO, (0, 30, 31))])
def test_deepseek_v4s_pages(name: str, counts: tuple[int, int, int]) -> None:
    """Pages of 128 tokens, of whole blocks of each ratio; windows of 8 tokens and 1 for raw rows."""
    fields = PUBLISHED[name]
    ratios = fields["compress_ratios"][: fields["num_hidden_layers"]]
    assert tuple(ratios.count(ratio) for ratio in (0, 4, 128)) == counts
    page_tokens, layouts = pages_of(fields)
    assert page_tokens == 128
    assert [(layout.name, layout.kind, layout.window_tokens) for layout in layouts] == [
        ("entries4", GroupKind.FULL, 0),
        ("entries128", GroupKind.FULL, 0),
        ("window1", GroupKind.WINDOW, 1),
        ("window8", GroupKind.WINDOW, 8),
        ("window128", GroupKind.WINDOW, 128),
    ]
    sparse, heavy = (tuple(layer for layer, made in enumerate(ratios) if made == ratio) for ratio in (4, 128))
    every = tuple(range(len(ratios)))
    assert [layout.layers for layout in layouts] == [sparse, heavy, heavy, sparse, every]
    assert bytes_per_token(page_tokens, layouts) == v4_bytes(fields)


def test_deepseek_v4_flash_in_figures() -> None:
    """Those of ADR 30."""
    made = bytes_per_token(*pages_of(PUBLISHED[FLASH]))
    assert made["entries4"] + made["entries128"] == 6_880
    assert (made["window128"], made["window8"], made["window1"]) == (44_032, 107_520, 40_960)


@pytest.mark.parametrize("page_tokens", [16, 64, 192])
def test_deepseek_v4_refuses_pages_that_cut_a_block(page_tokens: int) -> None:
    with pytest.raises(ModelError, match=f"{page_tokens} is no multiple of 128") as caught:
        page_layouts(parse_model_spec(PUBLISHED[FLASH]), torch.bfloat16, page_tokens)
    assert caught.value.field == "page_tokens"


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V3.2-Exp", "zai-org/GLM-5", "GLM-5 with shared choices"])
def test_sparse_latents_pages(name: str) -> None:
    """A latent with its rotated part in each layer; an index key in each layer that chooses for itself."""
    fields = PUBLISHED[name]
    page_tokens, layouts = pages_of(fields)
    latent = fields["kv_lora_rank"] + fields["qk_rope_head_dim"]
    choosing = fields.get("indexer_types", ["full"] * fields["num_hidden_layers"]).count("full")
    made = bytes_per_token(page_tokens, layouts)
    elements = fields["num_hidden_layers"] * latent + choosing * fields["index_head_dim"]
    assert (page_tokens, sum(made.values())) == (16, elements * BF16_BYTES)
    assert {layout.kind for layout in layouts} == {GroupKind.FULL}
    shares = choosing < fields["num_hidden_layers"]
    assert list(made) == (["full-576", "full-576+128"] if shares else ["full"])


@pytest.mark.parametrize("name", [FLASH, "deepseek-ai/DeepSeek-V3.2-Exp", "zai-org/GLM-5"])
def test_the_architecture_says_which_family_it_is(name: str) -> None:
    """R39: `model_type` may be another family's."""
    fields = PUBLISHED[name]
    assert parse_model_spec({**fields, "model_type": "deepseek_v3"}) == parse_model_spec(fields)
