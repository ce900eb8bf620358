"""Parts of random models, as text: each has its own way to use its parameters."""

from __future__ import annotations

__all__ = ["PARTS"]

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
    "lstm": """
def __init__(self):
    super().__init__()
    self.lstm = nn.LSTM(6, 6, batch_first=True)
def forward(self, x):
    return x + self.lstm(x.unsqueeze(1).expand(-1, 3, -1))[0][:, -1]
""",
    "transposed": """
def __init__(self):
    super().__init__()
    self.weight = nn.Parameter(torch.zeros(9, 6).t())
    self.back = nn.Parameter(torch.zeros(6, 9).t())
def forward(self, x):
    return torch.tanh(x @ self.weight @ self.back)
""",
    "experts": """
def __init__(self):
    super().__init__()
    self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
    self.router = nn.Linear(6, 3)
def forward(self, x):
    weights = self.router(x).softmax(-1)
    top = weights.argmax(-1)
    out = torch.zeros_like(x)
    for number, expert in enumerate(self.experts):
        rows = (top == number).nonzero().flatten()
        out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number, None])
    return x + out
""",
    "stacked_experts": """
def __init__(self):
    super().__init__()
    self.up, self.down = nn.Parameter(torch.zeros(3, 6, 8)), nn.Parameter(torch.zeros(3, 8, 6))
def forward(self, x):
    return x + torch.einsum('bd,edh,ehk->bk', x, self.up, self.down) * 0.1
""",
    "no_grad_first": """
def __init__(self):
    super().__init__()
    self.lin = nn.Linear(6, 6)
def forward(self, x):
    with torch.no_grad():
        target = self.lin(x)
    return self.lin(x) + target
""",
    "reentrant": """
def __init__(self):
    super().__init__()
    self.inner = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
def forward(self, x):
    if not x.requires_grad:
        x = x.clone().requires_grad_()
    return checkpoint(self.inner, x, use_reentrant=True)
""",
    "bag": """
def __init__(self):
    super().__init__()
    self.bag = nn.EmbeddingBag(11, 6, mode='sum')
def forward(self, x):
    return x + self.bag((x.detach().abs() * 10).long() % 11)
""",
    "padded": """
def __init__(self):
    super().__init__()
    self.table = nn.Embedding(11, 6, padding_idx=3)
def forward(self, x):
    return x + self.table((x.detach().abs() * 10).long() % 11).mean(1)
""",
    "bilinear": """
def __init__(self):
    super().__init__()
    self.bi = nn.Bilinear(6, 6, 6)
    self.prelu = nn.PReLU(6)
def forward(self, x):
    return self.prelu(self.bi(x, x) + x)
""",
    "rms": """
def __init__(self):
    super().__init__()
    self.norm, self.down = nn.RMSNorm(6), nn.Linear(10, 6, bias=False)
    self.gate, self.up = nn.Linear(6, 10, bias=False), nn.Linear(6, 10, bias=False)
def forward(self, x):
    y = self.norm(x)
    return x + self.down(F.silu(self.gate(y)) * self.up(y))
""",
    "functional": """
def __init__(self):
    super().__init__()
    self.lin = nn.Linear(6, 6)
def forward(self, x):
    scaled = {name: param * 0.9 for name, param in self.lin.named_parameters()}
    return torch.func.functional_call(self.lin, scaled, (x,))
""",
    "keywords": """
class Inner(nn.Linear):
    def forward(self, *, rows, scale=1.0):
        return {'out': super().forward(rows) * scale, 'in': rows}
def __init__(self):
    super().__init__()
    self.inner = self.Inner(6, 6)
def forward(self, x):
    got = self.inner(rows=x, scale=0.5)
    return got['out'] + got['in']
""",
    "detached_head": """
def __init__(self):
    super().__init__()
    self.lin, self.aside = nn.Linear(6, 6), nn.Linear(6, 6)
def forward(self, x):
    return self.lin(x) + self.aside(x).detach()
""",
    "inplace": """
def __init__(self):
    super().__init__()
    self.lin, self.shift = nn.Linear(6, 6), nn.Parameter(torch.zeros(6))
def forward(self, x):
    y = self.lin(x)
    y += self.shift
    return y.mul_(0.5).sigmoid_()
""",
    "batchnorm": """
def __init__(self):
    super().__init__()
    self.norm = nn.BatchNorm1d(6, track_running_stats=False)
    self.lin = nn.Linear(6, 6)
def forward(self, x):
    return self.lin(self.norm(x))
""",
    "groupnorm_conv": """
def __init__(self):
    super().__init__()
    self.conv, self.norm = nn.Conv1d(2, 4, 3, padding=1, groups=2), nn.GroupNorm(2, 4)
    self.up = nn.ConvTranspose1d(4, 2, 3, padding=1)
def forward(self, x):
    return x + self.up(F.gelu(self.norm(self.conv(x.view(-1, 2, 3))))).reshape(-1, 6)
""",
    "encoder": """
def __init__(self):
    super().__init__()
    self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
def forward(self, x):
    return self.layer(x.view(-1, 1, 6).expand(-1, 2, -1)).mean(1)
""",
    "hooked": """
def __init__(self):
    super().__init__()
    self.lin = nn.Linear(6, 6)
    self.lin.register_forward_hook(lambda module, args, out: out * 1.5)
    self.lin.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
def forward(self, x):
    return self.lin(x)
""",
    "half_frozen": """
def __init__(self):
    super().__init__()
    self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
    self.a.weight.requires_grad_(False)
    self.b.bias.requires_grad_(False)
def forward(self, x):
    return self.b(torch.tanh(self.a(x)))
""",
    "bfloat": """
def __init__(self):
    super().__init__()
    self.lin = nn.Linear(6, 6).to(torch.bfloat16)
def double(self):
    return self
def forward(self, x):
    return F.linear(x, self.lin.weight.double(), self.lin.bias.double())
""",
    "saved_view": """
def __init__(self):
    super().__init__()
    self.weight = nn.Parameter(torch.zeros(12, 6))
def forward(self, x):
    a, b = self.weight.chunk(2)
    q, k = self.weight[::2], self.weight[1::2]
    return x + torch.tanh(x @ a.T) @ b + (x @ q.T) @ k * 0.1
""",
    "vmapped": """
def __init__(self):
    super().__init__()
    self.lin = nn.Linear(6, 6)
def forward(self, x):
    return torch.vmap(lambda row: torch.tanh(self.lin(row)))(x)
""",
    "late_exit": """
def __init__(self):
    super().__init__()
    self.parts2 = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
def forward(self, x):
    for part in self.parts2[: 1 + self.step % 3]:
        x = torch.tanh(part(x))
    return x
step = 0
""",
    "reordered": """
def __init__(self):
    super().__init__()
    self.two = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
def forward(self, x):
    order = (0, 1) if self.step % 2 else (1, 0)
    for number in order:
        x = torch.tanh(self.two[number](x))
    return x
step = 0
""",
    "none_out": """
class Log(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(6))
    def forward(self, x, out):
        out.append(x * self.scale)
def __init__(self):
    super().__init__()
    self.log = self.Log()
def forward(self, x):
    out = []
    self.log(x, out)
    return x + out[0]
""",
    "flow": """
def __init__(self):
    super().__init__()
    self.log_scale = nn.Parameter(torch.zeros(()))
    self.net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3))
def forward(self, x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a, b * self.log_scale.exp() + self.net(a)], dim=-1)
""",
    "spectral": """
def __init__(self):
    super().__init__()
    self.lin = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map='cayley')
def forward(self, x):
    return self.lin(x)
""",
    "per_layer_scale": """
def __init__(self):
    super().__init__()
    self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
    self.scales = nn.ParameterList([torch.zeros(()) for _ in range(3)])
def forward(self, x):
    for layer, scale in zip(self.layers, self.scales):
        x = x + scale * torch.tanh(layer(x))
    return x
""",
    "checkpoint_twice": """
def __init__(self):
    super().__init__()
    self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
def forward(self, x):
    y = checkpoint(lambda t: torch.tanh(self.a(t)), x, use_reentrant=False)
    return checkpoint(lambda t: torch.tanh(self.b(self.a(t))), y, use_reentrant=False)
""",
    "generator_out": """
class Inner(nn.Linear):
    def forward(self, x):
        yield super().forward(x)
        yield x
def __init__(self):
    super().__init__()
    self.inner = self.Inner(6, 6)
def forward(self, x):
    return sum(self.inner(x))
""",
    "swapped": """
def __init__(self):
    super().__init__()
    self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
def forward(self, x):
    weight = self.a.weight @ self.b.weight
    return F.linear(x, weight) + F.linear(x, self.b.weight.T @ self.a.weight) * 0.1
""",
}
