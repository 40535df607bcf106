"""The `stemcache` command."""

from __future__ import annotations

# Importing a module registers its commands.
from cli import ask, doctor, drain, generate, inspect, models, serve, status  # noqa: F401
from cli.app import app
from cli.evaluation import command as evaluation  # noqa: F401
from cli.replay import command as replay  # noqa: F401


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
