"""Hello and Welcome, the first messages of a stream, to and from protobuf."""

from __future__ import annotations

from protos.v1 import cache_pb2
from session.errors import InvalidInput
from session.hello_check import check_hello
from session.limits import MAX_GROUPS, MAX_NAME_CHARS, SessionLimits
from session.messages import Hello, Welcome
from session.protocol import CAPABILITIES, PROTOCOL_VERSION
from session.wire import fields
from session.wire.parts import as_fields, decode_forget, decode_group_spec, encode_group_spec
from session.words import HostTierKind, WorkerId

FINGERPRINT_BYTES = 32
MAX_CAPABILITIES = 64
# The other limits are at least 1.
LIMITS_THAT_MAY_BE_ZERO = {"max_kept_bytes", "grace_ms"}


def encode_hello(value: Hello) -> cache_pb2.WorkerMessage:
    told = {**as_fields(value), "groups": [encode_group_spec(spec) for spec in value.groups]}
    return cache_pb2.WorkerMessage(hello=cache_pb2.Hello(protocol_version=PROTOCOL_VERSION, **told))


def decode_hello(message: cache_pb2.Hello) -> Hello:
    if message.protocol_version != PROTOCOL_VERSION:
        reason = f"is {message.protocol_version}; this service speaks {PROTOCOL_VERSION}"
        raise InvalidInput("hello.protocol_version", reason)
    fields.nothing_unknown(message, "hello")
    fields.at_most(len(message.capabilities), "hello.capabilities", MAX_CAPABILITIES)
    for i, name in enumerate(message.capabilities):
        if name not in CAPABILITIES:
            raise InvalidInput(f"hello.capabilities[{i}]", f"{name[:MAX_NAME_CHARS]!r} is none of this service's")
    if len(message.fingerprint) != FINGERPRINT_BYTES:
        reason = f"has {len(message.fingerprint)} bytes; must be {FINGERPRINT_BYTES}"
        raise InvalidInput("hello.fingerprint", reason)
    fields.in_range(len(message.groups), "hello.groups", 1, MAX_GROUPS)
    hello = Hello(
        worker_id=WorkerId(fields.text(message.worker_id, "hello.worker_id")),
        endpoint=fields.text(message.endpoint, "hello.endpoint"),
        incarnation=fields.text(message.incarnation, "hello.incarnation"),
        fingerprint=message.fingerprint,
        page_tokens=message.page_tokens,
        groups=tuple([decode_group_spec(group, f"hello.groups[{i}]") for i, group in enumerate(message.groups)]),
        host_tier=fields.member(HostTierKind, message.host_tier, "hello.host_tier"),
        host_tier_id=fields.text(message.host_tier_id, "hello.host_tier_id"),
        num_ranks=message.num_ranks,
        model=fields.text(message.model, "hello.model", required=True),
        generation=message.generation,
        capabilities=tuple(message.capabilities),
        started_ns=message.started_ns,
    )
    check_hello(hello)
    return hello


def encode_welcome(value: Welcome) -> cache_pb2.ManagerMessage:
    return cache_pb2.ManagerMessage(welcome=cache_pb2.Welcome(**as_fields(value)))


def decode_welcome(message: cache_pb2.Welcome) -> Welcome:
    limits = SessionLimits(*(getattr(message.limits, field) for field in SessionLimits._fields))
    for field, limit in limits._asdict().items():
        if not limit and field not in LIMITS_THAT_MAY_BE_ZERO:
            raise InvalidInput(f"welcome.limits.{field}", "must be at least 1")
    if not message.generation:
        raise InvalidInput("welcome.generation", "must be at least 1")
    forget = decode_forget(message.forget, "welcome.forget") if message.HasField("forget") else None
    capabilities = tuple(message.capabilities)
    return Welcome(message.epoch, message.generation, message.last_step_id, limits, capabilities, forget)
