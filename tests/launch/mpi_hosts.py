"""Open MPI over hosts that are namespaces: what it takes for ``ssh`` enters them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.hosts import Host

AGENT = """\
#!/bin/sh
case $1 in
{cases}
esac
shift
exec nsenter --target="$process" --net --mount --uts --pid sh -c "$*"
"""


def over(machines: Sequence[Host], folder: Path) -> tuple[list[str], dict[str, str]]:
    """Words before ``mpirun``, which then runs beside the last host, and its variables.

    ``folder`` gets a host file of the others.
    """
    *ranks, head = machines
    cases = "\n".join(f"{host.address}) process={host.process};;" for host in ranks)
    agent = folder / "agent"
    agent.write_text(AGENT.format(cases=cases))
    agent.chmod(0o755)
    (folder / "hosts").write_text("".join(f"{host.address} slots=2\n" for host in ranks))
    allowed = {f"OMPI_ALLOW_RUN_AS_ROOT{which}": "1" for which in ("", "_CONFIRM")}
    variables = {**os.environ, **allowed, "OMPI_MCA_plm_rsh_agent": str(agent)}
    return ["nsenter", f"--net=/proc/{head.process}/ns/net"], variables
