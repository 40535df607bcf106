"""What workers say: it arrives as it was said, and each bad field of a message is refused by its name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from protos.v1 import cache_pb2, types_pb2
from session.errors import InvalidInput, TooMany
from session.limits import MAX_SNAPSHOT_BOUNDARIES, SessionLimits
from session.messages import Ack, Acquire, Adopt, BadItem, BadRun, Extend, Hello, Publish, Rates, Release, Shrink, Step
from session.wire.hello import decode_hello, encode_hello
from session.wire.step import decode_step, encode_step
from session.words import (
    GroupKind,
    GroupPages,
    GroupSpec,
    HostTierKind,
    Namespace,
    ReleaseReason,
    StateSlot,
    TransferStatus,
    WorkerId,
)
from tests.session.messages import MODEL, full_group, full_step, hello, over_the_wire, tokens, u32, u64

LIMITS = SessionLimits(max_sequence_tokens=100, max_step_items=3)

Spoil = Callable[[Any], None]


def setting(path: str, value: Any) -> Spoil:
    """Sets one field of a message; `a[0].b` goes into the first `a`."""

    def spoil(message: Any) -> None:
        *parents, last = path.split(".")
        for parent in parents:
            name, _, index = parent.partition("[")
            message = getattr(message, name)
            message = message[int(index.rstrip("]"))] if index else message
        setattr(message, last, value)

    return spoil


def state_group(num_pages: int, interval: int = 0) -> types_pb2.GroupSpec:
    kind = types_pb2.GROUP_KIND_STATE
    return types_pb2.GroupSpec(name="state", kind=kind, num_pages=num_pages, state_interval_tokens=interval)


def unknown_field(path: str = "") -> Spoil:
    """Adds a field that this version does not know to the message, or to the one at `path` within it."""

    def spoil(message: Any) -> None:
        for part in filter(None, path.split(".")):
            name, _, index = part.partition("[")
            message = getattr(message, name)
            message = message[int(index.rstrip("]"))] if index else message
        message.MergeFromString(b"\xf8\x3f\x01")

    return spoil


def test_hello() -> None:
    message = hello()
    message.generation = 7
    message.groups.add(name="swa", kind=types_pb2.GROUP_KIND_WINDOW, num_pages=8, window_tokens=128, page_bytes=7)
    value = decode_hello(message)
    assert (value.worker_id, value.endpoint, value.incarnation) == ("w1", "127.0.0.1:7500", "first")
    assert value.fingerprint == bytes(range(32))
    assert value.groups[1] == GroupSpec("swa", GroupKind.WINDOW, 8, 7, 128)
    assert (value.model, value.generation) == (MODEL, 7)
    assert (value.host_tier, value.num_ranks, value.page_tokens) == (HostTierKind.NONE, 1, 16)


BAD_HELLOS: list[tuple[str, Spoil]] = [
    ("hello.protocol_version", setting("protocol_version", 1)),
    ("hello.protocol_version", setting("protocol_version", 3)),
    ("hello", unknown_field()),
    ("hello.groups[0]", unknown_field("groups[0]")),
    ("hello.capabilities[0]", lambda message: message.capabilities.append("tokens by carrier pigeon")),
    ("hello.model", setting("model", "")),
    ("hello.model", setting("model", "m" * 300)),
    ("hello.worker_id", setting("worker_id", "")),
    ("hello.worker_id", setting("worker_id", "x" * 300)),
    ("hello.endpoint", setting("endpoint", "x" * 300)),
    ("hello.incarnation", setting("incarnation", "")),
    ("hello.fingerprint", setting("fingerprint", b"x" * 31)),
    ("hello.page_tokens", setting("page_tokens", 0)),
    ("hello.page_tokens", setting("page_tokens", 2**31)),
    ("hello.groups", lambda message: message.ClearField("groups")),
    ("hello.groups", lambda message: message.groups.extend([full_group()] * 40)),
    ("hello.groups", lambda message: message.groups.append(full_group())),
    ("hello.groups[0].name", setting("groups[0].name", "")),
    ("hello.groups[0].kind", setting("groups[0].kind", 0)),
    ("hello.groups[0].kind", setting("groups[0].kind", 9)),
    ("hello.groups[0].num_pages", setting("groups[0].num_pages", 0)),
    ("hello.groups[0].num_pages", setting("groups[0].num_pages", 2**32 - 1)),
    ("hello.groups[0].window_tokens", setting("groups[0].window_tokens", 4)),
    ("hello.groups[0].window_tokens", setting("groups[0].kind", types_pb2.GROUP_KIND_WINDOW)),
    ("hello.groups[0].state_interval_tokens", setting("groups[0].state_interval_tokens", 16)),
    ("hello.groups[1].state_interval_tokens", lambda message: message.groups.append(state_group(8, interval=24))),
    ("hello.groups[1].num_pages", lambda message: message.groups.append(state_group(1))),
    ("hello.host_tier", setting("host_tier", 0)),
    ("hello.host_tier", setting("host_tier", 17)),
    ("hello.host_tier_id", setting("host_tier", cache_pb2.HOST_TIER_KIND_SHARED)),
    ("hello.num_ranks", setting("num_ranks", 0)),
]


@pytest.mark.parametrize(("field", "spoil"), BAD_HELLOS)
def test_a_bad_hello_names_its_field(field: str, spoil: Spoil) -> None:
    message = hello()
    spoil(message)
    with pytest.raises(InvalidInput) as caught:
        decode_hello(message)
    assert caught.value.field == field


def test_step() -> None:
    value = decode_step(full_step(), LIMITS)
    assert value.step_id == 1
    assert value.acks == (Ack(1, 1, TransferStatus.DONE, 9, 0.5),)  # type: ignore[arg-type]
    assert value.publishes == (Publish(7, tokens(16), 16),)  # type: ignore[arg-type]
    assert value.releases == (Release(8, ReleaseReason.FINISHED),)  # type: ignore[arg-type]
    assert value.extends == (Extend(7, 20), Extend(9, 40))  # type: ignore[arg-type]
    assert value.acquires == (Acquire(10, Namespace(MODEL), tokens(40), 0, 40, 0),)  # type: ignore[arg-type]
    assert value.shrinks == (Shrink(7, 24), Shrink(9, 48))  # type: ignore[arg-type]
    assert value.rates == Rates(100.0, 1e9, 2e9)


def test_an_empty_step_is_a_step() -> None:
    value = decode_step(cache_pb2.Step(step_id=3), LIMITS)
    assert (value.acks, value.extends, value.acquires, value.rates) == ((), (), (), None)


def leaving(*sequence_ids: int) -> Spoil:
    def spoil(message: Any) -> None:
        for sequence_id in sequence_ids:
            message.extends.leave_at.add(sequence_id=sequence_id, boundary_tokens=[16])

    return spoil


BAD_STEPS: list[tuple[str, Spoil]] = [
    ("step.step_id", setting("step_id", 0)),
    ("step.acks[0].status", setting("acks[0].status", 0)),
    ("step.acks[0].status", setting("acks[0].status", 99)),
    ("step.acks[0].seconds", setting("acks[0].seconds", -1.0)),
    ("step.acks[0].seconds", setting("acks[0].seconds", math.nan)),
    ("step.acks[0].seconds", setting("acks[0].seconds", math.inf)),
    ("step.extends.sequence_ids", setting("extends.sequence_ids", b"x" * 12)),
    ("step.extends.num_tokens", setting("extends.num_tokens", u32([1]))),
    ("step.extends.num_tokens", setting("extends.num_tokens", b"x" * 7)),
    ("step.shrinks.sequence_ids", setting("shrinks.sequence_ids", b"x" * 12)),
    ("step.shrinks.num_tokens", setting("shrinks.num_tokens", u32([1]))),
    ("step.extends.leave_at.sequence_id", leaving(8)),
    ("step.extends.leave_at.sequence_id", leaving(7, 7)),
    ("step.rates.prefill_tokens_per_s", setting("rates.prefill_tokens_per_s", -0.1)),
    ("step.rates.fetch_bytes_per_s", setting("rates.fetch_bytes_per_s", math.nan)),
    ("step.rates.spill_bytes_per_s", setting("rates.spill_bytes_per_s", -1.0)),
]


@pytest.mark.parametrize(("field", "spoil"), BAD_STEPS)
def test_a_bad_step_names_its_field(field: str, spoil: Spoil) -> None:
    """What belongs to no item ends the stream."""
    message = full_step()
    spoil(message)
    with pytest.raises(InvalidInput) as caught:
        decode_step(message, LIMITS)
    assert caught.value.field == field


# The name of the items, and the field within the item.
BAD_ITEMS: list[tuple[str, str, Spoil]] = [
    ("publishes", "tokens", setting("publishes[0].tokens", b"abc")),
    ("publishes", "tokens", setting("publishes[0].tokens", tokens(101))),
    ("releases", "reason", setting("releases[0].reason", 0)),
    ("releases", "reason", setting("releases[0].reason", -5)),
    ("acquires", "", unknown_field("acquires[0]")),
    ("acquires", "namespace", lambda message: message.acquires[0].ClearField("namespace")),
    ("acquires", "namespace", unknown_field("acquires[0].namespace")),
    ("acquires", "namespace.model", setting("acquires[0].namespace.model", "")),
    ("acquires", "namespace.salt", setting("acquires[0].namespace.salt", "s" * 300)),
    ("acquires", "namespace.adapter", setting("acquires[0].namespace.adapter", "a" * 300)),
    ("acquires", "tokens", setting("acquires[0].tokens", b"")),
    ("acquires", "tokens", setting("acquires[0].tokens", b"12345")),
    ("acquires", "tokens", setting("acquires[0].tokens", tokens(101))),
    ("adopts", "", unknown_field("adopts[0]")),
    ("adopts", "namespace", lambda message: message.adopts[0].ClearField("namespace")),
    ("adopts", "namespace", unknown_field("adopts[0].namespace")),
    ("adopts", "tokens", setting("adopts[0].tokens", b"")),
    ("adopts", "tokens", setting("adopts[0].tokens", b"123")),
    ("adopts", "tables[0].group", setting("adopts[0].tables[0].group", 77)),
    ("adopts", "tables[0].page_ids", setting("adopts[0].tables[0].page_ids", b"12345")),
    ("adopts", "tables", lambda message: message.adopts[0].tables.append(message.adopts[0].tables[0])),
    ("adopts", "tables", lambda message: message.adopts[0].tables.extend([message.adopts[0].tables[0]] * 40)),
    ("adopts", "working", lambda message: message.adopts[0].working.extend([message.adopts[0].working[0]] * 40)),
    ("adopts", "working[0].group", setting("adopts[0].working[0].group", 32)),
    ("adopts", "rolling[0].group", setting("adopts[0].rolling[0].group", 2**32 - 1)),
]


@pytest.mark.parametrize(("name", "field", "spoil"), BAD_ITEMS)
def test_a_bad_item_keeps_its_place(name: str, field: str, spoil: Spoil) -> None:
    """The first of two is bad, the other is as good as before, and so is all else."""
    message = full_step()
    getattr(message, name).append(getattr(message, name)[0])
    good = decode_step(message, LIMITS)
    spoil(message)
    value = decode_step(message, LIMITS)
    bad, second = getattr(value, name)
    assert isinstance(bad, BadItem)
    assert (bad.sequence_id, bad.field) == (second.sequence_id, field)
    assert bad.reason
    assert value == good._replace(**{name: (bad, getattr(good, name)[1])})


BAD_RUNS: list[tuple[str, Spoil]] = [
    ("", unknown_field("inventory.runs[0]")),
    ("namespace", lambda message: message.inventory.runs[0].ClearField("namespace")),
    ("namespace", setting("inventory.runs[0].parent_run", 1)),
    ("namespace", unknown_field("inventory.runs[0].namespace")),
    ("namespace.salt", setting("inventory.runs[0].namespace.salt", "s" * 300)),
    ("tokens", setting("inventory.runs[0].tokens", b"")),
    ("tokens", setting("inventory.runs[0].tokens", b"12345")),
    ("tokens", setting("inventory.runs[0].tokens", tokens(101))),
    ("page_ids", lambda message: message.inventory.runs[0].page_ids.extend([b""] * 40)),
    ("page_ids[0]", lambda message: message.inventory.runs[0].page_ids.insert(0, b"123")),
]


@pytest.mark.parametrize(("field", "spoil"), BAD_RUNS)
def test_a_bad_run_keeps_its_place(field: str, spoil: Spoil) -> None:
    message = full_step()
    message.inventory.runs.append(message.inventory.runs[0])
    good = decode_step(message, LIMITS)
    spoil(message)
    value = decode_step(message, LIMITS)
    assert value.inventory is not None and good.inventory is not None
    bad, second = value.inventory.runs
    assert isinstance(bad, BadRun)
    assert (bad.run, bad.field) == (1, field)
    assert bad.reason
    assert second == good.inventory.runs[1]
    assert value._replace(inventory=None) == good._replace(inventory=None)


def test_an_inventory_of_too_many_runs_is_too_much() -> None:
    message = full_step()
    message.inventory.runs.extend([message.inventory.runs[0]] * LIMITS.max_step_items)
    with pytest.raises(TooMany) as caught:
        decode_step(message, LIMITS)
    assert caught.value.field == "step.inventory.runs"


@pytest.mark.parametrize("field", ["acks", "publishes", "releases", "adopts", "acquires"])
def test_a_step_of_too_many_items_is_too_much(field: str) -> None:
    message = full_step()
    items = getattr(message, field)
    items.extend([items[0]] * LIMITS.max_step_items)
    with pytest.raises(TooMany) as caught:
        decode_step(message, LIMITS)
    assert caught.value.field == f"step.{field}"


def test_too_many_extends_are_too_much() -> None:
    message = full_step()
    message.extends.sequence_ids, message.extends.num_tokens = u64(range(4)), u32(range(4))
    with pytest.raises(TooMany, match=r"step\.extends\.sequence_ids"):
        decode_step(message, LIMITS)


def test_too_many_branches_are_too_much() -> None:
    """Of an extend they end the stream, as its packed arrays do; an acquire is refused alone."""
    many = [16 * at for at in range(1, MAX_SNAPSHOT_BOUNDARIES + 2)]
    message = full_step()
    message.extends.leave_at.add(sequence_id=7, boundary_tokens=many)
    with pytest.raises(TooMany, match=r"step\.extends\.leave_at\.boundary_tokens"):
        decode_step(message, LIMITS)
    message = full_step()
    message.acquires[0].leave_at.extend(many)
    (item,) = decode_step(message, LIMITS).acquires
    assert isinstance(item, BadItem) and item.field == "leave_at"


def test_kept_tokens_stand_for_tokens() -> None:
    message = full_step()
    message.acquires[0].tokens, message.acquires[0].kept_tokens = b"", 40
    message.acquires[0].bypass_cache = True
    (value,) = decode_step(message, LIMITS).acquires
    assert value == Acquire(10, Namespace(MODEL), b"", 0, 40, 0, 40, True)  # type: ignore[arg-type]


def test_adopt() -> None:
    (value,) = decode_step(full_step(), LIMITS).adopts
    assert value == Adopt(
        5,  # type: ignore[arg-type]
        Namespace(MODEL),
        tokens(20),
        18,
        (GroupPages(0, 0, u32([3, 4])),),
        (StateSlot(1, 0, 2),),  # type: ignore[arg-type]
        (StateSlot(1, 16, 3),),  # type: ignore[arg-type]
        -1,
    )


HELLO = Hello(
    WorkerId("w1"),
    "127.0.0.1:7500",
    "first",
    bytes(range(32)),
    16,
    (
        GroupSpec("full", GroupKind.FULL, 8, 7),
        GroupSpec("swa", GroupKind.WINDOW, 6, 5, 128),
        GroupSpec("state", GroupKind.STATE, 4, 3, state_interval_tokens=32),
    ),
    HostTierKind.SHARED,
    "tier",
    num_ranks=2,
    model=MODEL,
    generation=2**63,
    capabilities=("inventory",),
    started_ns=2**64 - 1,
)


def test_a_hello_arrives_as_it_was_said() -> None:
    assert decode_hello(over_the_wire(encode_hello(HELLO)).hello) == HELLO


def test_a_step_arrives_as_it_was_said() -> None:
    said = decode_step(full_step(), LIMITS)
    assert all(said), "one of everything"
    assert decode_step(over_the_wire(encode_step(said)).step, LIMITS) == said
    assert decode_step(over_the_wire(encode_step(Step(3))).step, LIMITS) == Step(3)
    extends = tuple(
        extend._replace(leave_at=leave_at) for extend, leave_at in zip(said.extends, ((), (16, 48)), strict=True)
    )
    acquires = tuple(item._replace(leave_at=(32,)) for item in said.acquires if isinstance(item, Acquire))
    said = said._replace(extends=extends, acquires=acquires)
    assert decode_step(over_the_wire(encode_step(said)).step, LIMITS) == said
