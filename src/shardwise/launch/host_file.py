"""Host files of MPI and DeepSpeed: a host and its slots on each line."""

from __future__ import annotations

import re
from typing import NamedTuple

from shardwise.errors import ConfigError

MOST = 3  # problems that are told one by one
# A name, or an address of IPv4 or IPv6: one colon begins a port, or slots as MPICH has them.
HOST = r"\w[\w.-]*|(?:[\da-fA-F]*:){2,}[\da-fA-F.]*(?:%[\w.-]+)?"
_LINE = re.compile(rf"(?P<name>{HOST})(\s+slots\s*=\s*(?P<slots>\d+))?")


class Host(NamedTuple):
    """A machine and how many ranks it takes."""

    name: str
    slots: int


def parse_hosts(text: str, path: str) -> tuple[Host, ...]:
    """The hosts of a file in its order; a line is ``HOST``, or ``HOST slots=N``.

    Raises:
        ConfigError: with every line that is none, or names a host again; or there is no host.
    """
    lines: dict[str, int] = {}
    hosts, problems = [], []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        match = _LINE.fullmatch(content)
        if not content:
            continue
        if match is None or match["slots"] == "0":
            problems.append(f"{path}:{number} is {content!r}; write HOST slots=N, with N ≥ 1.")
        elif match["name"] in lines:
            first = lines[match["name"]]
            problems.append(f"{path}:{number} names {match['name']}, as line {first} does.")
        else:
            lines[match["name"]] = number
            hosts.append(Host(match["name"], int(match["slots"] or 1)))
    if not (hosts or problems):
        problems.append(f"{path} names no host; write a line HOST slots=N for each.")
    if problems:
        more = [f"So are {len(problems) - MOST:,} more lines."] * (len(problems) > MOST)
        raise ConfigError("\n".join([*problems[:MOST], *more]))
    return tuple(hosts)
