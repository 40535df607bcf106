"""Fills a frozen dataclass of settings from the environment and from flags; flags win.

The dataclass's fields say name, type, default, range and whether a value is secret. An unknown key or a bad value is a
SettingsError that names it.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import typing
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NoReturn, TypeVar

from rpc.logs import REDACTED, redact_url

T = TypeVar("T")

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class SettingsError(Exception):
    """A key that does not exist, or a value that its setting does not take."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key = key
        self.reason = reason


def setting(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
    secret: bool = False,
) -> Any:
    """Returns a dataclass field that `load` and `describe` understand."""
    metadata = {"help": help, "minimum": minimum, "maximum": maximum, "choices": tuple(choices), "secret": secret}
    return dataclasses.field(default=default, metadata=metadata)


def load(cls: type[T], prefix: str, argv: Sequence[str], environ: Mapping[str, str], prog: str = "") -> T:
    """Returns `cls` with the values of `PREFIX_NAME` variables and `--name` flags. --help exits; raises
    SettingsError."""
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    kinds = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, text in environ.items():
        if key.startswith(prefix):
            name = key.removeprefix(prefix).lower()
            if name not in fields or key != key.upper():
                raise SettingsError(key, f"no such setting{_hint(prefix, name, fields)}")
            values[name] = _parse(key, text, kinds[name], fields[name].metadata)
    flags = vars(_parser(fields, prefix, prog).parse_args(list(argv)))
    for name, text in flags.items():
        if text is not None:
            values[name] = _parse(_flag(name), text, kinds[name], fields[name].metadata)
    return cls(**values)


def _hint(prefix: str, name: str, fields: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, fields, 1)
    return f"; did you mean {prefix}{close[0].upper()}?" if close else ""


def describe(config: Any) -> dict[str, str]:
    """Returns every setting in force, with secrets struck out; for logs."""
    described = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        text = str(value.value if isinstance(value, Enum) else value)
        if field.metadata.get("secret") and text:
            text = redact_url(text) if "://" in text else REDACTED
        described[field.name] = text
    return described


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError("arguments", message)


def _parser(fields: Mapping[str, dataclasses.Field[Any]], prefix: str, prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog or None, allow_abbrev=False, epilog=f"Each setting can also come from {prefix}<NAME>; flags win."
    )
    for name, field in fields.items():
        default = field.default.value if isinstance(field.default, Enum) else field.default
        allowed = f" One of: {', '.join(field.metadata['choices'])}." if field.metadata["choices"] else ""
        text = f"{field.metadata['help']}{allowed} Default: {default!r}."
        parser.add_argument(_flag(name), dest=name, default=None, metavar="VALUE", help=text.replace("%", "%%"))
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parse(key: str, text: str, kind: Any, metadata: Mapping[str, Any]) -> Any:
    choices = metadata["choices"]
    if choices and text not in choices:
        raise SettingsError(key, f"must be one of {', '.join(choices)}")
    try:
        value = _convert(text, kind)
    except ValueError:
        # The text may be a secret in the wrong place, so it is not repeated.
        raise SettingsError(key, f"is not a valid {_kind_name(kind)}") from None
    low, high = metadata["minimum"], metadata["maximum"]
    # In this form NaN is refused, too.
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        raise SettingsError(key, f"must be {_range(low, high)}")
    return value


def _convert(text: str, kind: Any) -> Any:
    if kind is bool:
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise ValueError(text)
    return kind(text)


def _kind_name(kind: Any) -> str:
    names = {int: "whole number", float: "number", bool: "truth value (true or false)", str: "text"}
    return names.get(kind, str(getattr(kind, "__name__", kind)))


def _range(low: float | None, high: float | None) -> str:
    if low is None:
        return f"at most {high}"
    return f"at least {low}" if high is None else f"between {low} and {high}"
