"""`stemcache replay`: drives the manager alone with a trace in Mooncake's format.

Knows the command line only; cache_service/replay.py does the work.
"""

from __future__ import annotations
