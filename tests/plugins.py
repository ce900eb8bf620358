"""Stand-ins for vendors' plug-ins: packages that register gloo under the name of their backend.

Torch sees the device from then on (``tests/recorder/vendors.py``). ``habana_frameworks`` reads its
variable when it is imported, and remembers what it read, as the real one does.
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
from habana_frameworks.torch.utils import internal
from tests.recorder.vendors import Hpu, see

internal.LAZY_MODE = os.environ.get("PT_HPU_LAZY_MODE", "1")
see(Hpu())
"""

INTEL = """
from tests.recorder.vendors import Xpu, see

see(Xpu())
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
