"""What goes wrong with the store and its values.

HostTierError                 a call to the host tier failed
├── ErrorReply                Redis replied with an error, which was read whole
└── TooLongReply              a value is longer than its reader expects
PageRejected                  bytes from the host tier are not the page that was asked for
PageAbsent                    a page, or a part of it, is not there
RedisUrlError                 the address of the host tier: session/redis_url.py
"""

from __future__ import annotations


class HostTierError(Exception):
    """The host tier did not reply in time, sent a malformed reply, or refused the connection."""


class ErrorReply(HostTierError):
    """Redis replied with an error. The reply was read whole, so the connection can be used again."""

    @property
    def code(self) -> str:
        return str(self).partition(" ")[0]


class TooLongReply(HostTierError):
    """The value is longer than the caller's limit. It stays unread, so the connection is closed."""


class PageRejected(Exception):
    """These bytes are not the page that was asked for; to the reader it is a miss."""


class PageAbsent(Exception):
    """The page is not there, or a part of it is not."""
