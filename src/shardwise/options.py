"""How to shard, beyond strategy and units: one frozen value, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from shardwise.errors import ConfigError, nearest
from shardwise.materialise import Init, default_init
from shardwise.precision import Precision
from shardwise.schedule import Prefetch
from shardwise.synonyms import answer

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """How to shard, beyond strategy and units.

    Attributes:
        precision: stored, compute, wire, sum, buffer and output dtypes.
        prefetch: how far ahead units are gathered.
        bucketing: ``"block"``: one collective per unit; ``"layer"``: per module that owns
            parameters; ``"none"``: per parameter, cut along dim 0 like ``torch.chunk``.
        uneven: with ``bucketing="none"``: ``"pad"`` a dim 0 that the world size does not divide,
            or ``"error"``.
        sync_module_states: start from rank 0's parameters and buffers. When off, ranks whose
            values differ are an error.
        init: gives a module that was built on the meta device its values.
        divergence: what a rank does when others enter a unit that it skips: ``"error"``, or
            ``"participate"`` (units must then run in the order they are registered).
        activation_checkpointing: recompute repeated units in the backward pass.
        mesh: a 1-D ``DeviceMesh`` or process group to shard over, instead of ``comm``.
    """

    precision: Precision = field(default_factory=Precision)
    prefetch: Prefetch = field(default_factory=Prefetch)
    bucketing: str = "block"
    uneven: str = "pad"
    sync_module_states: bool = True
    init: Init = default_init
    divergence: str = "error"
    activation_checkpointing: bool = False
    mesh: Any = None

    def __post_init__(self) -> None:
        _is_a("precision", self.precision, Precision, "sw.Precision(compute=torch.bfloat16)")
        _is_a("prefetch", self.prefetch, Prefetch, "sw.Prefetch(backward=0)")
        _one_of("bucketing", self.bucketing, ("block", "layer", "none"))
        _one_of("uneven", self.uneven, ("pad", "error"))
        _one_of("divergence", self.divergence, ("error", "participate"))
        if self.uneven == "error" and self.bucketing != "none":
            raise ConfigError(
                f'uneven="error" asks for dim-0 shards, and bucketing={self.bucketing!r} cuts '
                'buckets, not parameters. Add bucketing="none", or leave uneven out.'
            )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """From keyword arguments; an unknown one is an error that names the nearest."""
        known = {item.name for item in fields(cls)}
        if not given.get("use_orig_params", True):
            raise ConfigError(
                "shard() has no use_orig_params=False: parameters always keep their names and "
                "objects, as with FSDP1's use_orig_params=True, so parameter groups and mixed "
                "requires_grad work, and there is no flat parameter. Leave it out."
            )
        chosen = {name: value for name, value in given.items() if name != "use_orig_params"}
        for name in sorted(chosen.keys() - known):
            like = nearest(name, known | {"strategy", "wrap", "comm"})[0]
            raise ConfigError(
                f"shard() has no option {name!r}; {answer(name) or f'nearest is {like!r}'}. "
                f"Options are {', '.join(sorted(known))}."
            )
        return cls(**chosen)


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(map(repr, known))}.")


def _is_a(name: str, value: object, kind: type, example: str) -> None:
    if not isinstance(value, kind):
        raise ConfigError(
            f"{name} is {value!r}, and not a {kind.__name__}. Pass one, for example {example}."
        )
