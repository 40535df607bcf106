"""Checks a worker's inventory by value: each page that it would offer holds the KV of exactly its chain."""

from __future__ import annotations

from session.words import GroupKind
from tests.worker_service.device_memory import marks_of
from tests.worker_service.scheduler_machine import Machine
from worker_service.core.inventory import Inventory


def chain(inventory: Inventory, page_id: int) -> list[int] | None:
    """Returns the leading group's pages from the start of the prompt to this one; None where one of them is unknown."""
    pages = [page_id]
    while parent := inventory.parents[pages[0]]:
        if inventory.stamps[parent] != inventory.parent_stamps[pages[0]]:
            return None
        pages.insert(0, parent)
    return pages


def check_inventory(machine: Machine) -> int:
    """Returns how many pages of the leading group are known from their start."""
    inventory, groups = machine.scheduler.inventory, machine.config.groups
    alive = [page_id for page_id, stamp in enumerate(inventory.stamps) if stamp]
    assert inventory.num_pages == len(alive)
    size, marks_at, num_reached = machine.config.page_tokens, {}, 0
    for page_id in alive:
        pages = chain(inventory, page_id)
        if pages is None:
            continue
        num_reached += 1
        tokens = [token for page in pages for token in inventory.page(page)]
        marks = marks_at[page_id] = marks_of(inventory.namespace(page_id), tokens)
        assert inventory.leading is not None
        held = machine.memory.read_page(inventory.leading, page_id)
        assert held == tuple(marks[-size:]), f"page {page_id} holds something else"
    for group, leads in inventory.leads.items():
        for page_id, stamp in enumerate(inventory.lead_stamps[group]):
            if stamp and stamp == inventory.stamps[leads[page_id]] and leads[page_id] in marks_at:
                marks = marks_at[leads[page_id]]
                expected = marks[-1:] if groups[group].kind is GroupKind.STATE else marks[-size:]
                assert machine.memory.read_page(group, page_id) == tuple(expected), f"group {group}, page {page_id}"
    return num_reached


def pages_in_tables(machine: Machine) -> set[int]:
    """Returns the leading group's pages that are in tables of sequences with leases; none without such a group."""
    leading = machine.scheduler.inventory.leading
    rows = machine.scheduler._queues.leased if leading is not None else ()
    return {page_id for row in rows for page_id in row.tables[leading]}


def num_cut_off(machine: Machine, in_tables: set[int]) -> int:
    """Returns how many known pages are there in every FULL group, behind one that is not: no prompt reaches them.

    Those in block tables are left out. Who reads such a page has the ones before it, too; else it was granted to be
    written, and is forgotten only when the fetch before it has ended.
    """
    inventory, groups = machine.scheduler.inventory, machine.config.groups
    stamps, whole = inventory.stamps, {page_id for page_id, stamp in enumerate(inventory.stamps) if stamp}
    for group, leads in inventory.leads.items():
        if groups[group].kind is GroupKind.FULL:
            links = zip(leads, inventory.lead_stamps[group], strict=True)
            whole &= {lead for lead, stamp in links if stamp and stamps[lead] == stamp}
    return sum(not whole.issuperset(chain(inventory, page_id) or [0]) for page_id in whole - in_tables)
