"""The `stemcache` command."""

from __future__ import annotations

import sys

try:
    # Importing a module registers its commands.
    from cli import ask, doctor, drain, generate, inspect, models, serve, status  # noqa: F401
    from cli.app import app
    from cli.evaluation import command as evaluation  # noqa: F401
    from cli.replay import command as replay  # noqa: F401
except ModuleNotFoundError as error:
    package = (error.name or "").partition(".")[0]
    if package not in ("typer", "rich"):
        raise
    # pip installs them only with the extra.
    sys.exit(f"error: the command needs {package}: pip install 'stemcache[cli]'")


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
