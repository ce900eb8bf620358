"""A report on a model's files: what was read, converted, cast and left out, as a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.api.sharded import Sharded
from shardwise.config.precision import dtype_name
from shardwise.hf.file_map import FileMap
from shardwise.hf.preparation import packed_elements
from shardwise.plan.printed import size

SHOWN = 4  # names in a line


@dataclass(frozen=True)
class Report:
    """See above. Names are the model's; ``unexpected`` ones are the files'."""

    title: str
    read: int
    converted: Sequence[str]
    tied: Sequence[str]
    cast: Sequence[str]
    initialised: Sequence[str]
    unexpected: Sequence[str]

    @classmethod
    def of(cls, sharded: Sharded, file_map: FileMap, source: str) -> Report:
        """Report on a model that was just read."""
        buckets = sharded.buckets
        dtypes = ", ".join(sorted({dtype_name(bucket.dtypes.stored) for bucket in buckets}))
        numel = sharded.numel() + packed_elements(sharded.model)
        stored = size(sum(bucket.shard.nbytes for bucket in buckets))
        return cls(
            f"{type(sharded.model).__name__} from {source}: {numel:,} parameters in "
            f"{dtypes}, {stored} on this rank of {sharded.comm.size}; use_cache off",
            len(file_map.direct),
            [name for one in file_map.conversions for name in one.targets],
            [f"{alias} = {name}" for alias, name in file_map.tied.items()],
            file_map.cast,
            file_map.initialised,
            file_map.unexpected,
        )

    def __str__(self) -> str:
        lines = {
            "converted": self.converted,
            "tied": self.tied,
            "cast": self.cast,
            "in no file, initialised": self.initialised,
            "in the files, left out": self.unexpected,
        }
        shown = [f"  {title}: {_names(names)}" for title, names in lines.items() if names]
        return "\n".join([self.title, f"  read by byte range: {self.read} tensors", *shown])


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
    return ", ".join(names[:SHOWN]) + more
