"""The `stemcache` command."""

from __future__ import annotations

from cli import ask, doctor, drain, generate, inspect, models, serve, status
from cli.app import app
from cli.evaluation import command as evaluation
from cli.replay import command as replay

__all__ = [
    "ask",
    "doctor",
    "drain",
    "evaluation",
    "generate",
    "inspect",
    "main",
    "models",
    "replay",
    "serve",
    "status",
]


def main() -> None:
    """Entry point; importing the modules above has registered their commands."""
    app()


if __name__ == "__main__":
    main()
