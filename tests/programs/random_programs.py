"""A program from a seed, as text: a model of odd parts, options of ``shard()``, and a loop.

It is text so that a failure can be printed and run alone: ``python FILE``.
"""

from __future__ import annotations

import random
from textwrap import indent

__all__ = ["program_text"]

WIDTH = 6

# Each part maps [rows, 6] to [rows, 6]; the class is named Part0, Part1, …
PARTS = {
    "linear": """
def __init__(self):
    super().__init__()
    self.lin = nn.Linear(6, 6)
def forward(self, x):
    return torch.tanh(self.lin(x))
""",
    "norm": """
def __init__(self):
    super().__init__()
    self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 17, bias=False), nn.Linear(17, 6)
def forward(self, x):
    return x + self.down(F.gelu(self.up(self.norm(x))))
""",
    "scalar_and_rows": """
def __init__(self):
    super().__init__()
    self.scale, self.rows = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(13, 6))
def forward(self, x):
    return x * self.scale + F.linear(F.linear(x, self.rows), self.rows.T)
""",
    "tied": """
def __init__(self):
    super().__init__()
    self.encode, self.decode = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
    self.decode.weight = self.encode.weight
def forward(self, x):
    return self.decode(torch.tanh(self.encode(x)))
""",
    "convolution": """
def __init__(self):
    super().__init__()
    self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
    self.back = nn.Conv2d(4, 2, 1)
def forward(self, x):
    return x + self.back(torch.relu(self.conv(x.view(-1, 2, 1, 3)))).reshape(-1, 6)
""",
    "embedding": """
def __init__(self):
    super().__init__()
    self.table = nn.Embedding(11, 6)
def forward(self, x):
    return x + self.table((x.detach().abs() * 10).long() % 11).mean(1)
""",
    "adapter": """
def __init__(self):
    super().__init__()
    self.base = nn.Linear(6, 6).requires_grad_(False)
    self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
def forward(self, x):
    return self.base(x) + self.b(self.a(x))
""",
    "function": """
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight
    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad
def __init__(self):
    super().__init__()
    self.weight = nn.Parameter(torch.zeros(6, 6))
def forward(self, x):
    return torch.tanh(self.Product.apply(x, self.weight))
""",
    "single": """
def __init__(self):
    super().__init__()
    self.lin = nn.Linear(6, 6)
def double(self):
    return self  # it stays in float32
def forward(self, x):
    return self.lin(x.float()).double()
""",
    "complex": """
def __init__(self):
    super().__init__()
    self.weight = nn.Parameter(torch.zeros(6, 6, dtype=torch.complex128))
def forward(self, x):
    return torch.tanh((x.to(torch.complex128) @ self.weight).abs())
""",
    "empty": """
def __init__(self):
    super().__init__()
    self.nothing, self.lin = nn.Parameter(torch.zeros(0, 6)), nn.Linear(6, 6)
def forward(self, x):
    return self.lin(torch.cat([x, self.nothing]))
""",
    "buffers": """
def __init__(self):
    super().__init__()
    self.register_buffer("shift", torch.ones(6))
    self.register_buffer("table", torch.arange(6.0), persistent=False)
    self.weight = nn.Parameter(torch.zeros(6))
def forward(self, x):
    return x * self.weight + self.shift + self.table.to(x) * 0.01
""",
    "attention": """
def __init__(self):
    super().__init__()
    self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
def forward(self, x):
    rows = x.unsqueeze(1).expand(-1, 3, -1)
    return x + self.attention(rows, rows, rows)[0].mean(1)  # as plain products
""",
    "called_twice": """
def __init__(self):
    super().__init__()
    self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
def forward(self, x):
    return self.inner(self.inner(x))
""",
    "checkpointed": """
def __init__(self):
    super().__init__()
    self.inner = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
def forward(self, x):
    return checkpoint(self.inner, x, use_reentrant=False)
""",
    "unused": """
def __init__(self):
    super().__init__()
    self.lin, self.unused = nn.Linear(6, 6, bias=False), nn.Linear(6, 4)
    self.register_parameter("none", None)
def forward(self, x):
    return torch.relu_(self.lin(x)) + x
""",
    "containers": """
def __init__(self):
    super().__init__()
    self.many = nn.ParameterList([torch.zeros(6, 2), torch.zeros(2, 6)])
    self.named = nn.ParameterDict({"shift": torch.zeros(6)})
def forward(self, x):
    return torch.tanh(x @ self.many[0] @ self.many[1]) + self.named["shift"]
""",
    "parametrised": """
def __init__(self):
    super().__init__()
    self.lin = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
def forward(self, x):
    return torch.tanh(self.lin(x))
""",
    "recurrent": """
def __init__(self):
    super().__init__()
    self.cell = nn.GRUCell(6, 6)
def forward(self, x):
    return self.cell(x, torch.ones_like(x))
""",
    "sometimes_skipped": """
def __init__(self):
    super().__init__()
    self.lin, self.calls = nn.Linear(6, 6), 0
def forward(self, x):
    return self.lin(x) if self.step % 2 == 0 else x
step = 0
""",
    "object_out": """
class Out:
    def __init__(self, value):
        self.value = value
class Inner(nn.Linear):
    def forward(self, x):
        return Out(super().forward(x))
def __init__(self):
    super().__init__()
    self.inner = self.Inner(6, 6)
def forward(self, x):
    return torch.tanh(self.inner(x).value)
""".replace("class Out:", "global Out\nclass Out:"),
}

STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "no_shard")
HYBRIDS = ("hybrid_shard", "hybrid_shard_zero2", "hybrid_full")
OPTIONS = {
    "": 6,
    "wrap=sw.wrap.whole()": 2,
    "wrap=sw.wrap.by_size(60)": 2,
    "wrap=sw.wrap.by_class(Part0)": 2,
    'bucketing="layer"': 1,
    'bucketing="none"': 1,
    "prefetch=sw.Prefetch(forward=0, backward=0)": 1,
    "wrap=sw.wrap.by_class(Part0), activation_checkpointing=sw.ActivationCheckpointing(Part0)": 1,
    'offload="everything"': 2,
    "unsharded=800": 1,
    'buffers="broadcast"': 1,
}
OPTIMIZERS = (
    "torch.optim.SGD(GROUPS, lr=0.05)",
    "torch.optim.SGD(GROUPS, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "torch.optim.AdamW(GROUPS, lr=0.01, eps=1e-4)",
    "torch.optim.AdamW(GROUPS, lr=0.01, eps=1e-4, foreach=False)",
    "torch.optim.AdamW(GROUPS, lr=0.01, eps=1e-4, fused=True)",
    "torch.optim.Adam(GROUPS, lr=0.01, eps=1e-4, amsgrad=True)",
    "torch.optim.RMSprop(GROUPS, lr=0.01, eps=1e-3)",
    "torch.optim.Adagrad(GROUPS, lr=0.02, eps=1e-4)",
)
GROUPS = (
    "net.parameters()",
    "[p for p in net.parameters() if p.requires_grad]",
    (
        "[{'params': [p for p in net.parameters() if p.ndim > 1]}, "
        "{'params': [p for p in net.parameters() if p.ndim < 2], 'lr': 0.02}]"
    ),
)
STEP = """
for part in net.parts:
    part.step = {step}
env.backward(lambda x: LOSS, env.batch({step}, 6))
"""
ACCUMULATED = """
for last in (False, True):
    with env.accumulate(net, last):
        env.backward(lambda x: LOSS, env.batch({step} + 0.5 * last, 6))
"""
LOSSES = (
    "net(x).square().mean()",
    "(net(x).square().mean(), net(x * 0.5).mean())",
    "both(net(x))",
    "net(x).square().mean() + net(x + 1).mean()",
    "penalty(net, x)",
)
BEFORE_STEP = {
    "": 4,
    "env.see_gradients(net)": 3,
    "env.clip(net, 0.5)": 3,
    "env.see_gradients(net)\nenv.clip(net, 0.1)": 1,
    "env.clip(net.parts, 0.3)": 1,
    "env.see('norms', torch.stack([p.grad.norm().double().detach() "
    "for p in net.parameters() if p.grad is not None]))": 1,
    "for param in net.parameters():\n"
    "    if param.grad is not None:\n        param.grad.mul_(0.5)": 1,
}
AFTER_STEP = {
    "": 6,
    "env.forward(net, env.batch(9, 6))": 3,
    "net.eval()\nenv.forward(net, env.batch(9, 6))\nnet.train()": 1,
    "env.see_weights(net)": 2,
    "net.load_state_dict({name: value * 0.9 if value.is_floating_point() else value "
    "for name, value in net.state_dict().items()})": 2,
    "env.relayout(net)": 2,
    "env.save_and_load(net, optimizer, {step})": 2,
    "env.see('copy', copy.deepcopy(net)(env.batch(3, 6)).detach())": 1,
    "env.see_state(net, optimizer)": 2,
    "for group in optimizer.param_groups:\n    group['lr'] *= 0.5": 1,
    "optimizer.load_state_dict(optimizer.state_dict())": 2,
    "with torch.inference_mode():\n    net(env.batch(2, 6))": 1,
    "for param in net.parameters():\n    param.requires_grad_(True)": 1,
    "net.head.weight.register_hook(lambda grad: grad * 0.5)": 1,
    "list(net.parameters())[{number} % len(list(net.parameters()))].requires_grad_(False)": 1,
    "with suppress(ArithmeticError):\n"
    "    env.backward(lambda x: broken(net(x)), env.batch(7, 6))\n"
    "optimizer.zero_grad()": 2,
    "with torch.no_grad():\n    for param in net.parameters():\n        param.mul_(0.99)": 1,
}
TEXT = """\
import copy
from contextlib import suppress

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.programs.processes import fill


def broken(output):
    raise ArithmeticError


def both(output):
    return output.square().mean(), output.sin().mean()


def penalty(net, x):
    x = x.clone().requires_grad_()
    output = net(x).square().mean()
    (slope,) = torch.autograd.grad(output, x, create_graph=True)
    return output + slope.square().mean()


{classes}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([{parts}])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return self.head(x){reads}


def program(env):
    net = fill(Net())
    net.head.double()
    for part in net.parts:
        part.double()
    env.shard(net{arguments})
    optimizer = {optimizer}
{loop}
    env.see_weights(net)
    env.see_state(net, optimizer)


WORLD, TOLERANCE = {world}, {tolerance}
if __name__ == "__main__":
    from tests.programs.processes import verdict

    print(verdict(program, WORLD, TOLERANCE))
"""


def program_text(seed: int, world: int) -> str:
    """The source of program ``seed`` for ``world`` ranks."""
    draw = random.Random(seed)
    names = draw.choices(list(PARTS), k=draw.randint(1, 5))
    kinds = list(dict.fromkeys(names))
    classes = "\n\n".join(
        f"class Part{number}(nn.Module):  # {kind}\n{indent(PARTS[kind].strip(), '    ')}\n"
        for number, kind in enumerate(kinds)
    )
    # A weight of the first part, read by the root: outside its unit.
    reads = " + x.mean() * sum(p.sum() for p in self.parts[0].parameters()).abs()"
    has_reads = draw.random() < 0.15
    groups = draw.choice(GROUPS)
    optimizers = [one for one in OPTIMIZERS if "complex" not in names or "fused" not in one]
    return TEXT.format(
        classes=classes,
        parts=", ".join(f"Part{kinds.index(name)}()" for name in names),
        reads=reads if has_reads else "",
        arguments=_arguments(draw),
        optimizer=draw.choice(optimizers).replace("GROUPS", groups),
        loop=indent("".join(_step(draw, step) for step in range(draw.randint(2, 5))), "    "),
        world=world,
        tolerance=1e-4 if "single" in names else 1e-8,
    )


def _arguments(draw: random.Random) -> str:
    strategy = draw.choice(STRATEGIES)
    mesh = ""
    if draw.random() < 0.2:
        strategy = draw.choice(HYBRIDS)
        mesh = draw.choice((", mesh=(1, env.world)", ", mesh=(env.world, 1)"))
    option = _weighted(draw, OPTIONS)
    return f', strategy="{strategy}"{mesh}' + (f", {option}" if option else "")


def _step(draw: random.Random, step: int) -> str:
    passes = ACCUMULATED if draw.random() < 0.25 else STEP
    text = passes.replace("LOSS", draw.choice(LOSSES))
    text += _weighted(draw, BEFORE_STEP) + "\noptimizer.step()\n"
    text += draw.choice(("optimizer.zero_grad()\n", "optimizer.zero_grad(set_to_none=False)\n"))
    text += _weighted(draw, AFTER_STEP) + "\n"
    return text.replace("{step}", str(step)).replace("{number}", str(draw.randint(0, 99)))


def _weighted(draw: random.Random, choices: dict[str, int]) -> str:
    return draw.choices(list(choices), weights=list(choices.values()))[0]
