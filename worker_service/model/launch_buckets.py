"""Which launches are captured as graphs: their shapes, and which one holds a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from worker_service.core.batch import Batch

SMALL_BATCHES = (1, 2, 4, 8)
BATCH_STEP = 8
# Beyond it the weights' share of a launch is small, so a padding row costs little and buckets may lie further apart.
WIDE_FROM = 64
WIDE_STEP = 32
# Tokens of prompts: sizes lie close together, since padding rows are computed as well: 600 tokens of an 8B model take
# an H200 0.33 ms less in 608 rows than in 640. From 512 on there are 16 sizes for each doubling. What is not captured
# takes the host up to 47 ms, whatever its size; the device computes 2,048 tokens in 48.
LEAST_PROMPT_TOKENS = 16
WIDE_PROMPT_TOKENS, WIDE_PROMPT_STEP = 128, 32
STEPS_PER_DOUBLING = 16
# Beside decode rows: few numbers of these, and prompts that come in chunks.
MIXED_DECODE = (16, 64)
MIXED_TOKENS = (16, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
# Keys of prompts over latents: doubling from the first to GraphLimits.max_prompt_keys, beside decode rows these alone.
# On Hopper a launch projects those that are there, elsewhere as many as the bound.
LEAST_PROMPT_KEYS = 1024
MIXED_KEYS = (4096, 16_384, 65_536)
# Keys of the longest prompt where an indexer chooses: what is not there costs little (a program looks and ends), so
# bounds lie further apart. The first is the usual number of chosen ones: among so few nothing is chosen.
LEAST_CHOSEN_KEYS = 2048
CHOSEN_STEP = 4
# A single prompt's tokens, as in a conversation's next turn: attention shares the keys of its few rows among all
# multiprocessors, where a launch cannot have other prompts. Of no more keys than these it does not pay: 16 tokens
# behind 496 take an H200 16.0 us, and 17.7 if their keys are shared, 32 take 16.3 and 18.6.
SINGLE_TOKENS = (16, 32)
SHORT_KEYS = 512
# Prompts that may sample in a captured launch; the head reads its weights once for that many.
PROMPT_SAMPLES = 8


class GraphLimits(NamedTuple):
    """What the static buffers must hold."""

    max_num_seqs: int
    max_tokens: int
    max_model_len: int
    page_tokens: int
    num_groups: int
    least_rows: int
    one_phase: bool  # decode rows go through the attention of prompts, as chunks of one token
    has_prompts: bool = True  # whether launches with prompts can be captured
    max_prompt_keys: int = 0  # of all prompts of a captured launch, cached and new; 0: any number
    chooses_keys: bool = False  # an indexer chooses among a prompt's keys: max_prompt_keys is of each prompt
    has_states: tuple[bool, ...] = ()  # by group; empty: none has

    def num_leaves(self, num_decode: int, prompt_tokens: int, num_prompts: int) -> int:
        """The most snapshots that such a launch leaves: a chunk of n tokens passes n / page_tokens boundaries, rounded
        up."""
        return num_decode + num_prompts + prompt_tokens // self.page_tokens

    def size_of(self, batch: Batch, num_decode: int) -> LaunchSize:
        """Returns what a launch whose first num_decode rows decode asks of a bucket."""
        ends = batch.cu_seqlens_k[num_decode:]
        prompt_keys = ends[-1] - ends[0]
        if self.chooses_keys:
            prompt_keys = max((end - start for start, end in pairwise(ends)), default=0)
        return LaunchSize(
            num_decode,
            batch.num_tokens - num_decode,
            batch.num_seqs - num_decode,
            len(batch.logits_rows),
            len(batch.logits_rows) == batch.num_tokens,
            prompt_keys,
        )


class LaunchSize(NamedTuple):
    """What a launch asks of a bucket, by the bucket's fields. has_all_logits: each token has a row of logits."""

    num_decode: int
    prompt_tokens: int
    num_prompts: int
    num_logits: int
    has_all_logits: bool
    prompt_keys: int


class Bucket(NamedTuple):
    """The shape of one graph: decode rows, then the tokens of prompts.

    num_logits 0: every row's. prompt_keys: how many the prompts, or the longest one, have at most, cached and new; 0:
    any number.
    """

    num_decode: int
    prompt_tokens: int
    num_prompts: int
    num_logits: int
    prompt_keys: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_decode + self.prompt_tokens

    def holds(self, size: LaunchSize) -> bool:
        """Returns whether a launch of that size can be laid out in it."""
        return (
            self.num_decode >= size.num_decode
            and self.prompt_tokens >= size.prompt_tokens
            and self.num_prompts >= size.num_prompts
            and (size.num_logits <= self.num_logits if self.num_logits else size.has_all_logits)
            and (not self.prompt_keys or size.prompt_keys <= self.prompt_keys)
        )


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of decoding sequences to capture, the largest last."""
    narrow = range(2 * BATCH_STEP, WIDE_FROM + 1, BATCH_STEP)
    wide = range(WIDE_FROM + WIDE_STEP, max_num_seqs, WIDE_STEP)
    return (*(size for size in (*SMALL_BATCHES, *narrow, *wide) if size < max_num_seqs), max_num_seqs)


def prompt_sizes(max_tokens: int) -> tuple[int, ...]:
    """Numbers of prompt tokens to capture, the largest last: 16, 32, 48, ..., 128, 160, ..., 1024, 1088, ..."""
    sizes, size = [], LEAST_PROMPT_TOKENS
    while size <= max_tokens:
        sizes.append(size)
        step = (1 << size.bit_length() - 1) // STEPS_PER_DOUBLING
        size += max(step, LEAST_PROMPT_TOKENS if size < WIDE_PROMPT_TOKENS else WIDE_PROMPT_STEP)
    return (*sizes, max_tokens) if sizes and sizes[-1] < max_tokens else tuple(sizes)


def prompt_keys(limits: GraphLimits) -> tuple[int, ...]:
    """Returns the bounds of prompts' keys to capture, the largest last; 0: any number."""
    if limits.chooses_keys:
        return chosen_keys(limits.max_prompt_keys)
    sizes, size = [], LEAST_PROMPT_KEYS
    while size <= limits.max_prompt_keys:
        sizes.append(size)
        size *= 2
    return tuple(sizes) if limits.max_prompt_keys else (0,)


def chosen_keys(most: int) -> tuple[int, ...]:
    """Returns the bounds of a prompt's keys where an indexer chooses: each CHOSEN_STEP times the one before, and the
    last one up to twice that: 2,048, 8,192, 32,768, 163,840 of DeepSeek V3.2."""
    sizes, size = [], LEAST_CHOSEN_KEYS
    while 2 * size < most:
        sizes.append(size)
        size *= CHOSEN_STEP
    return (*sizes, most)


def buckets(limits: GraphLimits) -> tuple[Bucket, ...]:
    """Returns every graph's shape, the smallest first; of equal num_rows the more specific bucket first."""
    if limits.one_phase:
        found = [*_prompts(limits), *(Bucket(0, size, size, 0) for size in batch_sizes(limits.max_num_seqs))]
    else:
        found = [Bucket(size, 0, 0, 0) for size in batch_sizes(limits.max_num_seqs)]
        if limits.has_prompts:
            found += [*_prompts(limits), *_mixed(limits)]
    return tuple(sorted(found, key=lambda bucket: (bucket.num_rows, bucket.prompt_keys or math.inf)))


def _prompts(limits: GraphLimits) -> Iterator[Bucket]:
    """Prompts alone. In one phase decode rows are among them, and each of these samples."""
    seqs = limits.max_num_seqs
    samples = max(seqs, PROMPT_SAMPLES) if limits.one_phase else PROMPT_SAMPLES
    sizes = prompt_sizes(limits.max_tokens)
    if limits.max_prompt_keys:
        # Fewer, as each is captured with several bounds.
        sizes = tuple(size for size in MIXED_TOKENS if size <= limits.max_tokens)
    for size in sizes:
        for keys in prompt_keys(limits):
            if limits.chooses_keys or not keys or keys >= size:
                yield from _one_or_more(limits, Bucket(0, size, seqs, samples, keys))


def _mixed(limits: GraphLimits) -> Iterator[Bucket]:
    """Prompts beside decode rows."""
    seqs, bounds = limits.max_num_seqs, prompt_keys(limits)
    if limits.chooses_keys:
        bounds = bounds[-1::-2][:2]
    elif limits.max_prompt_keys:
        bounds = tuple(keys for keys in bounds if keys in (*MIXED_KEYS, bounds[-1]))
    for num_decode in (*(few for few in MIXED_DECODE if few < seqs), seqs):
        for size in MIXED_TOKENS:
            for keys in bounds:
                if size <= limits.max_tokens and (limits.chooses_keys or not keys or keys >= size):
                    samples = num_decode + PROMPT_SAMPLES
                    yield from _one_or_more(limits, Bucket(num_decode, size, seqs, samples, keys))


def _one_or_more(limits: GraphLimits, bucket: Bucket) -> Iterator[Bucket]:
    """Yields the bucket.

    For 16 and 32 tokens two more buckets come first: prompts with at most SHORT_KEYS keys, and one single prompt, whose
    attention shares keys among programs. Not for latents or models with states, which gain little or nothing.
    """
    is_plain = not limits.max_prompt_keys and not any(limits.has_states)
    if is_plain and bucket.prompt_tokens in SINGLE_TOKENS and bucket.num_prompts > 1:
        yield bucket._replace(prompt_keys=SHORT_KEYS)
        yield bucket._replace(num_prompts=1)
    yield bucket
