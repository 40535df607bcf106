"""Messages of the protocol as values for `--json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from google.protobuf.message import Message


def to_dict(message: Message) -> dict[str, object]:
    """Returns a message as JSON-ready values: numbers stay numbers (protobuf's own JSON makes large ones strings)."""
    made: dict[str, object] = {}
    for one in message.DESCRIPTOR.fields:
        value = getattr(message, one.name)
        if one.has_presence and not message.HasField(one.name):
            continue
        enum = one.enum_type.values_by_number if one.enum_type else {}
        made[one.name] = _json_value(value, {number: known.name for number, known in enum.items()})
    return made


def _json_value(value: object, enum_names: Mapping[int, str]) -> object:
    if isinstance(value, Message):
        return to_dict(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_json_value(item, enum_names) for item in value]
    return enum_names.get(value, value) if isinstance(value, int) else value
