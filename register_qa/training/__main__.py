"""`python -m register_qa.training --architecture llama-7m --out FOLDER`: train, evaluate, write the folder.

The folder is written at each report that is the best so far: a run that is killed leaves it behind.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from register_qa.questions import Kind
from register_qa.training.architectures import ARCHITECTURES, Architecture
from register_qa.training.curriculum import CURRICULA
from register_qa.training.evaluate import Trial, evaluate
from register_qa.training.folder import read_evaluation, read_tokenizer, read_weights, write_evaluation, write_folder
from register_qa.training.tokenizer import Encoder, train_tokenizer
from register_qa.training.train import Plan, Progress, Trainer

# Seeds that no report during training has seen.
FINAL_FIRST_SEED = 1000
FINAL_QUESTIONS_PER_KIND = 10
# Of a run with `--minutes`, kept back for the last evaluation.
FINAL_S = 40.0


def main(arguments: list[str]) -> None:
    began = time.monotonic()
    options = _options(arguments)
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = read_tokenizer(options.start_from) if options.start_from else train_tokenizer()
    architecture = ARCHITECTURES[options.architecture]
    model = architecture.build()
    if options.start_from:
        read_weights(options.start_from, model)
    _say(f"{options.architecture}: {_size(model):,} parameters on {device}")
    if options.minutes:
        options.seconds = max(1.0, options.minutes * 60.0 - (time.monotonic() - began) - FINAL_S)
    trainer = Trainer(model, tokenizer, _plan(options), device)
    if options.checkpoint and options.checkpoint.is_file():
        trainer.load(options.checkpoint)
    started = time.monotonic()

    def report(progress: Progress) -> None:
        _report(progress, time.monotonic() - began)
        if progress.is_best:
            write_folder(options.out, architecture, model, tokenizer)

    trainer.run(report)
    seconds = time.monotonic() - started
    if options.checkpoint:
        trainer.save(options.checkpoint)
    figures = {
        "architecture": options.architecture,
        "parameters": _size(model),
        **_final_figures(options, architecture, tokenizer, device),
        "runs": [*_earlier_runs(options), _run(arguments, trainer.step, seconds, device)],
    }
    write_evaluation(options.out, figures)


def _plan(options: argparse.Namespace) -> Plan:
    return Plan(**{field.name: getattr(options, field.name) for field in fields(Plan)})


def _final_figures(
    options: argparse.Namespace, architecture: Architecture, tokenizer: Tokenizer, device: torch.device
) -> dict[str, Any]:
    """Of the weights as they were written: in bf16 throughout."""
    started = time.monotonic()
    model = architecture.build().to(device, torch.bfloat16)
    read_weights(options.out, model)
    trial = Trial(options.final_registers, options.final_holdings, FINAL_QUESTIONS_PER_KIND, FINAL_FIRST_SEED)
    score = evaluate(model, Encoder(tokenizer), trial, device)
    _say(f"final, bf16: {score.register_tokens:.0f} tokens: {score.line()} ({time.monotonic() - started:.1f} s)")
    return {
        "registers": trial.registers,
        "mean_register_tokens": round(score.register_tokens),
        "questions_per_kind": trial.registers * trial.questions_per_kind,
        "exact_match": {kind.value: round(score.accuracy(kind), 4) for kind in Kind},
    }


def _earlier_runs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Of the folder that this run began with."""
    return list(read_evaluation(options.start_from)["runs"]) if options.start_from else []


def _run(arguments: list[str], steps: int, seconds: float, device: torch.device) -> dict[str, Any]:
    """What somebody else would type: names of folders are theirs to choose."""
    named = [
        "FOLDER" if before in ("--out", "--start-from", "--checkpoint") else argument
        for before, argument in zip(["", *arguments], arguments, strict=False)
    ]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    command = " ".join(["python -m register_qa.training", *named])
    return {"command": command, "steps": steps, "seconds": round(seconds), "device": name}


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _report(progress: Progress, elapsed_s: float) -> None:
    losses = f"{progress.answer_loss:.3f} register {progress.register_loss:.2f} guidance {progress.guidance_loss:.2f}"
    _say(
        f"step {progress.step} {progress.stage.length}x{progress.stage.sequences} loss {losses} "
        f"{progress.tokens_per_s / 1000:.0f}k tok/s {elapsed_s:.0f} s | mean={progress.score.mean():.3f} "
        f"{progress.score.line()}{' best' if progress.is_best else ''}"
    )


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m register_qa.training", description=__doc__)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="llama-7m")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--curriculum", choices=CURRICULA, default="full")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=14, help="processes that make batches")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so long; 0 = after the last step")
    parser.add_argument("--minutes", type=float, default=0.0, help="the whole run's limit, last evaluation included")
    parser.add_argument("--report-every", type=int, default=100, help="steps; a stage can be passed at a report")
    parser.add_argument("--start-from", type=Path, help="a model folder whose weights and tokenizer to begin with")
    parser.add_argument("--checkpoint", type=Path, help="go on from this file if it is there, and write it at the end")
    parser.add_argument("--final-registers", type=int, default=25, help="held-out registers of the last evaluation")
    parser.add_argument("--final-holdings", type=int, default=115, help="what each holds; 115 are 3,000 tokens")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available(), dest="compiled"
    )
    parser.add_argument("--muon", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
