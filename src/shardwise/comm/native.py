"""Ranks as processes whose backend's own collectives are the fast ones: NCCL, XCCL, HCCL.

Reductions have a communicator of their own: on a shared one, a gather that the forward pass
waits for would queue behind the reductions of the backward pass. A narrow wire is summed wide by
an all-to-all and a local sum, where the ordinary way widens first and sends twice the bytes.

These backends have no tags. Unlike collectives are found by the watch, from the ranks' cursors.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from time import monotonic
from types import TracebackType
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store, Work

from shardwise.comm.disagree import Collective
from shardwise.comm.local import Done
from shardwise.comm.peers import (
    InFlight,
    agree,
    check_splits,
    pieces_of,
    sum_in_rank_order,
)
from shardwise.comm.protocol import Counters, Label, Pending
from shardwise.comm.watch import Wait, Watch, how_this_process_ends

