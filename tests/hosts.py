"""The command line of this tree on hosts that are namespaces; it is forked where a test is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.harness.hosts import Host, problem

needs_hosts = pytest.mark.skipif(
    bool(problem()) and not (os.environ.get("CI") and os.geteuid() == 0), reason=problem() or "-"
)
HIDDEN = ("GLOO_SOCKET_IFNAME", "SHARDWISE_RUN_TOKEN")

# A forked interpreter has imported torch, and enters by itself: its child is in all namespaces.
ENTER = """
import ctypes, os, platform, runpy, signal, sys
process, *words = sys.argv[1:]
libc, folder = ctypes.CDLL(None, use_errno=True), os.getcwd()
files = [open(f"/proc/{process}/ns/{kind}") for kind in ("net", "uts", "pid", "mnt")]
for file in files:
    assert libc.setns(file.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
os.chdir(folder)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
libc.prctl(1, signal.SIGKILL)
platform._uname_cache = None
sys.argv = ["shardwise", *words]
runpy.run_module("shardwise.cli", run_name="__main__", alter_sys=True)
"""


def shardwise(host: Host, *words: str, **variables: str) -> subprocess.Popen[str]:
    """``shardwise`` with these words on a host."""
    clean = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    return subprocess.Popen(
        [sys.executable, "-c", ENTER, str(host.process), *words],
        env=clean | {"OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
