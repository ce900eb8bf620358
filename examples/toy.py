"""The toy program of Intel's article on FSDP for Gaudi, on whatever this machine has.

python examples/toy.py                                 two processes, by mp.spawn
torchrun --nproc-per-node 2 examples/toy.py            the same, by torchrun; or by mpirun, srun

shardwise.comm and shardwise.launch are no public names: they are here so that `python` alone and
each launcher start the same file. A program for one launcher needs neither.
"""

import argparse
import os
import sys

if {"-v", "--verbose"} & set(sys.argv):  # torch reads these when it is imported
    os.environ["TORCH_CPP_LOG_LEVEL"] = "INFO"
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"
    os.environ["TORCHDYNAMO_VERBOSE"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import Linear
from torch.optim import SGD

import shardwise as sw
from shardwise.comm.machine.environment import read_launch
from shardwise.launch.ports import free_port

PORT = 12355


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1 = Linear(3, 3, bias=False)

    def forward(self, x):
        return self.lin1(x)


def spawned(rank, world_size, args):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    simple_demo(rank, world_size, args)


def simple_demo(rank, world_size, args):
    torch.manual_seed(0)
    input = torch.rand(world_size, 3)

    with sw.connect() as comm:
        model = ToyModel()  # on the CPU: only this rank's shards go to the device
        sw.shard(model, comm=comm)

        optim = SGD(model.parameters(), lr=0.1)
        in_data = input[rank].to(comm.device)
        for _ in range(args.iterations):
            out = model(in_data)
            loss = out.float().sum()
            loss.backward()
            optim.step()
            optim.zero_grad()

        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        if rank == 0:
            print(f"Final loss: {mean.item():.6f}", flush=True)
    print("All done", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Simple_demo Example")
    parser.add_argument(
        "--iterations", type=int, default=5, metavar="I", help="iterations (default: 5)"
    )
    parser.add_argument("--ws", type=int, default=2, help="world size (default: 2)")
    parser.add_argument("-v", "--verbose", action="store_true", help="Enable verbosity")
    args = parser.parse_args()

    if launch := read_launch(os.environ):  # of torchrun, mpirun or srun
        simple_demo(launch.rank, launch.size, args)
    else:
        port = free_port(PORT)
        if port != PORT:
            print(f"port {PORT} is in use: the ranks meet at port {port}", flush=True)
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
        mp.spawn(spawned, args=(args.ws, args), nprocs=args.ws, join=True)
