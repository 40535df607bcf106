"""A model folder's config.json as a ModelSpec: read by the family that `architectures` names, and checked once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from worker_service.model.families import family_of
from worker_service.model.families.common import architecture_of
from worker_service.model.fields import Fields, check_repeats, eos_token_ids, merged, read_json
from worker_service.model.spec import ModelSpec, with_max_model_len
from worker_service.model.weight_formats import read_weight_format


def read_model_spec(folder: Path) -> ModelSpec:
    fields = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    return parse_model_spec(fields, read_json(generation) if generation.is_file() else {})


def parse_model_spec(top_fields: Fields, generation: Fields | None = None) -> ModelSpec:
    """Returns the checked spec.

    A multimodal wrapper has the language model's fields in `text_config`; the top level wins.
    """
    architecture = architecture_of(top_fields)
    family = family_of(architecture)
    fields = {**family.defaults, **merged(top_fields)}
    check_repeats(fields)
    weight_format = read_weight_format(fields, family.weight_formats, architecture)
    spec = replace(
        family.read_spec(fields),
        eos_token_ids=eos_token_ids(fields, generation or {}),
        page_tokens=family.page_tokens,
        weight_format=weight_format,
    )
    return with_max_model_len(spec, spec.max_model_len)
