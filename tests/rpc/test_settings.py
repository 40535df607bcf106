"""Settings from flags and environment: what wins, what is refused and by which name, and what stays secret."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest

from rpc.settings import SettingsError, describe, load, setting


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Sample:
    name: str = setting("anon", "A name.")
    num_pages: int = setting(5, "A count.", minimum=1, maximum=10)
    share: float = setting(0.5, "A share, in 100 % of cases.", minimum=0, maximum=1)
    fast: bool = setting(False, "A switch.")
    kind: str = setting("lru", "A choice.", choices=("lru", "slru"))
    colour: Colour = setting(Colour.RED, "An enum.")  # noqa: RUF009 - setting() gives a field
    url: str = setting("", "A secret.", secret=True)
    key: str = setting("", "Another secret.", secret=True)


def sample(*argv: str, **environ: str) -> Sample:
    return load(Sample, "APP_", argv, {f"APP_{key}": value for key, value in environ.items()})


def test_defaults() -> None:
    assert sample() == Sample("anon", 5, 0.5, False, "lru", Colour.RED, "", "")


def test_flags_win_over_the_environment() -> None:
    got = sample("--num-pages", "7", "--fast=on", NUM_PAGES="3", SHARE="0.25", COLOUR="blue")
    assert got == Sample(num_pages=7, share=0.25, fast=True, colour=Colour.BLUE)


def test_other_variables_are_none_of_our_business() -> None:
    assert load(Sample, "APP_", [], {"PATH": "/bin", "APPLE": "1"}) == Sample()


@pytest.mark.parametrize(
    ("key", "environ"),
    [
        ("APP_NUM_PAGE", {"NUM_PAGE": "3"}),
        ("APP_num_pages", {"num_pages": "3"}),
        ("APP_NUM_PAGES", {"NUM_PAGES": "3.5"}),
        ("APP_NUM_PAGES", {"NUM_PAGES": "0"}),
        ("APP_NUM_PAGES", {"NUM_PAGES": "11"}),
        ("APP_SHARE", {"SHARE": "nan"}),
        ("APP_SHARE", {"SHARE": "1.5"}),
        ("APP_FAST", {"FAST": "perhaps"}),
        ("APP_KIND", {"KIND": "fifo"}),
        ("APP_COLOUR", {"COLOUR": "green"}),
    ],
)
def test_a_bad_variable_is_named(key: str, environ: dict[str, str]) -> None:
    with pytest.raises(SettingsError) as caught:
        sample(**environ)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        ("--num-pages: is not a valid whole number", ["--num-pages", "many"]),
        ("--kind: must be one of lru, slru", ["--kind=x"]),
        ("--share: must be between 0 and 1", ["--share", "-0.5"]),
        ("unrecognized arguments: --num-page 3", ["--num-page", "3"]),
        ("expected one argument", ["--name"]),
    ],
)
def test_a_bad_flag_is_named(text: str, argv: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        sample(*argv)
    assert text in str(caught.value)


def test_a_bad_value_is_not_repeated() -> None:
    """It may be a password that slipped by one place."""
    with pytest.raises(SettingsError) as caught:
        sample(NUM_PAGES="hunter2")
    assert "hunter2" not in str(caught.value)


def test_secrets_are_struck_out() -> None:
    described = describe(sample(URL="redis://me:hunter2@host:1/0", KEY="hunter2"))
    assert "hunter2" not in str(described)
    assert described["url"] == "redis://me:***@host:1/0"
    assert described["colour"] == "red"
    assert describe(Sample())["url"] == ""


def test_help_tells_every_setting(capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        sample("--help")
    assert caught.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    for text in ("--num-pages", "in 100 % of cases", "One of: lru, slru", "APP_<NAME>", "Default: 'red'"):
        assert text in told
