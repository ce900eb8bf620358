"""The MNIST program of Intel's tutorial on FSDP for XPU, on whatever this machine has.

    python examples/mnist.py --save-model                  one process for each device
    torchrun --nproc-per-node 2 examples/mnist.py          the same, by torchrun

MNIST's four files are read from ../data (--data), packed or not, as torchvision leaves them.
Where they are not, scikit-learn's 1,797 small digits are used, which need no download.

shardwise.comm and shardwise.launch are no public names: they are here so that `python` alone and
each launcher start the same file. A program for one launcher needs neither.
"""

import argparse
import gzip
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import shardwise as sw
from shardwise.comm.machine.devices import device_count
from shardwise.comm.machine.environment import read_launch
from shardwise.launch.ports import free_port

PORT = 12355
CPU_RANKS = 2

WRAPS = {
    "size": sw.wrap.by_size(min_num_params=100),
    "hand": sw.wrap.by_hand("conv2", ("fc1", "fc2")),  # two units; conv1 is left to the root
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = self.dropout2(x)
        x = self.fc2(x)
        return F.log_softmax(x, dim=1)


# --- data -------------------------------------------------------------------------------------


def read_idx(path):
    """MNIST's own format: two zeros, type, number of dimensions; their sizes; bytes."""
    packed = path.with_name(path.name + ".gz")
    data = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
    shape = np.frombuffer(data, ">i4", count=data[3], offset=4)
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3])
    return torch.from_numpy(values.reshape(shape).copy())


def find_mnist(folder):
    """The folder with the four files, or None."""
    for place in (folder, folder / "MNIST" / "raw"):
        if len({path.name.removesuffix(".gz") for path in place.glob("*-ubyte*")}) >= 4:
            return place
    return None


def read_mnist(place):
    for part in ("train", "t10k"):
        images = read_idx(place / f"{part}-images-idx3-ubyte").unsqueeze(1) / 255
        yield (images - 0.1307) / 0.3081, read_idx(place / f"{part}-labels-idx1-ubyte").long()


def read_digits():
    """1,540 digits to train with and each seventh, 257, to test: 8 × 8 pixels made 28 × 28."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    images = (F.interpolate(images, size=28, mode="bilinear") - 0.3053) / 0.3547
    classes = torch.from_numpy(digits.target).long()
    tested = torch.arange(len(images)) % 7 == 0
    return (images[~tested], classes[~tested]), (images[tested], classes[tested])


def prepare(folder, rank):
    """Both data sets. Rank 0 reads and converts them once; the others wait, and map its files."""
    place = find_mnist(folder)
    file = folder / ("mnist.pt" if place else "digits.pt")
    if rank == 0:
        if place is None:
            print("using built-in digits (offline)", flush=True)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(list(read_mnist(place) if place else read_digits()), f"{file}.part")
            Path(f"{file}.part").replace(file)
    dist.barrier()
    return [TensorDataset(*both) for both in torch.load(file, mmap=True)]


# --- training ---------------------------------------------------------------------------------


def train(model, device, train_loader, optimizer, epoch, sampler):
    model.train()
    ddp_loss = torch.zeros(2, device=device)
    sampler.set_epoch(epoch)
    for data, target in train_loader:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target, reduction="sum")
        loss.backward()
        optimizer.step()
        ddp_loss[0] += loss.item()
        ddp_loss[1] += len(data)

    dist.all_reduce(ddp_loss, op=dist.ReduceOp.SUM)
    if dist.get_rank() == 0:
        print(f"Train Epoch: {epoch} \tLoss: {ddp_loss[0] / ddp_loss[1]:.6f}", flush=True)


def test(model, device, test_loader):
    """Every rank runs as many batches, so the sampler repeats some samples: they do not count."""
    model.eval()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ddp_loss = torch.zeros(3, device=device)
    place = rank  # in the sampler's list, of which each rank takes every world_size-th
    with torch.no_grad():
        for data, target in test_loader:
            places = torch.arange(place, place + world_size * len(data), world_size)
            real = (places < len(test_loader.dataset)).to(device)
            place += world_size * len(data)

            data, target = data.to(device), target.to(device)
            output = model(data)
            ddp_loss[0] += F.nll_loss(output, target, reduction="none")[real].sum().item()
            pred = output.argmax(dim=1)  # the index of the max log-probability
            ddp_loss[1] += pred.eq(target)[real].sum().item()
            ddp_loss[2] += real.sum().item()

    dist.all_reduce(ddp_loss, op=dist.ReduceOp.SUM)
    if rank == 0:
        loss, correct, count = ddp_loss.tolist()
        print(
            f"Test set: Average loss: {loss / count:.4f}, "
            f"Accuracy: {int(correct)}/{int(count)} ({100.0 * correct / count:.2f}%)\n",
            flush=True,
        )


# --- time -------------------------------------------------------------------------------------


def now(device):
    """An event of the device, recorded; on the CPU, which has none, the clock."""
    if device.type == "cpu":
        return time.monotonic()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds(start, end):
    if isinstance(start, float):
        return end - start
    end.synchronize()  # until then there is no time to read
    return start.elapsed_time(end) / 1000


# ----------------------------------------------------------------------------------------------


def spawned(rank, world_size, args):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    fsdp_main(rank, args)


def fsdp_main(rank, args):
    torch.manual_seed(args.seed)

    with sw.connect("cpu" if args.no_cuda else None) as comm:
        device = comm.device
        dataset1, dataset2 = prepare(args.data, rank)
        sampler1 = DistributedSampler(dataset1, seed=args.seed)
        sampler2 = DistributedSampler(dataset2, shuffle=False)
        kwargs = {
            "num_workers": 2,
            "persistent_workers": True,
            "pin_memory": device.type != "cpu",
            "shuffle": False,
        }
        train_loader = DataLoader(dataset1, args.batch_size, sampler=sampler1, **kwargs)
        test_loader = DataLoader(dataset2, args.test_batch_size, sampler=sampler2, **kwargs)

        model = Net()  # on the CPU: only this rank's shards go to the device
        sharded = sw.shard(model, wrap=WRAPS[args.wrap], comm=comm)
        if rank == 0:
            print(f"{sharded.units}\n", flush=True)
            rows = args.batch_size * comm.world_size
            print(f"global batch {rows} = {args.batch_size} × {comm.world_size} ranks", flush=True)

        optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
        scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
        start = now(device)
        for epoch in range(1, args.epochs + 1):
            if rank == 0:
                print(f"Learning rate: {scheduler.get_last_lr()[0]:.6f}", flush=True)
            train(model, device, train_loader, optimizer, epoch, sampler1)
            test(model, device, test_loader)
            scheduler.step()
        end = now(device)

        if rank == 0:
            print(f"{device.type.upper()} event elapsed time: {seconds(start, end)}sec")
            print(f"{model}", flush=True)

        if args.save_model:
            # use a barrier to make sure training is done on all ranks
            dist.barrier()
            states = model.state_dict()
            if rank == 0:
                torch.save(states, "mnist_cnn.pt")


def parse_args(arguments=None):
    parser = argparse.ArgumentParser(description="PyTorch MNIST Example")
    for name, default, metavar, text in (
        ("--batch-size", 64, "N", "input batch size for training"),
        ("--test-batch-size", 1000, "N", "input batch size for testing"),
        ("--epochs", 10, "N", "number of epochs to train"),
        ("--lr", 1.0, "LR", "learning rate"),
        ("--gamma", 0.7, "M", "Learning rate step gamma"),
        ("--seed", 1, "S", "random seed"),
        ("--data", Path("../data"), "FOLDER", "where MNIST's files are"),
    ):
        help = f"{text} (default: {default})"
        parser.add_argument(name, type=type(default), default=default, metavar=metavar, help=help)
    parser.add_argument("--wrap", choices=WRAPS, default="size", help="how units are chosen")
    parser.add_argument("--no-cuda", action="store_true", help="trains on the CPU")
    parser.add_argument("--save-model", action="store_true", help="For Saving the current Model")
    return parser.parse_args(arguments)


def count_ranks(no_cuda):
    """One rank for each device; two on a CPU."""
    devices = 0 if no_cuda else device_count()
    if not devices:
        why = "--no-cuda" if no_cuda else "0 devices"
        print(f"{why}: {CPU_RANKS} ranks on the CPU", flush=True)
    return devices or CPU_RANKS


if __name__ == "__main__":
    args = parse_args()
    if launch := read_launch(os.environ):  # of torchrun, mpirun or srun
        fsdp_main(launch.rank, args)
    else:
        world_size = count_ranks(args.no_cuda)
        port = free_port(PORT)
        if port != PORT:
            print(f"port {PORT} is in use: the ranks meet at port {port}", flush=True)
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
        mp.spawn(spawned, args=(world_size, args), nprocs=world_size, join=True)
