"""Fields of a config.json, read one by one: a wrong one raises a ModelError that names it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker_service.core.errors import ModelError

Fields = Mapping[str, Any]

# Sizes and positions are int32 on the device; products of other numbers with them stay finite.
MOST_WHOLE, MOST_NUMBER = 2**31 - 1, 1e18
# Of layers, or of a layer's experts: many times as many as any published model has. The names of the tensors of 5,000
# layers took 5 s before the first one was found missing.
MOST_REPEATS = 4096
_REPEATED = (
    "num_hidden_layers",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_nextn_predict_layers",
    "num_mtp_layers",
)


def read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(path.name, f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelError(path.name, f"is not JSON ({error})") from error
    except RecursionError:
        raise ModelError(path.name, "has objects or arrays within each other, too many to read") from None
    if not isinstance(fields, dict):
        raise ModelError(path.name, "must be a JSON object")
    return fields


def merged(fields: Fields) -> Fields:
    """Returns the top level's fields over those of `text_config`; a null counts only where the nested config has
    none."""
    nested = fields.get("text_config")
    if not isinstance(nested, dict):
        return fields
    said = {name: value for name, value in fields.items() if value is not None or nested.get(name) is None}
    return {**nested, **said}


def check_repeats(fields: Fields) -> None:
    """Raises ModelError where there are more layers or experts than can be real."""
    for name in _REPEATED:
        value = fields.get(name)
        if isinstance(value, int) and value > MOST_REPEATS:
            raise ModelError(name, f"{value} is not supported; up to {MOST_REPEATS} are")


def whole(fields: Fields, name: str, default: int | None = None, least: int = 1, most: int = MOST_WHOLE) -> int:
    value = fields.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ModelError(name, f"must be a whole number of at least {least}, not {value!r}")
    if value > most:
        raise ModelError(name, f"{value} is not supported; {least} to {most} are")
    return value


def first_of(fields: Fields, *names: str) -> str:
    """Returns the first of a field's names that has a value; the first one where none has."""
    return next((name for name in names if fields.get(name) is not None), names[0])


def number(fields: Fields, name: str, default: float | None = None) -> float:
    value = fields.get(name)
    if value is None:
        value = default
    # In this form NaN is refused, too.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST_NUMBER:
        raise ModelError(name, f"must be a number above 0 and up to {MOST_NUMBER:g}, not {value!r}")
    return float(value)


def flag(fields: Fields, name: str, default: bool = False) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(name, f"must be true or false, not {value!r}")
    return value


def one_of(fields: Fields, name: str, known: Mapping[str, Any], default: str) -> Any:
    """Returns what `known` has for the field's value."""
    value = fields.get(name)
    value = default if value is None else value
    if not _is_one_of(value, known):
        raise ModelError(name, f"{value!r} is not supported; {', '.join(map(repr, known))} {_verb(known)}")
    return known[value]


def _is_one_of(value: object, known: Mapping[str, Any]) -> bool:
    return isinstance(value, str) and value in known


def _verb(known: Mapping[str, Any]) -> str:
    return "is" if len(known) == 1 else "are"


def layer_types(
    fields: Fields, num_layers: int, known: Mapping[str, Any], name: str = "layer_types"
) -> list[Any] | None:
    """Returns what `known` has for each layer's kind; None where the field is missing."""
    kinds = fields.get(name)
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(_is_one_of(kind, known) for kind in kinds):
        raise ModelError(name, f"must name {' or '.join(known)} for each of the {num_layers} layers")
    return [known[kind] for kind in kinds]


def layers_by_index(fields: Fields, num_layers: int, name: str) -> list[bool] | None:
    """Returns for each layer whether the field's list has its number; None where the field is missing."""
    indices = fields.get(name)
    if indices is None:
        return None
    if not isinstance(indices, list) or not all(type(index) is int and 0 <= index < num_layers for index in indices):
        raise ModelError(name, f"must be numbers of layers below {num_layers}, not {indices!r}")
    return [layer in indices for layer in range(num_layers)]


def eos_token_ids(fields: Fields, generation: Fields) -> tuple[int, ...]:
    """Returns the generation config's ids, else the config's; a null counts as missing."""
    value = generation.get("eos_token_id")
    if value is None:
        value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
        raise ModelError("eos_token_id", f"must be token ids, not {value!r}")
    return tuple(ids)
