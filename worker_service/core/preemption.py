"""Which running request is preempted: the youngest, once an extend was refused twice in a row.

Why this ends: an extend that was refused asks first in the next step; refused again, the youngest younger sequence goes
back to the queue, one for each reply, and when none is younger, the sequence itself. The oldest never goes, so it
finishes, and then the next one is the oldest.
"""

from __future__ import annotations

from worker_service.core.queues import Queues

# An extend that was refused this often in a row preempts the youngest sequence.
PATIENCE = 2


def preempt(queues: Queues) -> None:
    """Preempts the youngest: younger than every starving one, or starving itself. At most one for a reply, and none
    while the pages of another are on their way."""
    leased = queues.leased
    if queues.departures or len(leased) < 2:
        return
    if any(sequence.num_refused_extends >= PATIENCE for sequence in leased):
        queues.preempt(leased[-1])
