"""`python -m worker_service`: settings from flags and STEMCACHE_WORKER_*, then serve until SIGTERM or SIGINT."""

from __future__ import annotations

import os
import sys

from rpc.lifecycle import run
from rpc.listener import choose_listener
from rpc.logs import set_up_logging
from rpc.settings import SettingsError
from session.redis_url import RedisUrlError
from worker_service.config import load_config
from worker_service.core.errors import DeviceLost, InvalidField, SessionRefused, StartError, StepsRejected

USAGE_ERROR = 2
FAILURE = 1


def main() -> int:
    try:
        config = load_config(sys.argv[1:], os.environ)
    except SettingsError as error:
        return _complain(str(error), USAGE_ERROR)
    set_up_logging("worker_service", config.log_level)
    choose_listener(os.environ)
    # Imported here, after the listener's choice, which gRPC reads when it is imported, and after the settings, so that
    # --help and a typo do not wait for PyTorch.
    from rpc.server import CannotListen
    from worker_service import bootstrap
    from worker_service.compute import prepare

    try:
        compute = prepare(config)
        run(bootstrap.serve(config, compute, _announce))
    except (StartError, InvalidField, CannotListen, RedisUrlError) as error:
        return _complain(str(error), USAGE_ERROR)
    except DeviceLost as error:
        _complain(str(error), FAILURE)
        # The interpreter's orderly end would wait for threads that are stuck, and abort in destructors of the device.
        os._exit(FAILURE)
    except (SessionRefused, StepsRejected, OSError) as error:
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
