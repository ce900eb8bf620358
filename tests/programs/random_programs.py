"""A program from a seed, as text: a model of odd parts, options of ``shard()``, and a loop.

It is text so that a failure can be printed and run alone: ``python FILE``.
"""

from __future__ import annotations

import random
from textwrap import indent

from tests.programs.parts import PARTS

__all__ = ["program_text"]

WIDTH = 6

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
    "wrap=sw.wrap.automatic(joined_nbytes=400)": 2,
    "prefetch=sw.Prefetch(forward=2, backward=2)": 2,
    'offload="optimizer"': 1,
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
    "torch.optim.NAdam(GROUPS, lr=0.01, eps=1e-4)",
    "torch.optim.RAdam(GROUPS, lr=0.01, eps=1e-4)",
    "torch.optim.Adamax(GROUPS, lr=0.01, eps=1e-4)",
    "torch.optim.Adadelta(GROUPS, lr=0.5, eps=1e-3)",
    "torch.optim.ASGD(GROUPS, lr=0.02)",
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
    "net(x).logsumexp(-1).mean()",
    "(net(x) - net(x.flip(0)).detach()).square().mean()",
    "F.cross_entropy(net(x), (x.detach().abs() * 10).long()[:, 0] % 3)",
    "net(x).square().mean() * 0",
)
TOLERANCES = {"single": 1e-4, "bfloat": 5e-2}  # of a part that is not in float64
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
    "for param in net.parameters():\n"
    "    if param.grad is not None:\n        param.grad = param.grad * 0.5": 1,
    "for param in net.parameters():\n    if param.ndim == 1:\n        param.grad = None": 1,
    "torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)": 1,
    "torch.nn.utils.clip_grad_value_(net.parameters(), 0.01)": 1,
    "optimizer.step()\nenv.clip(net, 0.1)": 1,
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
    "with torch.no_grad():\n    for param in net.parameters():\n        param.clamp_(-0.3, 0.3)": 1,
    "for param in net.parameters():\n    param.data = param.data * 0.99": 1,
    "net.zero_grad()\nenv.backward(lambda x: net(x).square().mean(), env.batch(5, 6))": 1,
    "env.backward(lambda x: net(x).square().mean(), env.batch(5, 6))\noptimizer.zero_grad()": 1,
    "for module in net.modules():\n    if isinstance(module, nn.Linear):\n"
    "        nn.init.constant_(module.weight, 0.1)": 1,
    "net.requires_grad_(False)\nenv.forward(net, env.batch(8, 6))\nnet.requires_grad_(True)": 1,
    "env.relayout(net)\nenv.see_state(net, optimizer)": 1,
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
    steps = range(draw.randint(2, 5))
    return TEXT.format(
        classes=classes,
        parts=", ".join(f"Part{kinds.index(name)}()" for name in names),
        reads=reads if has_reads else "",
        arguments=_arguments(draw, world),
        optimizer=draw.choice(OPTIMIZERS).replace("GROUPS", groups),
        loop=indent("".join(_step(draw, step) for step in steps), "    "),
        world=world,
        tolerance=max(TOLERANCES.get(name, 1e-8) for name in names),
    )


def _arguments(draw: random.Random, world: int) -> str:
    strategy = draw.choice(STRATEGIES)
    mesh = ""
    if draw.random() < (0.8 if world == 4 else 0.2):
        strategy = draw.choice(HYBRIDS)
        grids = (", mesh=(1, env.world)", ", mesh=(env.world, 1)")
        mesh = draw.choice(grids) if world < 4 else ", mesh=(2, 2)"
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
