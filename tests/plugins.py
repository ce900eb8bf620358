"""Stand-ins for vendors' plug-ins: packages that register gloo under the name of their backend.

``habana_frameworks`` makes ``hpu`` a device that torch knows by name and cannot allocate on, reads
its variable when it is imported, and remembers what it read, as the real one does.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_plugins"]

GLOO = """
import torch.distributed as dist

def gloo(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)

dist.Backend.register_backend({name!r}, gloo, devices=["cpu", {device!r}])
"""

HABANA = """
import os
import torch
from habana_frameworks.torch.utils import internal
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

internal.LAZY_MODE = os.environ.get("PT_HPU_LAZY_MODE", "1")
_setup_privateuseone_for_python_backend("hpu")
torch.hpu.device_count = lambda: 2
torch.hpu.set_device = lambda index: None
torch.hpu.get_device_name = lambda index: "GAUDI2"
"""

INTEL = """
import torch
torch.xpu.is_available = lambda: True
torch.xpu.device_count = lambda: 2
torch.xpu.set_device = lambda index: None
torch.xpu.get_device_name = lambda index: "Intel(R) Data Center GPU Max 1550"
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("xpu")
"""

PLUGINS = {
    "hpu": {
        "habana_frameworks.torch": HABANA,
        "habana_frameworks.torch.utils": "",
        "habana_frameworks.torch.utils.internal": "def is_lazy(): return LAZY_MODE != '0'",
        "habana_frameworks.torch.distributed": "",
        "habana_frameworks.torch.distributed.hccl": GLOO.format(name="hccl", device="hpu"),
    },
    "xpu": {
        "intel_extension_for_pytorch": INTEL,
        "oneccl_bindings_for_pytorch": GLOO.format(name="ccl", device="xpu"),
    },
}


def write_plugins(folder: Path, device: str) -> None:
    """Those of ``device`` as packages in ``folder``, which belongs on ``sys.path``."""
    for module, code in PLUGINS[device].items():
        package = folder.joinpath(*module.split("."))
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(code)
