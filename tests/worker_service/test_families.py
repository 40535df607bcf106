"""What the families state of themselves holds for the models that tests build of them."""

from __future__ import annotations

import pytest
import torch

from session.words import GroupKind
from tests.worker_service.model_kit import MODELS, make_config
from tests.worker_service.published_configs import PUBLISHED
from tests.worker_service.published_mamba2 import PUBLISHED_MAMBA2
from worker_service.model.config import parse_model_spec
from worker_service.model.families import BY_ARCHITECTURE, FAMILIES
from worker_service.model.families.family import Family
from worker_service.model.page_layouts import page_layouts
from worker_service.model.spec import ModelSpec
from worker_service.model.weight_formats import PLAIN, QUANTISED


@pytest.fixture(scope="module")
def specs() -> list[ModelSpec]:
    return [parse_model_spec(make_config(name).to_dict()) for name in MODELS]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.architectures[0]))
def test_its_kinds_are_those_of_its_models_groups(family: Family, specs: list[ModelSpec]) -> None:
    """No more and no fewer: each stated kind has a model that needs it."""
    kinds: set[GroupKind] = set()
    for spec in specs:
        if spec.architecture in family.architectures:
            assert spec.page_tokens == family.page_tokens
            kinds |= {layout.kind for layout in page_layouts(spec, torch.float32, spec.page_tokens)}
    assert kinds == set(family.kinds)


def test_each_has_a_published_config() -> None:
    """Those of the tables are held against transformers' config classes."""
    published = {name for fields in (PUBLISHED | PUBLISHED_MAMBA2).values() for name in fields["architectures"]}
    without = [family.architectures for family in FAMILIES if not published & set(family.architectures)]
    assert not without, without


def test_no_architecture_has_two_families_and_no_format_is_unknown() -> None:
    assert len(BY_ARCHITECTURE) == sum(len(family.architectures) for family in FAMILIES)
    for family in FAMILIES:
        assert {PLAIN} <= set(family.weight_formats) <= {PLAIN, *QUANTISED}
