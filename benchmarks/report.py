"""What the benches' command lines share: options, and the JSON that each writes and prints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def parser(about: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Returns a parser whose help is `about`, with an option for each whole number, of this default."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in numbers.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return made


def rounded(value: Any) -> Any:
    """Returns the same with each float to three places."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def save(report: Mapping[str, object], out: Path | None) -> None:
    """Prints the report, and writes it where it is to be kept."""
    if out is not None:
        write(report, out)
    print(json.dumps(report, indent=2))


def write(report: Mapping[str, object], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
