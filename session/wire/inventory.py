"""A slice of a worker's inventory in a Step. A run that is malformed is decoded to a BadRun in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from protos.v1 import cache_pb2
from session.errors import FieldError, InvalidInput
from session.limits import MAX_GROUPS
from session.messages import BadRun, CachedRun, Inventory
from session.wire import fields
from session.wire.parts import encode_namespace, required_namespace
from session.words import PAGE_ID_BYTES


def fill_inventory(message: cache_pb2.Inventory, value: Inventory) -> None:
    message.is_complete = value.is_complete
    message.SetInParent()
    # Only decoding makes a BadRun: an inventory that is sent has none.
    for run in cast(Sequence[CachedRun], value.runs):
        item = message.runs.add(run=run.run, parent_run=run.parent_run, tokens=run.tokens, page_ids=run.page_ids)
        if run.namespace is not None:
            item.namespace.CopyFrom(encode_namespace(run.namespace))


def decode_inventory(message: cache_pb2.Inventory, most: int, most_tokens: int) -> Inventory:
    """Returns at most `most` runs of at most `most_tokens` tokens each. Raises TooMany for more runs."""
    fields.at_most(len(message.runs), "step.inventory.runs", most)
    runs: list[CachedRun | BadRun] = []
    for item in message.runs:
        try:
            runs.append(_run(item, most_tokens))
        except FieldError as error:
            runs.append(BadRun(item.run, error.field, error.reason))
    return Inventory(tuple(runs), message.is_complete)


def _run(message: cache_pb2.CachedRun, most_tokens: int) -> CachedRun:
    fields.nothing_unknown(message, "")
    if message.parent_run and message.HasField("namespace"):
        raise InvalidInput("namespace", "is that of the parent run")
    fields.at_most(len(message.page_ids), "page_ids", MAX_GROUPS)
    for i, page_ids in enumerate(message.page_ids):
        fields.packed(page_ids, f"page_ids[{i}]", PAGE_ID_BYTES)
    return CachedRun(
        message.run,
        message.parent_run,
        None if message.parent_run else required_namespace(message, "namespace"),
        fields.tokens(message.tokens, "tokens", most_tokens, required=True),
        tuple(message.page_ids),
    )
