"""Serves a model with the real processes and times what clients see: first tokens, inter-token times, tokens a second.

    python -m benchmarks.bench_serving [--device cuda] [--only streams ...] [--out FILE]

The cache service and one worker run as `stemcache up` starts them, without a host tier; the clients are processes of
their own, over loopback. On a GPU the model is random weights in the shape of Llama 3.1 8B, written to a temporary
folder (16 GB) unless --model names one; a path (/... or ./...) that is not there yet is written and kept. On a CPU it
is the small random model, which shows that everything works and nothing more. Variables of the services count, for
example STEMCACHE_WORKER_KV_DTYPE=fp8_e4m3; the report has them.

A row has figures only if its tokens were right (benchmarks/serving/answers.py), else the exit code is 1. Rows are
written as they come, so that a run that is cut keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.host import about_host, commit, gpu, short_name, versions
from benchmarks.report import RESULTS
from benchmarks.serving.answers import Answers
from benchmarks.serving.cases import Bench
from benchmarks.serving.figures import Row, idle_percent
from benchmarks.serving.load import QUICK, Sizes
from benchmarks.serving.plan import KINDS, Case, all_cases, measured
from benchmarks.serving.services import Services, service_variables, serving
from benchmarks.serving.streams import Clients
from cli.output import Output
from rpc.lifecycle import run

ALONE = 4
DEFAULT_SEQS = 64
CPUS_PER_CLIENT, MAX_CLIENTS = 2, 8


@dataclass(slots=True)
class Report:
    """What was measured where; `write` after every row."""

    about: dict[str, Any]
    rows: list[Row]
    path: Path

    def write(self) -> None:
        rows = [_rounded(asdict(row)) for row in self.rows]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({**self.about, "rows": rows}, indent=2) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return round(value, 4) if isinstance(value, float) else value


@contextmanager
def model_folder(model: str, device: str, output: Output) -> Iterator[str]:
    """A checkpoint to serve: the one that is named, or one of random weights, gone after this run if it has no name."""
    is_path = model.startswith(("/", "."))
    if model and (not is_path or (Path(model) / "config.json").is_file()):
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="stemcache-") as temporary:
        folder = Path(model) if model else Path(temporary) / "random"
        started_s = time.monotonic()
        with output.working("writing a checkpoint of random weights"):
            if device == "cpu":
                from cli.random_model import make_random_model

                make_random_model(folder)
            else:
                command = ("-m", "benchmarks.serving.checkpoint", str(folder), "--device", device)
                subprocess.run([sys.executable, *command], check=True)
        output.progress(f"written in {time.monotonic() - started_s:.0f} s")
        yield str(folder)


def settings_for(cases: Sequence[Case]) -> dict[str, str]:
    """Variables of the services: room for all streams in one launch, and what the environment says, which wins."""
    num_seqs = max(DEFAULT_SEQS, *(case.num_seqs for case in cases))
    return {"STEMCACHE_WORKER_MAX_NUM_SEQS": str(num_seqs)} | service_variables()


def num_clients() -> int:
    return max(1, min(MAX_CLIENTS, (os.cpu_count() or 1) // CPUS_PER_CLIENT))


def model_name(model: str) -> str:
    """Returns what the checkpoint says that it is, else its folder's name; a hub id is its own name."""
    config = Path(model) / "config.json"
    if not config.is_file():
        return model
    said = json.loads(config.read_text()).get("_name_or_path")
    return said if isinstance(said, str) and said else Path(model).name


def about(services: Services, settings: dict[str, str], model: str) -> dict[str, Any]:
    described = services.described
    return {
        "commit": commit(),
        **(gpu() if described.device.startswith("cuda") else {}),
        "host": about_host(),
        "versions": versions(),
        "model": model_name(model),
        "device": described.device,
        "dtype": described.dtype,
        "settings": {name: value for name, value in settings.items() if "URL" not in name},
        "pool_tokens": services.pool_tokens,
        "clients": num_clients(),
        "start_s": round(services.start_s, 1),
    }


async def bench(cases: Sequence[Case], sizes: Sizes, arguments: argparse.Namespace, output: Output) -> Report:
    """Runs the cases in order on one start of the services."""
    settings = settings_for(cases)
    with (
        model_folder(arguments.model, arguments.device, output) as model,
        tempfile.TemporaryDirectory(prefix="stemcache-logs-") as temporary,
    ):
        logs = arguments.logs or Path(temporary)
        async with serving(model, arguments.device, settings, logs, output.progress) as services:
            report = Report(about(services, settings, model), [], arguments.out)
            with closing(Clients(services.worker, num_clients())) as clients:
                made = Bench(services, clients, Answers(clients, arguments.alone, sizes.new_tokens), sizes)
                await warm_up(made)
                deadline_s = time.monotonic() + arguments.limit_s
                for case in cases:
                    await run_case(made, case, deadline_s, report, output)
    return report


async def run_case(made: Bench, case: Case, deadline_s: float, report: Report, output: Output) -> None:
    """Adds the case's row to the report; after the deadline one without figures."""
    started_s = time.monotonic()
    if started_s > deadline_s:
        case.row.skipped = "no time was left"
    row = case.row if case.row.skipped else await measured(made, case)
    report.rows.append(row)
    report.write()
    output.progress(_line(row, time.monotonic() - started_s))


async def warm_up(made: Bench) -> None:
    """Compiles what is compiled on first use, and opens what is opened then."""
    sizes = made.sizes
    await made.clients.send(made.requests(max(sizes.streams), 40, 16, "warm-up"))
    await made.clients.send(made.requests(1, max(sizes.prompts), 2, "warm-up"))


def _line(row: Row, took_s: float) -> str:
    what = row.skipped or "; ".join(row.failures[:3])
    shown = {name: value for name, value in asdict(row).items() if isinstance(value, float)}
    figures = ", ".join(f"{name} {value:,.2f}" for name, value in {**shown, **row.detail}.items())
    return f"{row.name}: {what or figures} ({took_s:.1f} s)"


def shown(rows: Sequence[Row]) -> Table:
    """Times in ms. ITL: inter-token time of the streams that decode; TTFT of arrivals: of the prompts that arrive."""
    names = ("streams", "context", "cached", "tok/s", "wall", "device", "idle", "TTFT", "TTFT max", "ITL", "ITL p99")
    table = Table("case", *names, "silence", "tokens")
    for row in rows:
        times = (row.ttft_ms_p50, row.ttft_ms_max, row.itl_ms_p50, row.itl_ms_p99, row.silence_ms_max)
        table.add_row(
            row.name,
            *(f"{value:,}" for value in (row.streams, row.context, row.cached_tokens)),
            *(_number(value, ",.0f") for value in (row.tokens_per_s,)),
            *(_number(value, ",.2f") for value in (row.wall_ms, row.device_ms)),
            idle_percent(row.idle_share),
            *(_number(value, ",.1f") for value in times),
            row.skipped or ("WRONG" if row.failures else f"{row.compared} right, {row.alone} alone"),
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--model", default="", help="hub id or folder; a random checkpoint is written to a path that is not there"
    )
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="kinds of cases")
    parser.add_argument("--streams", type=_numbers, help="for example 1,16,64,256")
    parser.add_argument("--context", type=_numbers, help="prompt lengths of the streams, for example 330,4096")
    parser.add_argument("--prompts", type=_numbers, help="lengths of prompts that are alone")
    parser.add_argument("--new-tokens", type=int, help="of each stream")
    parser.add_argument(
        "--alone",
        type=int,
        default=ALONE,
        help="prompts of each load that also run alone to their end; 16 times as many do for 32 tokens",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: does everything work?")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="time after which no further case begins")
    parser.add_argument("--out", type=Path, help="default: results/serving-DEVICE.json")
    parser.add_argument("--logs", type=Path, help="folder for the services' logs; else they go with the run")
    return parser.parse_args(arguments)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def sizes_of(arguments: argparse.Namespace) -> Sizes:
    given = {
        "streams": arguments.streams,
        "contexts": arguments.context,
        "prompts": arguments.prompts,
        "new_tokens": arguments.new_tokens,
    }
    return replace(QUICK if arguments.quick else Sizes(), **{name: value for name, value in given.items() if value})


def result_path(device: str) -> Path:
    """results/serving-h200.json for an "NVIDIA H200"."""
    return RESULTS / f"serving-{short_name(gpu()['gpu']) if device == 'cuda' else device}.json"


def main() -> None:
    arguments = parse()
    arguments.out = arguments.out or result_path(arguments.device)
    sizes, output = sizes_of(arguments), Output(as_json=False)
    cases = [case for case in all_cases(sizes) if case.row.kind in arguments.only]
    report = run(bench(cases, sizes, arguments, output))
    output.console.width = max(output.console.width, 180)
    output.show(shown(report.rows))
    sys.exit(1 if any(row.failures for row in report.rows) else 0)


if __name__ == "__main__":
    main()
