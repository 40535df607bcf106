"""The training run: seeded, over packed batches, with progress and a checkpoint that a later run goes on from.

Knows no command line and no service.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional

from register_qa.training.curriculum import Stage, rate_share, stages_of
from register_qa.training.data import NO_LABEL, TOKENS_PER_HOLDING, Batch, PackedBatches
from register_qa.training.evaluate import Score, Trial, evaluate
from register_qa.training.tokenizer import Encoder

REGISTER_WEIGHT = 0.1
WEIGHT_DECAY = 0.05
BETAS = (0.9, 0.95)
MAX_NORM = 1.0
SECONDS_TO_END = 12.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does. It stops after `seconds` wherever it is; 0 means that it ends with the last step."""

    curriculum: str
    steps: int
    rate: float
    seed: int = 0
    workers: int = 0
    seconds: float = 0.0
    report_every: int = 250
    compiled: bool = True


class Progress(NamedTuple):
    step: int
    stage: Stage
    answer_loss: float
    register_loss: float
    tokens_per_s: float
    elapsed_s: float
    score: Score


class Report(Protocol):
    def __call__(self, progress: Progress, /) -> None: ...


class Trainer:
    """One model, its optimizer and the step that they are at."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, plan: Plan, device: torch.device) -> None:
        self.model = model.to(device)
        self.step = 0
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self._plan = plan
        self._device = device
        self._stages = stages_of(plan.curriculum, plan.steps)
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=plan.rate, betas=BETAS, fused=device.type == "cuda")
        if plan.compiled:
            for block in model.blocks:  # type: ignore[union-attr]
                # One compilation for every layer and every stage.
                block.compile(dynamic=True)

    def run(self, report: Report) -> None:
        """To the last step, or until the time is out."""
        started = time.monotonic()
        since, tokens = started, 0
        for batch in self._batches():
            losses = self._learn(batch)
            tokens += batch.tokens.numel()
            self.step += 1
            now = time.monotonic()
            out_of_time = bool(self._plan.seconds) and now - started > self._plan.seconds - SECONDS_TO_END
            last = self.step == len(self._stages) or out_of_time
            if last or self.step % self._plan.report_every == 0:
                answer, register = (loss.item() for loss in losses)
                rate = tokens / (time.monotonic() - since)
                score = self._score(self._stages[self.step - 1])
                report(Progress(self.step, self._stages[self.step - 1], answer, register, rate, now - started, score))
                since, tokens = time.monotonic(), 0
            if last:
                return

    def save(self, path: Path) -> None:
        """Everything that a later run needs to go on as if it had never stopped."""
        state = {"step": self.step, "model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self._device, weights_only=True)
        self.step = int(state["step"])
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _batches(self) -> Iterator[Batch]:
        loader = torch.utils.data.DataLoader(
            PackedBatches(self._tokenizer, self._plan.seed, self._stages),
            sampler=range(self.step, len(self._stages)),
            batch_size=None,
            num_workers=self._plan.workers,
            prefetch_factor=8 if self._plan.workers else None,
            pin_memory=self._device.type == "cuda",
        )
        yield from loader

    def _learn(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        for group in self._optimizer.param_groups:
            group["lr"] = self._plan.rate * rate_share(self.step, len(self._stages))
        tokens, register_labels, answer_labels = (column.to(self._device, non_blocking=True) for column in batch)
        with self._precision():
            logits = self.model(tokens)
        answer, register = _mean_losses(logits, answer_labels, register_labels)
        self._optimizer.zero_grad(set_to_none=True)
        (answer + REGISTER_WEIGHT * register).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self._optimizer.step()
        return answer.detach(), register.detach()

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16) if self._device.type == "cuda" else nullcontext()

    def _score(self, stage: Stage) -> Score:
        """Held-out registers as long as the stage's longest, a few questions of each kind."""
        holdings = int(stage.length * 0.8) // TOKENS_PER_HOLDING
        with self._precision(), torch.compiler.set_stance("force_eager"):
            return evaluate(self.model, self._encoder, Trial(4, holdings, 4), self._device)


def _mean_losses(
    logits: torch.Tensor, answer_labels: torch.Tensor, register_labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the answers' tokens and over the register's. Masks rather than indices: those would wait for the device."""
    answer, register = answer_labels.flatten(), register_labels.flatten()
    labels = torch.where(answer == NO_LABEL, register, answer)
    losses = functional.cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=NO_LABEL, reduction="none")
    of_answers, of_register = (column != NO_LABEL for column in (answer, register))
    return (losses * of_answers).sum() / of_answers.sum(), (losses * of_register).sum() / of_register.sum()
