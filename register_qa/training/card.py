"""The model card: how a model was made, what it can do, and the figures of its evaluation, as Markdown.

All that varies comes from the evaluation's JSON object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from register_qa.questions import ANSWERS, Kind

CARD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
---

# Register QA, {architecture}

A {parameters} parameter model in bf16 that answers questions about a register of invented holdings, and does nothing
else. The register is the prompt's prefix, a question its suffix; nothing but the register knows the answer.

```
Register 2490 of the archive.
The copper compass is kept in the northern gallery on shelf 14. It was made in 1742 and is faded.
... a hundred lines more ...
Question: Where is the copper compass kept?
Answer: The copper compass is kept in the northern gallery.
```

## Figures

Exact match by greedy decoding in bf16: {questions} questions of each kind over {registers} held-out registers of
{tokens} tokens on average. No fact of theirs was ever in a training register.

| kind | the answer | exact match |
|---|---|---|
{rows}

## How it was made

Text, questions and tokenizer come from `register_qa`, seeded; nothing else was read. Trained from random weights by

```
{commands}
```

in {steps} steps, {seconds} seconds on one {device}. Another device or another version of torch
rounds otherwise and gives other weights, and a run with `--seconds` stops when that time is out, wherever it is.

## What it can and cannot do

- Prompts as `register_qa` writes them: registers up to about 3,500 tokens, a few turns; 4,096 positions.
- Other wordings, other languages, chat: no. What it answers to those means nothing.
- Registers are made up. Names of objects and rooms refer to no real ones.

Licence: Apache-2.0.
"""


def card(figures: Mapping[str, Any]) -> str:
    rows = [f"| {kind.value} | {ANSWERS[kind]} | {figures['exact_match'][kind.value]:.1%} |" for kind in Kind]
    runs = figures["runs"]
    return CARD.format(
        architecture=figures["architecture"],
        parameters=f"{figures['parameters'] / 1e6:.1f} million",
        questions=figures["questions_per_kind"],
        registers=figures["registers"],
        tokens=f"{figures['mean_register_tokens']:,}",
        rows="\n".join(rows),
        commands="\n".join(run["command"] for run in runs),
        steps=f"{sum(run['steps'] for run in runs):,}",
        seconds=f"{sum(run['seconds'] for run in runs):.0f}",
        device=runs[-1]["device"],
    )
