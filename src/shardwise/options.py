"""Options of ``shard()`` beyond strategy and units: a frozen dataclass, checked on creation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from shardwise.errors import ConfigError, nearest
from shardwise.offload import Offload
from shardwise.precision import Precision
from shardwise.schedule.events import Prefetch
from shardwise.setup.materialise import Init, default_init
from shardwise.setup.recompute import ActivationCheckpointing
from shardwise.synonyms import option_hint


@dataclass(frozen=True)
class Options:
    """Options of ``shard()`` beyond strategy and units.

    Attributes:
        precision: stored, compute, wire, sum, buffer and output dtypes.
        prefetch: how far ahead units are gathered.
        offload: what is kept in host memory.
        bucketing: ``"block"``: one collective per unit; ``"layer"``: per module that owns
            parameters; ``"none"``: per parameter, sharded along dim 0 like ``torch.chunk``.
        uneven: with ``bucketing="none"``: ``"pad"`` a dim 0 that is not divisible by the world
            size, or ``"error"``.
        blocksize: cut trainable parameters at multiples of so many elements only: 256 for the 8-bit
            optimizers of bitsandbytes. 0: between rows, where that costs little.
        residency: bytes of full buckets that stay gathered: first frozen ones, for good, then
            trained units, from their first use in a step to the last.
        sync_module_states: broadcast rank 0's parameters and buffers. When off, differing values
            raise.
        init: initialises a module that was built on the meta device.
        load_later: parameters and buffers on the meta device that are read from files afterwards:
            none of them is made whole or initialised, and until then they hold zeros.
        buffers: ``"local"``, ``"broadcast"`` or ``"average"`` (see ``runtime.buffers``).
        divergence: what a rank does when others call units that it does not: ``"error"``, or
            ``"participate"`` (strategies that free units after each use then need every rank to
            call them in the order of registration).
        activation_checkpointing: recompute units in the backward pass: ``True``: those of repeated
            classes, or an ``ActivationCheckpointing``.
        compile: compile each unit's forward: ``True``: by the backend of the device's row, or a
            backend of ``torch.compile``.
        mesh: a ``DeviceMesh`` or process group to shard over, instead of ``comm``; for a hybrid
            strategy a mesh of two axes, or ``(replicate, shard)``: over how many ranks parameters
            are sharded, and how many copies there are. ``None`` = the ranks of a host, from the
            launcher, and a copy on each host.
    """

    precision: Precision = field(default_factory=Precision)
    prefetch: Prefetch = field(default_factory=Prefetch)
    offload: Offload = field(default_factory=Offload)
    bucketing: str = "block"
    uneven: str = "pad"
    blocksize: int = 0
    residency: int = 0
    sync_module_states: bool = True
    init: Init = default_init
    load_later: frozenset[Tensor] = frozenset()
    buffers: str = "local"
    divergence: str = "error"
    activation_checkpointing: bool | ActivationCheckpointing = False
    compile: bool | str = False
    mesh: Any = None

    def __post_init__(self) -> None:
        check_type("precision", self.precision, Precision, "sw.Precision(compute=torch.bfloat16)")
        check_type("prefetch", self.prefetch, Prefetch, "sw.Prefetch(backward=0)")
        if not isinstance(self.activation_checkpointing, bool):
            kind, example = ActivationCheckpointing, "sw.ActivationCheckpointing(every=2)"
            check_type("activation_checkpointing", self.activation_checkpointing, kind, example)
        if not isinstance(self.compile, bool):
            check_type("compile", self.compile, str, '"inductor"')
        check_type("offload", self.offload, Offload, "sw.Offload(optimizer=True)")
        _check_choice("bucketing", self.bucketing, ("block", "layer", "none"))
        _check_choice("uneven", self.uneven, ("pad", "error"))
        _check_choice("buffers", self.buffers, ("local", "broadcast", "average"))
        _check_choice("divergence", self.divergence, ("error", "participate"))
        if self.residency < 0:
            raise ConfigError(f"residency is {self.residency}; it is a number of bytes, or 0.")
        if self.blocksize < 0:
            raise ConfigError(f"blocksize is {self.blocksize}; set 256, or 0 to cut between rows.")
        if self.uneven == "error" and self.bucketing != "none":
            raise ConfigError(
                f'uneven="error" needs dim-0 shards, and bucketing={self.bucketing!r} shards '
                'buckets, not parameters. Add bucketing="none", or leave uneven out.'
            )

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Options:
        """From keyword arguments; the error for an unknown one names the nearest option."""
        known = {item.name for item in fields(cls)}
        if not keywords.get("use_orig_params", True):
            raise ConfigError(
                "shard() has no use_orig_params=False: parameters always keep their names and "
                "objects, as with FSDP1's use_orig_params=True, so parameter groups and mixed "
                "requires_grad work, and there is no flat parameter. Leave it out."
            )
        options = {name: value for name, value in keywords.items() if name != "use_orig_params"}
        for name in sorted(options.keys() - known):
            near = nearest(name, known | {"strategy", "wrap", "comm"})[0]
            raise ConfigError(
                f"shard() has no option {name!r}; {option_hint(name) or f'nearest is {near!r}'}. "
                f"Options are {', '.join(sorted(known))}."
            )
        return cls(**options)


def _check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(map(repr, known))}.")


def check_type(name: str, value: object, kind: type, example: str) -> None:
    """Raise ``ConfigError`` if an argument is of another kind."""
    if not isinstance(value, kind):
        raise ConfigError(
            f"{name} is {value!r}, and not a {kind.__name__}. Pass one, for example {example}."
        )
