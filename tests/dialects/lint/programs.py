"""Programs with the usual mistakes of FSDP, DDP and Accelerate, each marked; and without them."""

from __future__ import annotations

BROKEN = {
    "fsdp1.py": """\
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
torch.distributed.init_process_group("nccl")  # D40
rank = torch.distributed.get_rank()
net = Net(torch.nn.ModuleList(Block() for _ in range(4)))
opt = torch.optim.AdamW([{"params": net.parameters()}], lr=1e-3)  # D31
net = FSDP(net, mixed_precision=MixedPrecision(param_dtype=torch.float16))  # D34 D35
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)  # D38
for epoch in range(3):
    for x in loader:
        loss = net(x).sum()
        loss.backward()  # D36
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # D32
        opt.step()
    if rank == 0:
        print(net(x))  # D33
        torch.save(net.state_dict(), "net.pt")  # D33
""",
    "fsdp2.py": """\
from torch.distributed.fsdp import fully_shard
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # D31
fully_shard(model)  # D35
train_sampler = DistributedSampler(rows)  # D37
for epoch in range(9):
    for step, rows in enumerate(DataLoader(rows, sampler=train_sampler)):
        if (step + 1) % steps == 0:  # D25
            with model.no_sync():
                model.layers(rows).backward()
        with autocast("cuda", dtype=torch.float16):  # D34
            loss = model(rows)
        context = model.no_sync() if step % 4 == 0 else nullcontext()  # D25
        context = nullcontext() if step % 4 != 0 else model.no_sync()  # D25
        optimizer.zero_grad()
""",
    "ddp.py": """\
from torch.nn.parallel import DistributedDataParallel as DDP
torch.distributed.init_process_group(backend="nccl", rank=rank)  # D40
model = DDP(Net())
torch.save(model.state_dict(), "net.pt")  # D39
""",
    "accelerated.py": """\
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=4)  # D43
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for rows in loader:
    loss = model(rows)
    loss.backward()  # D41
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # D42
    optimizer.step()
    optimizer.zero_grad()
if accelerator.is_main_process:
    torch.save(accelerator.get_state_dict(model), "net.pt")  # D33
""",
}
RIGHT = {
    "fsdp1.py": """\
torch.distributed.init_process_group("nccl")
torch.cuda.set_device(local_rank)
policy = ModuleWrapPolicy({Block})
net = FSDP(net, auto_wrap_policy=policy, mixed_precision=MixedPrecision(torch.float16))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = ShardedGradScaler()
sampler = DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
test_loader = torch.utils.data.DataLoader(test_data, batch_size=4)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for step, x in enumerate(loader):
        with net.no_sync() if (step + 1) % 4 != 0 else nullcontext():
            scaler.scale(net.layers(x).sum()).backward()
        net.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
    states = net.state_dict()
    if rank == 0:
        torch.save(states, "net.pt")
""",
    "fsdp2.py": """\
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if step % 4 == 0:
    optimizer.step()
else:
    with model.no_sync():
        loss.backward()
""",
    "ddp.py": """\
model = DDP(Net())
optimizer = SGD(model.parameters())
loader = DataLoader(data, sampler=DistributedSampler(data, shuffle=False))
if rank == 0:
    torch.save(model.module.state_dict(), "net.pt")
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
""",
    "accelerated.py": """\
accelerator = Accelerator(gradient_accumulation_steps=4)
optimizer = AdamW(model.parameters())
for rows in DataLoader(data, shuffle=True):
    with accelerator.accumulate(model):
        accelerator.backward(model(rows))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
accelerator.save_state("out")
""",
}
