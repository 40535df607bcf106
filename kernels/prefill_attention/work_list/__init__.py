"""The order in which a prefill step's tiles of queries are computed: long ones first, made on the device.

Knows no pages and no layer: one list serves all layers of a step. `kernel` holds the jit function and its launcher.
"""

__all__ = ["COUNTERS", "RECORD"]

# int32 numbers of one record: 32 bytes.
RECORD = 8
# int32 numbers of a count: tiles listed, tiles drawn, programs done; the last two are 0 between launches.
COUNTERS = 3
