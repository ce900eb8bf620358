"""The script of the tutorial on ZeRO-2: the programs of a sharded step, printed and run.

    torchrun --nproc-per-node 2 examples/trace_zero2.py
    python examples/trace_zero2.py                          prints the same, for rank 0 of 2

Rank 0 prints the forward program, a line of stars, and the backward program. Under torchrun every
rank then runs them, shards the same model and trains a step with it: gradients are the same bits,
and the collectives that ran are those that were printed.
"""

from __future__ import annotations

import torch
from torch import nn

import shardwise as sw

DIM = 64


def create_model() -> nn.Module:
    torch.manual_seed(0)  # the same on every rank
    return nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))


def main() -> None:
    model, x = create_model(), torch.randn(DIM, DIM)
    with sw.connect() as comm:
        ranks = (comm.rank, comm.world_size) if comm.world_size > 1 else (0, 2)
        traced = sw.trace(model, x, "shard_grad_op", ranks)
        if comm.rank == 0:
            print(traced.last_traces[-1])
            print("*******" * 8)
            print(traced.last_backward_traces[-1])
        if comm.world_size > 1:
            compare(comm, model.to(comm.device), x.to(comm.device), traced)


def compare(comm: sw.Comm, model: nn.Module, x: torch.Tensor, traced: sw.Trace) -> None:
    """Run the programs, then the engine, on the device that this machine has."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    comm.counters.reset()
    ran = traced.run(comm, state, x)
    by_program = dict(comm.counters.bytes_sent)

    sharded = sw.shard(model, "shard_grad_op", comm=comm)
    comm.counters.reset()
    with sw.record(sharded) as recording:
        model(x).sum().backward()
    by_engine = {op: comm.counters.bytes_sent.get(op, 0) for op in by_program}

    equal = all(
        torch.equal(param.grad, ran.gradients[name]) for name, param in model.named_parameters()
    )
    same = by_program == by_engine and recording.events == traced.schedule.events
    if comm.rank == 0:
        print(f"program and engine: gradients equal {equal}, collectives equal {same}")


if __name__ == "__main__":
    main()
