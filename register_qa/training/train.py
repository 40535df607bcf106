"""The training run: seeded, over packed batches, with progress and a checkpoint that a later run goes on from."""

from __future__ import annotations

import math
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

from register_qa.training.curriculum import CURRICULA, Stage, rate_share
from register_qa.training.data import NO_LABEL, REGISTER_SHARES, Batch, PackedBatches, holdings_of
from register_qa.training.decoder import Decoder
from register_qa.training.evaluate import Score, Trial, evaluate
from register_qa.training.guidance import SubjectProbe, asking_places, pointing_loss
from register_qa.training.tokenizer import Encoder

# Most of a register cannot be foretold: it teaches what words there are, and should drown nothing else.
REGISTER_WEIGHT = 0.03
WEIGHT_DECAY = 0.05
BETAS = (0.9, 0.95)
MAX_NORM = 1.0
# Kept back from a run's time for the last report and the last batches.
SECONDS_TO_END = 12.0
# Of each kind, in a report.
QUESTIONS_SCORED = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does. It stops after `seconds` wherever it is; 0 means that it ends with the last step."""

    curriculum: str
    steps: int
    rate: float
    seed: int = 0
    workers: int = 0
    seconds: float = 0.0
    report_every: int = 100
    compiled: bool = True
    muon: bool = True


class Losses(NamedTuple):
    """Means over answers and register; `subject` and `pointing` are guidance's."""

    answer: torch.Tensor
    register: torch.Tensor
    subject: torch.Tensor
    pointing: torch.Tensor


class Progress(NamedTuple):
    """Where a run is: losses of the last step, tokens a second since the last report, a score on held-out registers.

    `is_best`: no earlier report was of a later stage, or of a higher score in this one.
    """

    step: int
    stage: Stage
    answer_loss: float
    register_loss: float
    guidance_loss: float
    tokens_per_s: float
    score: Score
    is_best: bool


class Report(Protocol):
    def __call__(self, progress: Progress, /) -> None: ...


class Trainer:
    """One model, its optimizers, and the step and the stage of the curriculum that they are at."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, plan: Plan, device: torch.device) -> None:
        self.model = model.to(device)
        self.step = 0
        self._stage_number = 0
        self._best = (0, 0.0)
        self._run_started = 0.0
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self._plan = plan
        self._device = device
        self._stages = CURRICULA[plan.curriculum]
        self._probe = SubjectProbe(model.hidden_size, model.vocab_size).to(device)
        self._optimizers = _optimizers(model, self._probe, plan, fused=device.type == "cuda")
        if plan.compiled:
            for block in model.blocks:
                # One compilation for every layer and every stage.
                block.compile(dynamic=True)

    def run(self, report: Report, until: int | None = None) -> None:
        """To the last step, or to the step `until`, or until the time is out."""
        self._run_started = time.monotonic()
        deadline = self._run_started + (self._plan.seconds - SECONDS_TO_END if self._plan.seconds else math.inf)
        last_step = min(self._plan.steps, until or self._plan.steps)
        while self.step < last_step and time.monotonic() < deadline:
            self._run_stage(report, last_step, deadline)

    def _run_stage(self, report: Report, last_step: int, deadline: float) -> None:
        """Until the stage is passed, or one of the bounds is reached."""
        stage = self._stages[self._stage_number]
        since, tokens = time.monotonic(), 0
        for batch in self._batches(stage, last_step):
            losses = self._learn(batch, stage)
            tokens += batch.tokens.numel()
            self.step += 1
            now = time.monotonic()
            last = self.step == last_step or now > deadline
            if last or self.step % self._plan.report_every == 0:
                answer, register, subject, pointing = (loss.item() for loss in losses)
                rate = tokens / (time.monotonic() - since)
                score = self._score(stage)
                is_best = self._is_best(score)
                report(Progress(self.step, stage, answer, register, subject + pointing, rate, score, is_best))
                since, tokens = time.monotonic(), 0
                if score.mean() >= stage.pass_mark:
                    self._stage_number += 1
                    return
            if last:
                return

    def _is_best(self, score: Score) -> bool:
        reached = (self._stage_number, score.mean())
        if reached < self._best:
            return False
        self._best = reached
        return True

    def _share_done(self) -> float:
        """Of the run's steps, or of its time, whichever is nearer its end."""
        by_steps = self.step / self._plan.steps
        if not self._plan.seconds:
            return by_steps
        return max(by_steps, (time.monotonic() - self._run_started) / self._plan.seconds)

    def save(self, path: Path) -> None:
        """Everything that a later run needs to go on as if it had never stopped."""
        state = {
            "step": self.step,
            "stage": self._stage_number,
            "model": self.model.state_dict(),
            "probe": self._probe.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self._device, weights_only=True)
        self.step, self._stage_number = int(state["step"]), int(state["stage"])
        self.model.load_state_dict(state["model"])
        self._probe.load_state_dict(state["probe"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def _batches(self, stage: Stage, last_step: int) -> Iterator[Batch]:
        loader = torch.utils.data.DataLoader(
            PackedBatches(self._tokenizer, self._plan.seed, stage),
            sampler=range(self.step, last_step),
            batch_size=None,
            num_workers=self._plan.workers,
            prefetch_factor=8 if self._plan.workers else None,
            pin_memory=self._device.type == "cuda",
        )
        yield from loader

    def _learn(self, batch: Batch, stage: Stage) -> Losses:
        rate = self._plan.rate * rate_share(self.step, self._share_done())
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        batch = Batch(*(column.to(self._device, non_blocking=True) for column in batch))
        with self._precision():
            losses = self._losses(batch, stage)
        guidance = stage.guidance * (losses.subject + losses.pointing)
        self.model.zero_grad(set_to_none=True)
        self._probe.zero_grad(set_to_none=True)
        (losses.answer + REGISTER_WEIGHT * losses.register + guidance).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        for optimizer in self._optimizers:
            optimizer.step()
        return losses

    def _losses(self, batch: Batch, stage: Stage) -> Losses:
        if not stage.guidance:
            logits = self.model(batch.tokens)
            none = logits.new_zeros(())
            return Losses(*_mean_losses(logits, batch), none, none)
        asking = asking_places(batch)
        inside = self.model.inside(batch.tokens, asking)
        subject, pointing = self._probe(inside.middle, batch), pointing_loss(inside.pointing, asking, batch)
        return Losses(*_mean_losses(inside.logits, batch), subject, pointing)

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16) if self._device.type == "cuda" else nullcontext()

    def _score(self, stage: Stage) -> Score:
        """Held-out registers as long as the stage's longest, QUESTIONS_SCORED questions of each kind.

        Not longer: what a short register does not teach, such as to tell subjects that share a word, is the next
        stage's to learn, and a stage that asks for it is never passed.
        """
        holdings = holdings_of(stage, max(REGISTER_SHARES))
        of_register = min(holdings, 4)
        trial = Trial(QUESTIONS_SCORED // of_register, holdings, of_register)
        with self._precision(), torch.compiler.set_stance("force_eager"):
            return evaluate(self.model, self._encoder, trial, self._device)


def _optimizers(model: Decoder, probe: nn.Module, plan: Plan, fused: bool) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, if the plan wants it; AdamW for all else, taps of convolutions too."""
    layers = [parameter for parameter in model.blocks.parameters() if parameter.dim() == 2 and plan.muon]
    others = [parameter for parameter in model.parameters() if not any(parameter is layer for layer in layers)]
    wide = [parameter for parameter in others if parameter.dim() > 1]
    groups = [
        {"params": [*wide, *probe.parameters()], "weight_decay": WEIGHT_DECAY},
        {"params": [parameter for parameter in others if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=plan.rate, betas=BETAS, fused=fused)
    if not layers:
        return [adam]
    # Steps are scaled to the size of AdamW's, so that both share one learning rate.
    muon = torch.optim.Muon(layers, lr=plan.rate, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    return [adam, muon]


def _mean_losses(logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the answers' tokens and over the register's. Masks rather than indices: those would wait for the device."""
    answer, register = batch.answers.flatten(), batch.register.flatten()
    labels = torch.where(answer == NO_LABEL, register, answer)
    losses = functional.cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=NO_LABEL, reduction="none")
    of_answers, of_register = (column != NO_LABEL for column in (answer, register))
    return (losses * of_answers).sum() / of_answers.sum(), (losses * of_register).sum() / of_register.sum()
