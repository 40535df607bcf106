"""`python -m cache_service`: settings from flags and STEMCACHE_CACHE_*, then serve until told to stop."""

from __future__ import annotations

import os
import sys

from cache_service.config import load_config
from rpc.lifecycle import run
from rpc.listener import choose_listener
from rpc.logs import set_up_logging
from rpc.settings import SettingsError

USAGE_ERROR = 2


def main() -> int:
    try:
        config = load_config(sys.argv[1:], os.environ)
    except SettingsError as error:
        return _complain(str(error))
    set_up_logging("cache_service", config.log_level)
    choose_listener(os.environ)
    # Behind the choice, which gRPC reads when it is imported.
    from cache_service import bootstrap
    from cache_service.host_keys import InvalidRedisUrl
    from rpc.server import CannotListen

    try:
        run(bootstrap.serve(config, _announce))
    except InvalidRedisUrl as error:
        return _complain(f"redis_url: {error}")
    except (CannotListen, OSError) as error:
        return _complain(str(error))
    return 0


def _announce(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _complain(reason: str) -> int:
    sys.stderr.write(f"cache_service: error: {reason}\n")
    return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
