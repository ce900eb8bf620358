"""The methods of ``Sharded`` for checkpoints and state dicts; each checks its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from shardwise.checkpoint import load as reading
from shardwise.checkpoint import save as writing
from shardwise.checkpoint.background import Saving
from shardwise.checkpoint.collectives import raise_on_all
from shardwise.checkpoint.one_file import SavedFile, save_one_file
from shardwise.checkpoint.optimizer_state import Given
from shardwise.checkpoint.optimizer_state_dict import optimizer_state, put_optimizer_state
from shardwise.checkpoint.options import (
    Loaded,
    LoadOptions,
    MakeRequest,
    Saved,
    SaveOptions,
    SaveRequest,
)
from shardwise.checkpoint.state_dict import StateDict, model_state, put_model_state
from shardwise.checkpoint.training_state import Training
from shardwise.errors import ConfigError
from shardwise.errors.arguments import named, taken
from shardwise.optim.sharded_model import ShardedModel

# --- folders ---------------------------------------------------------------------------------


@named
def save(
    self: ShardedModel,
    path: str | Path,
    optimizer: Given = None,
    training: Training | None = None,
    *,
    kind: str | Enum = "sharded",
    max_file_size: int = 5_000_000_000,
    save_total_limit: int | None = None,
    keep_best: Literal["lowest", "highest"] | None = None,
    files: Mapping[str, str | bytes] | None = None,
    names: Callable[[str], bool] | None = None,
    snapshot_bytes: int | None = None,
    when_busy: Literal["wait", "skip"] = "wait",
) -> Saved:
    """Write a checkpoint: a folder that ``transformers`` loads. A collective.

    Args:
        path: the folder, ``"run/step-100"`` or any other name; ``run/latest`` will point at it.
        optimizer: whose state is stored, too; or several.
        training: step, scheduler, data position: what a run needs to go on.
        kind, …, when_busy: see ``shardwise.checkpoint.SaveOptions``, field by field.

    Raises:
        ConfigError, CheckpointError: on every rank alike; what was under ``path`` before still is.
    """
    make_request = _save_request(self, "save()", locals())
    self._background.wait_pending()
    return writing.save(self, make_request)


@named
def save_async(
    self: ShardedModel,
    path: str | Path,
    optimizer: Given = None,
    training: Training | None = None,
    *,
    kind: str | Enum = "sharded",
    max_file_size: int = 5_000_000_000,
    save_total_limit: int | None = None,
    keep_best: Literal["lowest", "highest"] | None = None,
    files: Mapping[str, str | bytes] | None = None,
    names: Callable[[str], bool] | None = None,
    snapshot_bytes: int | None = None,
    when_busy: Literal["wait", "skip"] = "wait",
) -> Saving | None:
    """``save``, but return at once and write while training goes on. A collective.

    The next optimizer step first copies what is not written yet. To change parameters or optimizer
    state by hand before it, call ``finish_copy()`` of what is returned. If saving fails, the next
    optimizer step raises, on every rank alike.

    Returns:
        The running save: call its ``wait()`` before the process ends. ``None`` if the previous
        save is still being written and ``when_busy`` is ``"skip"``.
    """
    make_request = _save_request(self, "save_async()", locals())
    saving: Saving | None = self._background.save(self, make_request, path, when_busy == "skip")
    return saving


def _save_request(sharded: ShardedModel, call: str, given: Mapping[str, Any]) -> MakeRequest:
    optimizers = sharded.admitted(f"{call} was called", given["optimizer"])

    def make_request() -> SaveRequest:
        options = taken(SaveOptions, given)
        if options.kind == "full" and call == "save_async()":
            raise ConfigError(
                "save_async() does not support kind='full': training would wait while rank 0 "
                "writes everything. Pass kind='sharded', or call save()."
            )
        background = call == "save_async()"
        return SaveRequest(given["path"], optimizers, given["training"], options, background)

    return make_request


@named
def load(
    self: ShardedModel,
    path: str | Path,
    optimizer: Given = None,
    training: Training | None = None,
    *,
    strict: bool = True,
    cast: bool = False,
    names: Callable[[str], bool] | None = None,
) -> Loaded:
    """Load a checkpoint of any number of ranks, or a Hugging Face folder. A collective.

    Args:
        path: a checkpoint's folder, ``latest``, or one safetensors file.
        optimizer: gets its state back, too; or several.
        training: its scheduler and scaler get theirs; and random generators are restored.
        strict: whatever does not fit is an error; ``False`` leaves it out, and says so.
        cast: floating-point tensors in the files may have another dtype than the model's.
        names: which of the model's tensors are loaded, as of ``save``; the others stay, and so does
            their optimizer state.

    Raises:
        CheckpointError: on every rank alike, naming everything that does not fit.
    """
    return reading.load(self, path, _load_options(self, locals()))


@named
def resume(
    self: ShardedModel,
    run: str | Path,
    optimizer: Given = None,
    training: Training | None = None,
    *,
    strict: bool = True,
    cast: bool = False,
    names: Callable[[str], bool] | None = None,
) -> Loaded | None:
    """``load`` the whole checkpoint in ``run`` that was saved last. A collective.

    Only what is damaged is passed over, and renamed when an older one is loaded.

    Returns:
        What was loaded; ``None`` where the run has no checkpoint.

    Raises:
        DamagedCheckpoint: it has some, and all are damaged.
        CheckpointError: as for ``load``; also where the disk does not let the newest one be read.
    """
    return reading.resume(self, run, _load_options(self, locals()))


def _load_options(sharded: ShardedModel, given: Mapping[str, Any]) -> LoadOptions:
    optimizers = sharded.admitted("a checkpoint was being loaded", given["optimizer"])
    given = {**given, "optimizers": optimizers}
    options = raise_on_all(sharded.comm, "options of load()", lambda: taken(LoadOptions, given))
    sharded._background.wait_pending()
    return options


# --- state dicts, and one file ---------------------------------------------------------------


@named
def state_dict(
    self: ShardedModel,
    kind: str | Enum | StateDict = "full",
    *,
    offload_to_cpu: bool = True,
    rank0_only: bool = False,
    names: Callable[[str], bool] | None = None,
) -> dict[str, Any]:
    """The model's state dict, of FSDP's three kinds. A collective.

    Args:
        kind: ``"full"``, ``"sharded"`` or ``"local"`` (or ``"FULL_STATE_DICT"`` …), or a policy.
        offload_to_cpu, rank0_only, names: see ``sw.StateDict``; a policy has its own.

    Returns:
        name → whole tensor, ``ShardTensor``, or plain shard; empty on ranks that ``rank0_only``
        leaves out.
    """
    policy = StateDict.of(locals())
    self.admitted("state_dict() was called", awaits_readers=True)
    return model_state(self, policy)


def load_state_dict(self: ShardedModel, states: Mapping[str, Tensor]) -> None:
    """Give the model rank 0's whole tensors, or all ranks' ``"sharded"`` ones. A collective.

    ``model.load_state_dict(states)`` does the same where every rank has them.

    Raises:
        CheckpointError: on every rank alike, naming everything that does not fit.
    """
    self.admitted("load_state_dict() was called", awaits_readers=True)
    put_model_state(self, states)


@named
def optimizer_state_dict(
    self: ShardedModel,
    optimizer: Optimizer,
    kind: str | Enum | StateDict = "full",
    *,
    offload_to_cpu: bool = True,
    rank0_only: bool = False,
    names: Callable[[str], bool] | None = None,
) -> dict[str, Any]:
    """The optimizer's state by parameter name, of FSDP's three kinds. A collective.

    Args:
        optimizer: of this model's parameters.
        kind, offload_to_cpu, rank0_only, names: as for ``state_dict``, of parameters.

    Returns:
        ``{"state": {name: {"exp_avg": …}}, "param_groups": [{"params": [name, …], …}]}``, as FSDP's
        ``full_optim_state_dict`` gives; ``sw.numbered(…)`` of it is what a plain optimizer loads.
    """
    policy = StateDict.of(locals())
    self.admitted("optimizer_state_dict() was called", optimizer)
    return optimizer_state(self, optimizer, policy)


def load_optimizer_state_dict(
    self: ShardedModel, optimizer: Optimizer, states: Mapping[str, Any]
) -> None:
    """Give the optimizer rank 0's whole state, by name. A collective.

    Raises:
        CheckpointError: on every rank alike, naming everything that does not fit.
    """
    self.admitted("load_optimizer_state_dict() was called", optimizer)
    put_optimizer_state(self, optimizer, states)


def save_file(
    self: ShardedModel, path: str | Path, names: Callable[[str], bool] | None = None
) -> SavedFile:
    """Write the whole model as one file. A collective.

    Of ``.safetensors`` every rank writes its own part, and nothing is gathered; the others are
    pickled by rank 0, which must have room for the whole model.
    ``plain.load_state_dict(torch.load("mnist_cnn.pt", weights_only=True))`` reads it.

    Args:
        path: ends with ``.pt``, ``.pth``, ``.bin`` or ``.safetensors``.
        names: which tensors; ``None`` is all.

    Raises:
        CheckpointError: on every rank alike; what was there before under this name still is.
    """
    self.admitted("save_file() was called", awaits_readers=True)
    return save_one_file(self, path, names)
