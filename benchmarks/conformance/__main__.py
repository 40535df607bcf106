"""Runs the scenes with an engine, prints a table, and writes it down. Ends with 1 where a scene failed.

    python -m benchmarks.conformance --name vllm --page-tokens 32 --reset /reset_prefix_cache \
        --metric vllm:external_prefix_cache_hits_total --out FILE -- COMMAND {port} {cache} {redis}

`{port}`, `{cache}` and `{redis}` in the command stand for where the engine is to listen, the cache service's
address and the store's URL.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.conformance.engine import Engine
from benchmarks.conformance.scenes import Row, Run
from benchmarks.conformance.services import Services
from benchmarks.host import about_host
from tests.redis_process import free_port


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance")
    parser.add_argument("--name", required=True, help="key of this run in the result file: engine and model")
    parser.add_argument("--model", required=True, help="the name that requests give")
    parser.add_argument("--page-tokens", type=int, required=True)
    parser.add_argument("--reset", required=True, help="path that is posted to, to empty the engine's own cache")
    parser.add_argument("--metric", required=True, help="the counter of prompt tokens that came from the tier")
    parser.add_argument("--tail", default="", help="what requests that are to hit have behind the first one's prompt")
    parser.add_argument("--out", type=Path, help="JSON file; the entry of this name is replaced")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args(given)
    rows = run(arguments)
    if arguments.out is not None:
        write(arguments.out, arguments.name, rows)
    return 0 if all(row.passed for row in rows) else 1


def run(arguments: argparse.Namespace) -> list[Row]:
    """Prints each scene as it ends."""
    command = [part for part in arguments.command if part != "--"]
    with tempfile.TemporaryDirectory() as folder:
        services = Services(Path(folder))
        port, started_s = free_port(), time.monotonic()
        rows: list[Row] = []
        try:
            services.start()
            places = {"{port}": str(port), "{cache}": services.cache.address, "{redis}": services.redis.url}
            for name, place in places.items():
                command = [part.replace(name, place) for part in command]
            log = Path(folder) / "engine.log"
            engine = lambda: Engine(command, port, log, arguments.model, arguments.reset, arguments.metric)  # noqa: E731
            print(f"{arguments.name}: starting the engine, which may take minutes", flush=True)
            for row in Run(services, engine, arguments.page_tokens, arguments.tail).rows():
                rows.append(row)
                print(line(row, time.monotonic() - started_s), flush=True)
        finally:
            services.stop()
    return rows


def line(row: Row, passed_s: float) -> str:
    counted = " ".join(f"{name}={value}" for name, value in row.counted._asdict().items() if value)
    verdict = "ok  " if row.passed else "FAIL"
    wanted = "any" if row.expected is None else row.expected
    same = "same" if row.same_tokens else "OTHER"
    what = f"{verdict} {row.scene:32} {same} tokens, {row.from_tier} of {wanted} from the tier"
    return f"{passed_s:6.0f} s  {what}; {counted} {row.note}"


def write(path: Path, name: str, rows: list[Row]) -> None:
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    result.setdefault("engines", {})[name] = [
        {**row._asdict(), "counted": row.counted._asdict(), "passed": row.passed} for row in rows
    ]
    result["host"] = about_host()
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
