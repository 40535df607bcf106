"""`python -m cli.die_with_parent PARENT_PID COMMAND...`: become COMMAND, with SIGTERM when the parent dies.

Needs Linux's prctl(PR_SET_PDEATHSIG); elsewhere the command just runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Returns 1 when the parent died already; otherwise does not return."""
    parent, command = int(argv[0]), argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # died before the signal was asked for
            return 1
    os.execvp(command[0], command)  # noqa: S606 - the supervisor built this command itself
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
