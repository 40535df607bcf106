"""`python -m worker_service`: settings from flags and STEMCACHE_WORKER_*, then serve until told to stop."""

from __future__ import annotations

import os
import sys

from rpc.lifecycle import run
from rpc.listener import choose_listener
from rpc.logs import set_up_logging
from rpc.settings import SettingsError
from worker_service.config import load_config

USAGE_ERROR = 2
FAILURE = 1


def main() -> int:
    try:
        config = load_config(sys.argv[1:], os.environ)
    except SettingsError as error:
        return _complain(str(error), USAGE_ERROR)
    set_up_logging("worker_service", config.log_level)
    choose_listener(os.environ)
    # Behind the choice, which gRPC reads when it is imported, and behind the settings, so that --help and a typo are
    # answered before PyTorch is loaded.
    from rpc.server import CannotListen
    from worker_service import bootstrap
    from worker_service.core.ports import SessionRefused
    from worker_service.core.sequence import InvalidField
    from worker_service.generation import RequestFailed
    from worker_service.gpu.kv_pages import PoolError
    from worker_service.host_tier.redis_url import RedisUrlError
    from worker_service.launcher import DeviceLost
    from worker_service.model.config import ModelError

    try:
        compute = bootstrap.prepare(config)
        run(bootstrap.serve(config, compute, _announce))
    except RedisUrlError as error:
        return _complain(f"redis_url: {error}", USAGE_ERROR)
    except (ModelError, PoolError, InvalidField, CannotListen) as error:
        return _complain(str(error), USAGE_ERROR)
    except DeviceLost as error:
        _complain(str(error), FAILURE)
        # The interpreter's orderly end would wait for threads that are stuck, and abort in destructors of the device.
        os._exit(FAILURE)
    except (SessionRefused, RequestFailed, OSError) as error:
        return _complain(str(error), FAILURE)
    return 0


def _announce(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _complain(reason: str, code: int) -> int:
    sys.stderr.write(f"worker_service: error: {reason}\n")
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
