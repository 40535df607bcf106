"""The address of a Redis: session/redis_url.py has its rules, which the cache service keeps too."""

from session.redis_url import RedisAddress, RedisUrlError, parse_redis_url

__all__ = ["RedisAddress", "RedisUrlError", "parse_redis_url"]
