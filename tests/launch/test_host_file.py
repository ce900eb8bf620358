from __future__ import annotations

import pytest

from shardwise.errors import ConfigError
from shardwise.launch.host_file import Host, parse_hosts


def test_hosts_and_their_slots() -> None:
    text = "# two machines\ngpu01 slots=8\n\n10.0.0.2   slots = 4  # older\nfe80::1%eth0\n"
    assert parse_hosts(text, "hosts") == (
        Host("gpu01", 8),
        Host("10.0.0.2", 4),
        Host("fe80::1%eth0", 1),
    )


def test_every_wrong_line_is_named() -> None:
    text = "gpu01 slots=8\ngpu02 slot=8\ngpu01 slots=2\ngpu03 slots=0\n"
    with pytest.raises(ConfigError) as caught:
        parse_hosts(text, "hosts")
    assert str(caught.value).splitlines() == [
        "hosts:2 is 'gpu02 slot=8'; write HOST slots=N, with N ≥ 1.",
        "hosts:3 names gpu01, as line 1 does.",
        "hosts:4 is 'gpu03 slots=0'; write HOST slots=N, with N ≥ 1.",
    ]


@pytest.mark.parametrize("line", ["a:2", "[fe80::1]", "-n slots=2"])
def test_what_names_no_host_is_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="write HOST slots=N"):
        parse_hosts(line, "hosts")


def test_a_file_without_hosts() -> None:
    with pytest.raises(ConfigError, match="hosts names no host; write a line HOST slots=N"):
        parse_hosts("# none\n", "hosts")


def test_a_file_of_another_kind_is_told_in_a_few_lines() -> None:
    with pytest.raises(ConfigError, match=r"hosts:1 is .*; write HOST slots=N"):
        parse_hosts("\ufffd\ufffd\0", "hosts")
    with pytest.raises(ConfigError, match=r"So are 97 more lines\.$") as caught:
        parse_hosts("no host at all\n" * 100, "hosts")
    assert len(str(caught.value).splitlines()) == 4
