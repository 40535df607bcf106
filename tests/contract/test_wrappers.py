"""What the memory tier and the wrappers do beyond the contract."""

from __future__ import annotations

import platform

import pytest

from tests.faulty_tier import FaultPlan, FaultyTier
from tier_client.errors import HostTierError
from worker_service.host_tier import memory
from worker_service.host_tier.allocator import keep_freed_blocks
from worker_service.host_tier.memory import MemoryTier
from worker_service.host_tier.metered import Measure, MeteredTier


def test_memory_drops_the_least_recently_used() -> None:
    tier = MemoryTier(300)
    tier.put([b"a", b"b", b"c"], [[bytes(100)]] * 3)
    tier.get([b"a"], 100)
    tier.put([b"d"], [[bytes(150)]])
    assert [value is not None for value in tier.get([b"a", b"b", b"c", b"d"], 200)] == [True, False, False, True]
    assert tier.num_bytes == 250


def kept(tier: MemoryTier) -> bytes:
    return b"".join(tier._values)


def test_memory_drops_the_last_of_those_together_first() -> None:
    """A prompt's later pages cannot be used without its first ones, so they are dropped first."""
    tier = MemoryTier(6)
    tier.put([b"a", b"b", b"c"], [[b"x"]] * 3)
    tier.put([b"d", b"e", b"f"], [[b"x"]] * 3)
    tier.put([b"g"], [[b"x"]])
    assert kept(tier) == b"bafedg"
    tier.get([b"a", b"b", b"c"], 1)
    assert kept(tier) == b"fedgba"
    tier.put([b"h", b"i"], [[b"xx"]] * 2)
    assert kept(tier) == b"baih"
    tier.put([b"j", b"k", b"l"], [[bytes(3)]] * 3)
    assert kept(tier) == b"kj"


def in_fours(tier: MemoryTier, name: str, num_pages: int) -> None:
    """Puts a prompt's pages, four at a time, each of one byte."""
    keys = [name.encode() + bytes([page]) for page in range(num_pages)]
    tier.note_needs(zip(keys[1:], keys, strict=False))
    for first in range(0, num_pages, 4):
        tier.put(keys[first : first + 4], [[b"x"]] * len(keys[first : first + 4]))


def pages_left(tier: MemoryTier, name: str) -> list[int]:
    return sorted(key[1] for key in tier._values if key[:1] == name.encode())


@pytest.mark.parametrize("num_other", [0, 3, 8, 20])
def test_of_a_prompt_in_several_batches_memory_keeps_the_beginning(num_other: int) -> None:
    tier = MemoryTier(24)
    in_fours(tier, "a", 16)
    in_fours(tier, "b", 4)
    in_fours(tier, "c", num_other)
    assert pages_left(tier, "a") == list(range(min(16, 20 - num_other)))
    assert pages_left(tier, "b") == list(range(4)) and pages_left(tier, "c") == list(range(num_other))


def test_what_a_later_part_of_a_prompt_needs_is_used_with_it() -> None:
    tier = MemoryTier(24)
    in_fours(tier, "a", 16)
    in_fours(tier, "b", 8)
    tier.get([b"a\x0f"], 1)
    in_fours(tier, "c", 6)
    assert (pages_left(tier, "a"), pages_left(tier, "b")) == (list(range(16)), [0, 1])


def test_of_a_prompt_that_is_longer_than_the_memory_the_beginning_stays() -> None:
    tier = MemoryTier(10)
    in_fours(tier, "a", 30)
    assert pages_left(tier, "a") == list(range(10))
    assert tier.num_bytes == 10


def test_what_absent_values_need_is_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_ABSENT", 8)
    tier = MemoryTier(4)
    for name in "abcdefgh":
        in_fours(tier, name, 4)
        tier.note_needs([(f"never {name} {number}".encode(), b"came") for number in range(4)])
        assert len(tier._needs) <= 4 + 8 + 4
    tier.note_needs([(b"a", b"b"), (b"b", b"a")])
    tier.put([b"a"], [[b"x"]])  # ends, though nothing needs what needs it
    tier.flush()
    assert not tier._needs


def test_memory_counts_a_replaced_value_once() -> None:
    tier = MemoryTier(300)
    for size in (100, 200, 50):
        tier.put([b"k"], [[bytes(size)]])
        assert tier.num_bytes == size


def test_memory_keeps_what_it_had_when_a_value_cannot_fit() -> None:
    tier = MemoryTier(300)
    assert tier.put([b"a", b"b", b"c"], [[b"x"], [bytes(301)], [b"y"]]) == 1
    assert tier.get([b"a", b"b", b"c"], 400) == [b"x", None, None]


def test_memory_without_room_takes_nothing() -> None:
    assert MemoryTier(0).put([b"a"], [[b"x"]]) == 0
    with pytest.raises(ValueError, match="capacity_bytes"):
        MemoryTier(-1)


def test_metered_tells_what_was_moved() -> None:
    measures: list[Measure] = []
    tier = MeteredTier(MemoryTier(10), measures.append)
    tier.put([b"a", b"b"], [[b"head", b"er"], [bytes(11)]])
    tier.get([b"a", b"x"], 10)
    assert measures == [Measure("put", 6), Measure("get", 6)]


def test_metered_counts_a_value_in_parts_once() -> None:
    measures: list[Measure] = []
    tier = MeteredTier(MemoryTier(10), measures.append)
    tier.put_parts(b"a", [[b"head", b"er"], [b"x"]])
    tier.put_parts(b"b", [[bytes(8)], [bytes(8)]])
    list(tier.get_parts(b"a", 2, 10))
    list(tier.get_parts(b"a", 3, 10))
    assert measures == [Measure("put", 7), Measure("put", 0), Measure("get", 7), Measure("get", 7)]
    tier = MeteredTier(FaultyTier(MemoryTier(10), FaultPlan(fail=1.0)), measures.append)
    for parts in (lambda: tier.put_parts(b"a", [[b"v"]]), lambda: list(tier.get_parts(b"a", 2, 10))):
        with pytest.raises(HostTierError, match="planned"):
            parts()
        assert measures[-1].failed and not measures[-1].num_bytes


def test_metered_tells_failures_and_passes_them_on() -> None:
    measures: list[Measure] = []
    tier = MeteredTier(FaultyTier(MemoryTier(10), FaultPlan(fail=1.0)), measures.append)
    with pytest.raises(HostTierError, match="planned"):
        tier.put([b"a"], [[b"v"]])
    with pytest.raises(HostTierError, match="planned"):
        tier.get([b"a", b"b"], 10)
    assert measures == [Measure("put", 0, failed=True), Measure("get", 0, failed=True)]


def faults_of(plan: FaultPlan) -> list[object]:
    slept: list[float] = []
    tier = FaultyTier(MemoryTier(1 << 20), plan, sleep=slept.append)
    seen: list[object] = []
    for turn in range(60):
        try:
            seen.append(tier.put([b"%d" % i for i in range(4)], [[bytes(8)]] * 4))
            seen.append([value and bytes(value) for value in tier.get([b"%d" % i for i in range(4)], 8)])
        except HostTierError:
            seen.append(f"failed in turn {turn}")
    return [*seen, len(slept)]


def test_faults_are_those_of_the_seed() -> None:
    plan = FaultPlan(seed=7, fail=0.1, delay=0.2, partial=0.2, lose=0.1, corrupt=0.1)
    assert faults_of(plan) == faults_of(plan)
    assert faults_of(plan) != faults_of(FaultPlan(seed=8, fail=0.1, delay=0.2, partial=0.2, lose=0.1, corrupt=0.1))


@pytest.mark.parametrize("kind", ["fail", "delay", "partial", "lose", "corrupt"])
def test_each_kind_of_fault_happens(kind: str) -> None:
    plan = FaultPlan(seed=1, **{kind: 0.5})
    seen = faults_of(plan)
    calm = faults_of(FaultPlan())
    assert seen != calm
    happened = {
        "fail": any(isinstance(item, str) for item in seen),
        "delay": seen[-1] != 0,
        "partial": any(isinstance(item, int) and item < 4 for item in seen[:-1]),
        "lose": any(isinstance(item, list) and None in item for item in seen),
        "corrupt": any(isinstance(item, list) and any(v not in (None, bytes(8)) for v in item) for item in seen),
    }
    # A put that failed or stored a part leaves older values behind, so those two may hide a loss but never make one up.
    assert happened[kind]


def test_a_corrupted_value_differs_in_one_bit() -> None:
    tier = FaultyTier(MemoryTier(100), FaultPlan(seed=3, corrupt=1.0))
    tier.put([b"k"], [[bytes(20)]])
    value = tier.get([b"k"], 20)[0]
    assert value is not None
    assert sum(byte.bit_count() for byte in value) == 1
    assert tier._inner.get([b"k"], 20) == [bytes(20)]


def test_the_allocator_takes_the_setting_where_it_knows_it() -> None:
    assert keep_freed_blocks() == (platform.libc_ver()[0] == "glibc")
