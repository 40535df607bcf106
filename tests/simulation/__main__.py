"""python -m tests.simulation --seeds N [--first S] [--iterations K]: stops at the first that goes wrong."""

from __future__ import annotations

import argparse
import time

from tests.simulation.simulator import simulate


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=120)
    options = parser.parse_args()
    start = time.monotonic()
    done = cached = fetched = steps = 0
    for seed in range(options.first, options.first + options.seeds):
        outcome = simulate(seed, options.iterations)
        done, cached = done + outcome.done, cached + outcome.cached_tokens
        fetched, steps = fetched + outcome.fetched_tokens, steps + outcome.num_steps
    seconds = time.monotonic() - start
    print(f"{options.seeds} seeds, {done} requests, {steps} steps, {cached} cached, {fetched} fetched, {seconds:.0f} s")


if __name__ == "__main__":
    main()
