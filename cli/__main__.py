"""The `stemcache` command."""

from __future__ import annotations

from cli import architectures, ask, doctor, drain, generate, inspect, serve, status
from cli.app import app
from cli.evaluation import command as evaluation
from cli.replay import command as replay

__all__ = [
    "architectures",
    "ask",
    "doctor",
    "drain",
    "evaluation",
    "generate",
    "inspect",
    "main",
    "replay",
    "serve",
    "status",
]


def main() -> None:
    """Entry point; importing the modules above has registered their commands."""
    app()


if __name__ == "__main__":
    main()
