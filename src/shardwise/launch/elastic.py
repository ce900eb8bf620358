"""One process per rank on this machine, through the launcher that torchrun is made of.

What torchrun says when a rank fails is some sixty lines, with the reason in the middle or, if the
rank died of its own error, not at all. Here a rank leaves its reason where the launcher looks for
it, and the launcher raises the reason of the rank that failed first, and nothing else.

Everything stays on the loopback interface; nothing is reachable from outside.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwise.errors import RanksDisagree, ShardwiseError

__all__ = ["cores", "environment", "leave_reason", "reason", "reasons_left", "start"]

REPORT = "TORCHELASTIC_ERROR_FILE"  # where the elastic launcher looks for a rank's reason
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
LOOPBACK = {"Linux": "lo", "Darwin": "lo0"}


def start(command: Sequence[str], ranks: int) -> None:
    """Run ``command`` as ``ranks`` processes of this machine until all have ended.

    Each gets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as under torchrun, writes
    to this process's terminal, and has its share of the cores. If one fails, the others are ended.

    Args:
        command: a program and its arguments.
        ranks: how many.

    Raises:
        ShardwiseError: a rank failed; the message is its reason.
        KeyboardInterrupt: the user pressed Ctrl-C.
        SystemExit: this process was told to end by another signal.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    for name in list(logging.Logger.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder, _lent(environment(ranks)):
        try:
            elastic_launch(_config(ranks, folder), command[0])(*command[1:])
        except ChildFailedError as error:
            raise ShardwiseError(reason(error.failures)) from None
        except SignalException as stop:
            if stop.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            sys.exit(128 + stop.sigval)


def _config(ranks: int, folder: str) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # port 0: the system chooses a free one
        local_addr="127.0.0.1",
        max_restarts=0,
        signals_to_handle=",".join(number.name for number in SIGNALS),
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        shutdown_timeout=5,
    )


def cores() -> int:
    """The cores that this process may use."""
    if platform.system() == "Linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def environment(ranks: int) -> dict[str, str]:
    """What ranks need besides the launcher's variables, where the user has not set it."""
    wanted = {"OMP_NUM_THREADS": str(max(1, cores() // ranks))}
    if platform.system() in LOOPBACK:
        # Otherwise gloo listens on the address that the host's name resolves to.
        wanted["GLOO_SOCKET_IFNAME"] = LOOPBACK[platform.system()]
    return {name: value for name, value in wanted.items() if name not in os.environ}


@contextmanager
def _lent(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the processes started inside; afterwards all is as before.

    The elastic launcher sets variables and signal handlers of its own and leaves them.
    """
    environ = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in set(os.environ) - set(environ):
            del os.environ[name]
        os.environ.update(environ)
        for number, handler in handlers.items():
            signal.signal(number, handler)


# --- why a rank failed -----------------------------------------------------------------------


@contextmanager
def reasons_left() -> Iterator[None]:
    """An error inside is raised as always, and first left as this rank's reason.

    Use it inside ``with connect()``: once that ends, the others know that this rank is gone,
    and the launcher may end it before it can say why.
    """
    try:
        yield
    except Exception as error:
        leave_reason(error)
        raise


def leave_reason(error: BaseException) -> bool:
    """Leave this rank's reason where its launcher looks for it; the first one stays.

    An error of ours explains itself; any other comes with its traceback.

    Returns:
        Whether there is a launcher that will read it.
    """
    path = os.environ.get(REPORT)
    if path is None:
        return False
    if Path(path).exists():
        return True
    said = str(error)
    if not isinstance(error, ShardwiseError):
        said = "".join(traceback.format_exception(error)).rstrip()
    now = time.time()
    extra = {
        "py_callstack": said,
        "timestamp": str(int(now)),
        "exact": now,
        "follows": isinstance(error, RanksDisagree),
    }
    Path(path).write_text(json.dumps({"message": {"message": said, "extraInfo": extra}}), "utf-8")
    return True


def reason(failures: Mapping[int, ProcessFailure]) -> str:
    """What to tell the user: the reason of the rank that failed first."""
    rank, failure = min(failures.items(), key=lambda item: _suspicion(item[1]))
    said = _left(failure)
    if said:
        return f"rank {rank}: {said['message']}"
    if failure.exitcode >= 0:
        return f"rank {rank} ended with status {failure.exitcode} and left no reason; see above."
    advice = (
        "If nobody did so on purpose, the system was out of memory: lower batch.micro or "
        "data.context, or use a smaller model."
    )
    killed = f"rank {rank} (process {failure.pid}) was killed by {failure.signal_name()}."
    return f"{killed} {advice}" if failure.exitcode == -signal.SIGKILL else killed


def _suspicion(failure: ProcessFailure) -> tuple[int, float]:
    """The smaller, the likelier is it the cause and not a consequence.

    A rank that crashed could leave nothing, and the others' errors follow from its death. So
    does, mostly, what ranks say of each other. And a rank that was told to end (SIGTERM) was
    told so by the launcher, since another had failed.
    """
    said = _left(failure)
    if said:
        extra = said["extraInfo"]
        follows = extra.get("follows", False)
        return (2 if follows else 1), float(extra.get("exact", failure.timestamp))
    return (3 if failure.exitcode == -signal.SIGTERM else 0), float(failure.timestamp)


def _left(failure: ProcessFailure) -> dict[str, Any]:
    """What the rank left for us: a message and its surroundings, or nothing."""
    message = failure.error_file_data["message"]
    return message if isinstance(message, dict) else {}
