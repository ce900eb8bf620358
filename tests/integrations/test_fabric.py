"""Lightning Fabric with our strategy: two ranks do as one, and go on from Fabric's checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integrations.started import on_ranks


@pytest.mark.prove
@pytest.mark.spawn
def test_a_loop_over_fabric_is_that_of_one_process_and_goes_on_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    """With accumulation and clipping."""
    jobs = [(1, "full_shard"), (2, "full_shard")]
    module = "tests.integrations.fabric_runs"
    on_ranks(module=module, imports="import lightning_fabric", jobs=jobs, folder=tmp_path)
    alone, two = (torch.load(tmp_path / f"{world}.pt") for world in (1, 2))
    assert two["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    assert min(two["norms"]) > 0.1
    assert two["again"] == two["norms"][2:]
    assert two["strategy"] == "full_shard"
