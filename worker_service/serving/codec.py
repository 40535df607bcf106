"""ModelWorker's messages between protobuf and the worker's core; bad input is an InvalidField that names the field.

The ranges of sampling parameters are in `SamplingParams.validate`.
"""

from __future__ import annotations

import math
import secrets
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from protos.v1 import types_pb2, worker_pb2
from rpc.version import package_version
from session.limits import MAX_NAME_CHARS
from session.wire.parts import encode_group_spec, encode_namespace
from session.words import GroupSpec, Namespace
from worker_service.core.errors import InvalidField
from worker_service.core.sampling_params import MAX_STOP_STRINGS, MAX_STOP_TOKENS, SamplingParams, TokenLogprobs
from worker_service.core.sequence import FinishReason, Timing, Usage

DEFAULT_MAX_TOKENS = 16
MAX_STOP_CHARS = 1024
MAX_PRIORITY = 1000
_FINISH = {
    FinishReason.STOP: worker_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: worker_pb2.FINISH_REASON_LENGTH,
}


class VocabLimits(NamedTuple):
    vocab_size: int
    max_model_len: int


def pack_tokens(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def check_prompt_tokens(field: str, packed: bytes, limits: VocabLimits) -> bytes:
    """Returns `packed` unchanged. Raises InvalidField unless it holds at least one token, all within the vocabulary."""
    if len(packed) % 4:
        raise InvalidField(field, f"length {len(packed)} is no multiple of 4")
    if not packed:
        raise InvalidField(field, "must hold at least one token")
    tokens = array("i")
    tokens.frombytes(packed)
    if len(tokens) >= limits.max_model_len:
        raise InvalidField(
            field, f"{len(tokens)} tokens leave no room for an answer; max_model_len is {limits.max_model_len}"
        )
    if min(tokens) < 0 or max(tokens) >= limits.vocab_size:
        raise InvalidField(field, f"token ids must be within 0..{limits.vocab_size - 1}")
    return packed


def _checked_name(field: str, text: str) -> str:
    if len(text) > MAX_NAME_CHARS:
        raise InvalidField(field, f"must have at most {MAX_NAME_CHARS} characters")
    return text


def _checked_priority(priority: int) -> int:
    """The range is narrow enough that a client's overflowing or made-up number is noticed."""
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidField("priority", f"must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, not {priority}")
    return priority


class GenerateCall(NamedTuple):
    """A Generate message after all checks that need no tokenizer; `prompt` is packed tokens, or text to be encoded."""

    request_id: str
    namespace: Namespace
    sampling: SamplingParams
    priority: int
    prompt: bytes | str


def decode_generate(message: worker_pb2.GenerateRequest, facts: WorkerDescription) -> GenerateCall:
    """Raises InvalidField for the first field that is out of its range or missing."""
    return GenerateCall(
        _checked_name("request_id", message.request_id),
        decode_namespace(message.salt, message.adapter, facts.model),
        _decode_sampling(message.sampling, facts.limits),
        _checked_priority(message.priority),
        _decode_prompt(message, facts.limits),
    )


def decode_namespace(salt: str, adapter: str, model: str) -> Namespace:
    """Raises InvalidField for a salt that is too long, and for any adapter."""
    _checked_name("salt", salt)
    if adapter:
        raise InvalidField("adapter", f"{adapter[:64]!r} is not loaded; this worker serves the bare model")
    return Namespace(model, "", salt)


def _decode_prompt(message: worker_pb2.GenerateRequest, limits: VocabLimits) -> bytes | str:
    match message.WhichOneof("prompt"):
        case "token_ids":
            return check_prompt_tokens("token_ids", message.token_ids.ids, limits)
        case "text":
            return message.text
    raise InvalidField("prompt", "needs text or token_ids")


def _decode_sampling(message: worker_pb2.SamplingParams, limits: VocabLimits) -> SamplingParams:
    """Zero means the default that the protocol names, except where a field knows whether it was set.

    A top_k of the vocabulary's size or more keeps every token, so it is off; some clients send 2^32 - 1 for that.
    """
    _require_finite(message)
    if len(message.stop) > MAX_STOP_STRINGS:
        raise InvalidField("sampling.stop", f"must be at most {MAX_STOP_STRINGS} strings, not {len(message.stop)}")
    sampling = SamplingParams(
        max_tokens=message.max_tokens or DEFAULT_MAX_TOKENS,
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k if message.top_k < limits.vocab_size else 0,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty or 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        seed=message.seed if message.HasField("seed") else secrets.randbits(63),
        stop=tuple(message.stop),
        stop_token_ids=_stop_token_ids(message.stop_token_ids, limits.vocab_size),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        include_stop_token_text=message.include_stop_token_text,
    )
    try:
        sampling.validate()
    except InvalidField as error:
        raise InvalidField(f"sampling.{error.field}", error.reason) from None
    if any(len(stop) > MAX_STOP_CHARS for stop in sampling.stop):
        raise InvalidField("sampling.stop", f"strings must have at most {MAX_STOP_CHARS} characters")
    return sampling


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def _require_finite(message: worker_pb2.SamplingParams) -> None:
    for name in ("temperature", "top_p", "min_p", *PENALTIES):
        if not math.isfinite(getattr(message, name)):
            raise InvalidField(f"sampling.{name}", "must be a finite number")


def _stop_token_ids(packed: bytes, vocab_size: int) -> frozenset[int]:
    if len(packed) % 4:
        raise InvalidField("sampling.stop_token_ids", f"length {len(packed)} is no multiple of 4")
    if len(packed) > 4 * MAX_STOP_TOKENS:
        raise InvalidField("sampling.stop_token_ids", f"must be at most {MAX_STOP_TOKENS} token ids")
    tokens = array("i")
    tokens.frombytes(packed)
    if any(not 0 <= token < vocab_size for token in tokens):
        raise InvalidField("sampling.stop_token_ids", f"must be within 0..{vocab_size - 1}")
    return frozenset(tokens)


def encode_piece(tokens: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]) -> worker_pb2.GenerateResponse:
    return worker_pb2.GenerateResponse(
        token_ids=pack_tokens(tokens),
        text=text,
        logprobs=[
            worker_pb2.TokenLogprobs(
                logprob=item.sampled,
                top_ids=pack_tokens([token_id for token_id, _ in item.top]),
                top_logprobs=[value for _, value in item.top],
            )
            for item in logprobs
        ],
    )


def encode_finish_reason(reason: FinishReason) -> worker_pb2.FinishReason.ValueType:
    return _FINISH[reason]


def encode_usage(usage: Usage, timing: Timing) -> worker_pb2.Usage:
    return worker_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        fetched_tokens=usage.fetched_tokens,
        computed_tokens=usage.computed_tokens,
        generated_tokens=usage.generated_tokens,
        num_preemptions=usage.num_preemptions,
        time_to_first_token_s=timing.time_to_first_token_s,
        queued_s=timing.queued_s,
        matched_tokens=usage.matched_tokens,
        usable_tokens=usage.usable_tokens,
        limiting_group=usage.limiting_group,
        miss_reason=types_pb2.MissReason.ValueType(usage.miss_reason),
    )


class WorkerDescription(NamedTuple):
    """The fields of Describe that do not change while the worker runs."""

    worker_id: str
    incarnation: str
    model_type: str
    model: str
    page_tokens: int
    limits: VocabLimits
    device: str
    dtype: str
    groups: tuple[GroupSpec, ...]
    config: Mapping[str, str]


def encode_description(
    facts: WorkerDescription, *, running: int, waiting: int, held: int, epoch: str, draining: bool
) -> worker_pb2.DescribeResponse:
    return worker_pb2.DescribeResponse(
        worker_id=facts.worker_id,
        incarnation=facts.incarnation,
        model_type=facts.model_type,
        namespace=encode_namespace(Namespace(facts.model)),
        page_tokens=facts.page_tokens,
        max_model_len=facts.limits.max_model_len,
        vocab_size=facts.limits.vocab_size,
        device=facts.device,
        dtype=facts.dtype,
        groups=[encode_group_spec(spec) for spec in facts.groups],
        num_running=running,
        num_waiting=waiting,
        num_held=held,
        cache_epoch=epoch,
        draining=draining,
        config=dict(facts.config),
        version=package_version(),
    )
