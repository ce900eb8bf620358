"""accelerate's ``Accelerator`` with our engine, in one process: its state, and its refusals.

Its numbers on several ranks are in ``test_transformers.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator as TheirAccelerator
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration
from torch import nn

import shardwise as sw
from shardwise.integrations.accelerate import Accelerator
from tests.integrations import trainer_runs as jobs

pytestmark = pytest.mark.slow


def test_an_accelerator_with_a_plug_in_beside_it_is_refused(alone: Any) -> None:
    """accelerate keeps one state for a process; on accelerators the plug-in is in it."""
    TheirAccelerator(cpu=True)
    for state in (PartialState, AcceleratorState):
        state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=None)
    with pytest.raises(sw.ConfigError, match="set up for FSDP already: an Accelerator made before"):
        Accelerator(cpu=True)


def test_ranks_with_other_numbers_of_batches_are_refused(alone: Any) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.num_processes = 2  # of two ranks this one
    with accelerator.join_uneven_inputs([]):
        pass
    with pytest.raises(sw.ConfigError, match="would wait for one that has none"):
        accelerator.join_uneven_inputs([], even_batches=False)


def test_local_sgd_is_refused_with_the_reason(alone: Any) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(jobs.llama())
    with LocalSGD(accelerator, model, 2):  # of one process it does nothing
        pass
    accelerator.state.distributed_type = DistributedType.MULTI_CPU
    with pytest.raises(sw.ConfigError, match="LocalSGD"), LocalSGD(accelerator, model, 2):
        pass


def test_the_newest_state_is_loaded_if_no_folder_is_given(tmp_path: Path, alone: Any) -> None:
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=config)
    model: Any = accelerator.prepare_model(nn.Linear(2, 2))
    for value in 1.0, 2.0, 3.0:
        nn.init.constant_(model.weight, value)
        if value < 3:
            accelerator.save_state()
    accelerator.load_state()
    assert model.state_dict()["weight"].unique().tolist() == [2.0]


def test_in_the_middle_of_an_accumulation_nothing_is_replaced(tmp_path: Path, alone: Any) -> None:
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=config)
    model: Any = accelerator.prepare_model(nn.Linear(2, 2))
    accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    folder = Path(accelerator.save_state())
    with accelerator.no_sync(model):
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(sw.ScheduleError, match="nothing was saved"):
        accelerator.save_state()
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint_0"]
    assert (folder / "model-0" / "model.safetensors").exists()


def test_an_optimizer_of_two_models_is_refused_before_anything_is_saved(
    tmp_path: Path, alone: Any
) -> None:
    accelerator = Accelerator(cpu=True)
    models: Any = [nn.Linear(2, 2), nn.Linear(2, 2)]
    accelerator.prepare(*models, torch.optim.SGD([m.weight for m in models], lr=0.1))
    with pytest.raises(sw.ConfigError, match="SGD steps on parameters of 2 of the 2 models"):
        accelerator.save_state(str(tmp_path / "state"))
    assert not (tmp_path / "state").exists()


def test_gradients_of_several_models_are_clipped_together(alone: Any) -> None:
    accelerator = Accelerator(cpu=True)
    models: Any = [accelerator.prepare_model(nn.Linear(2, 2)) for _ in range(2)]
    sum(model(torch.ones(1, 2)).sum() for model in models).backward()
    params = [param for model in models for param in model.parameters()]
    assert accelerator.clip_grad_norm_(params, 1.0) == pytest.approx(12**0.5)
    assert accelerator.clip_grad_norm_(models[0].parameters(), 9.0) == pytest.approx(0.5**0.5)
    assert accelerator.clip_grad_norm_([], 1.0) == 0


def test_hooks_of_save_state_that_get_no_models_are_reported(
    tmp_path: Path, alone: Any, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare_model(nn.Linear(2, 2))
    given: list[list[nn.Module]] = []
    accelerator.register_save_state_pre_hook(lambda models, *_: given.append([*models]))
    accelerator.save_state(str(tmp_path / "state"))
    assert given == [[]]
    assert "hooks of save_state() get no models and no weights" in caplog.text
