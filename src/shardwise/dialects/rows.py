"""A dialect is a table, a file of ``tables``: in each row a key, our field, and a converter.

    # key                      field               converter      note
    sharding_strategy          strategy            strategy@1     of FSDP1 only
    <backward_prefetch_policy  prefetch_backward   prefetch@1     read, and never written
    tpu_*                      -                   no,false       why there is no such field

A converter goes both ways, and is followed by the version of FSDP that has the key. In the last
form the third column has the values with which that changes nothing, ``.`` for none and ``*`` for
any. A key may have several rows: a value is read by the first that knows it. A table may extend
others, whose keys are then its own, behind a prefix; a prefix in capitals makes them capitals.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from importlib.resources import files
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from shardwise.dialects.policy import FILL_IN, TRACKERS
from shardwise.recipe.data_config import BUILDERS, COLUMNS, HUB


class Converter(NamedTuple):
    """Both directions of a value, a ``ValueError`` if it does not know one; what ``None`` means.

    ``words``: it knows some words only, so that it also reads ``torch.bfloat16`` of a program.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any], Any] = lambda value: value
    none: Any = None
    words: bool = False


def fold(value: object) -> str:
    """``ShardingStrategy._HYBRID_SHARD_ZERO2 → hybrid_shard_zero2``; words in any case."""
    return str(value).strip().rpartition(".")[2].lower().lstrip("_")


def _choice(words: Mapping[Any, Any]) -> Converter:
    """Their words or numbers → our values; written is the first word of a value."""
    ours = {fold(word): value for word, value in words.items()}

    def read(word: Any) -> Any:
        if fold(word) in ours:
            return ours[fold(word)]
        raise ValueError(f"choose one of {', '.join(map(str, words))}")

    def write(value: Any) -> Any:
        for word, other in words.items():
            if other == value:
                return word
        raise ValueError(f"no word for {value}")

    return Converter(read, write, words.get(None), words=True)


def _whole(value: Any) -> int:
    number = float(value)  # also "1e8"
    if isinstance(value, bool) or number != int(number) or number < 0:
        raise ValueError("write a whole number")
    return int(number)


def _names(value: Any) -> tuple[str, ...]:
    """Read names from a comma list, or from a list of names or classes."""
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    if not isinstance(value, Iterable):
        raise ValueError("write names, with commas between them")
    names = tuple(item if isinstance(item, str) else item.__name__ for item in value)
    if several := next((name for name in names if "," in name), ""):
        raise ValueError(f"{several!r} has a comma; write each name as an element of its own")
    return names


def _backend(value: Any) -> str:
    """A name, where a switch would be read by another row."""
    if not isinstance(value, str) or fold(value) in _SWITCH:
        raise ValueError("write the name of a backend")
    return value


def _as_reshard(strategy: str) -> bool:
    """FSDP2's word; that there are groups is said by the mesh."""
    if strategy not in (*_ON_TWO_AXES, *_ON_TWO_AXES.values()):
        raise ValueError(f"no word for {strategy}")
    return _ON_TWO_AXES.get(strategy, strategy) == "full_shard"


def _number(value: Any) -> float:
    """Whole numbers stay whole: ``2`` warm-up steps, and ``0.03`` of them."""
    number = float(value)
    return int(number) if number.is_integer() else number


def _data_set(value: Any) -> str | None:
    """A path, or ``OWNER/NAME`` of the hub as a recipe names it; any other name is to be filled in.

    ``None`` for the kind of files that ``load_dataset`` reads: ``data_files`` names them.
    """
    if not isinstance(value, str):  # several files
        return FILL_IN
    if value in (*BUILDERS.values(), "text"):
        return None
    is_path = "://" in value or Path(value).suffix or value.startswith((".", "/", "~"))
    return value if is_path else HUB + value if "/" in value else FILL_IN


def _format_of(columns: Iterable[str]) -> str:
    """The format of samples that begins with one of these columns; else ``text``."""
    return next((name for name in reversed(COLUMNS) if COLUMNS[name][0] in columns), "text")


def _trackers(value: Any) -> tuple[str, ...]:
    """Names that a recipe does not know stay: they are reported."""
    names = tuple(map(fold, _names(value)))
    if not {*names} & {*TRACKERS, "none"}:
        raise ValueError("a recipe has none of them")
    return tuple(name for name in names if name != "none")


def _classes(value: Any) -> tuple[str, ...]:
    """Names of classes of transformers, where optimum-habana's replace them."""
    return tuple(name.removeprefix("Gaudi") for name in _names(value))


_SCHEDULES = ("cosine", "linear", "constant", "constant_with_warmup")
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "adamw_8bit"),
    **{name: name for name in ("paged_adamw_8bit", "adamw")},
}
_ON_TWO_AXES = {"hybrid_shard": "full_shard", "hybrid_shard_zero2": "shard_grad_op"}
_FIVE = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_SWITCH = {True: True, False: False, "yes": True, "no": False, "on": True, "off": False}
_SWITCH |= {"y": True, "n": False, "t": True, "f": False, "1": True, "0": False}
_DTYPES = ("float32", "bfloat16", "float16")
_DTYPE_WORDS = {name: name for name in _DTYPES}
_DTYPE_WORDS |= dict(zip(("fp32", "bf16", "fp16"), _DTYPES, strict=True))
_KINDS = ("full", "local", "sharded")
_CONVERTERS = {
    "flag": _choice(_SWITCH),
    "on": _choice({True: True}),
    "whole": Converter(_whole),
    "kept": Converter(_whole, lambda value: value or None, 0),
    "version": _choice({1: 1, 2: 2}),
    "number": Converter(_number),
    "steps": Converter(lambda value: None if float(value) < 0 else _whole(value)),
    "percent": Converter(lambda value: float(value) / 100, lambda value: value * 100),
    "hub": Converter(_data_set, lambda value: value.removeprefix(HUB)),
    "columns": Converter(_format_of),
    "loss": _choice({True: "all", False: "assistant"}),
    "folder": Converter(lambda value: str(PurePath(value))),
    "trackers": Converter(_trackers, list, ()),
    "classes": Converter(_classes, ",".join),
    "schedule": _choice({name: name for name in _SCHEDULES}),
    "optimizer": _choice(_OPTIMIZERS),
    "strategy_of": _choice({name: name for name in ("no", "steps", "epoch")}),
    "four": _choice({True: 4, False: None}),
    "eight": _choice({True: 8, False: None}),
    "quantized": _choice({"fp4": "fp4", "nf4": "nf4"}),
    "packing": _choice({True: "concatenate", False: False}),
    "text": Converter(str),
    "object": Converter(lambda value: value),
    "names": Converter(_names, ",".join),
    "list": Converter(_names, list),
    "pair": Converter(lambda value: tuple(map(_whole, value))),
    "list_of": Converter(lambda value: tuple(map(_number, value)), list),
    "strategy": _choice({name.upper(): name for name in _FIVE} | dict(enumerate(_FIVE, 1))),
    "ours": _choice({name: name for name in (*_FIVE, "zero1", "hybrid_full")}),
    "reshard": _choice({True: "full_shard", False: "shard_grad_op"})._replace(write=_as_reshard),
    "offload": _choice({w: "everything" if on else "none" for w, on in _SWITCH.items()}),
    "offloaded": _choice({True: "everything", False: "everything"}),  # pinned or not
    "offload_param": _choice(
        {"none": "none", "cpu": "everything", True: "everything", False: "none"}
    ),
    "offload_state": _choice(
        {"none": "none", "cpu": "optimizer", True: "optimizer", False: "none"}
    ),
    "zero_stage": _choice(dict(enumerate(("no_shard", "zero1", "shard_grad_op", "full_shard")))),
    "adamw": _choice({"AdamW": "adamw", "Adam": "adamw"}),
    "ds_schedule": _choice(
        {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    ),
    "offload_policy": _choice({"OffloadPolicy()": "none", "CPUOffloadPolicy()": "everything"}),
    "dtype": _choice(_DTYPE_WORDS),
    "dtype_of_model": _choice({"auto": None} | _DTYPE_WORDS),
    "mixed": _choice({"no": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "fp32": "no"}),
    "bf16": _choice({True: "bf16", False: None}),
    "fp16": _choice({True: "fp16", False: None}),
    "wrap": _choice(
        {"TRANSFORMER_BASED_WRAP": "auto", "SIZE_BASED_WRAP": "size", "NO_WRAP": "none"}
    ),
    "wrap_policy": _choice(
        {"transformer_auto_wrap_policy": "auto", "size_based_auto_wrap_policy": "size"}
        | {"ModuleWrapPolicy": "auto", None: "none"}
    ),
    "units": _choice({"auto": "auto", "none": "none"}),
    "prefetch": _choice(
        {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post", "NO_PREFETCH": "off", 1: "pre", 2: "post"}
    ),
    "when": _choice({"pre": "pre", "post": "post"}),
    "bytes_off": _choice({0: "off"}),
    "bytes": _choice({0: False, None: True}),
    "limit": _choice({2: True, None: False}),
    "state_dict": _choice(
        {f"{kind.upper()}_STATE_DICT": kind for kind in _KINDS} | dict(enumerate(_KINDS, 1))
    ),
    "backend": Converter(fold, str.upper),
    "compiler": Converter(_backend, lambda name: name != "no" and name),
    "broadcast": _choice({True: "broadcast", False: "local"}),
    "cpu": _choice({"cpu": True}),
    **{name: _choice({True: name}) for name in _FIVE},  # words of --fsdp
}


@dataclass(frozen=True)
class Row:
    """One key of a dialect.

    Attributes:
        field: of the ``Policy``.
        version: of FSDP to which the key belongs; 0 = both.
        writes: ``False``: another spelling, which is read and not written.
        note: what the dialect's own library does with the key, if that surprises.
    """

    key: str
    field: str
    convert: Converter
    version: int = 0
    writes: bool = True
    note: str = ""


class Outside(NamedTuple):
    """Keys of a pattern that have no field: the reason, and values that change nothing."""

    key: str
    because: str
    harmless: tuple[str, ...]


def _table(text: str) -> Iterator[Row | Outside]:
    for line in text.splitlines():
        if not line or line[0] == "#":
            continue
        key, name, third, *note = line.split(None, 3)
        if name == "-":
            harmless = tuple(third.lower().split(","))
            yield from (Outside(one, note[0], harmless) for one in _spelled_out(key))
            continue
        converter, _, version = third.partition("@")
        convert = _CONVERTERS[converter]
        yield Row(key.lstrip("<"), name, convert, int(version or 0), key[0] != "<", *note)


def _spelled_out(key: str) -> Iterator[str]:
    """``a.{b,c}`` → ``a.b``, ``a.c``: real keys, of which the nearest answers one that is none."""
    head, brace, rest = key.partition("{")
    names, _, tail = rest.partition("}")
    for name in names.split(",") if brace else ():
        yield from _spelled_out(head + name + tail)
    if not brace:
        yield key


@dataclass(frozen=True)
class Dialect:
    """A table with a name.

    Attributes:
        rows: of keys that have a field.
        outsiders: patterns of keys that have none.
        prefix: of the last word of a key, with which and without which it is read.
        version: of FSDP, where a configuration does not say it.
        words: a key whose value is a list of words, each of which is a key.
        constants: what is always written.
        defaults: field → what its library takes where a training does not say it.
        whose: these are.
        implied: the same of scripts and calls: ``values``, ``whose`` they are, and ``when``.
        only: patterns of its keys; others are not part of it, and not in the report.
        call: these are arguments of a call, so they come in no file.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    outsiders: tuple[Outside, ...]
    prefix: str = ""
    version: int = 1
    words: str = ""
    constants: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    whose: str = "Trainer's default"
    implied: Sequence[Mapping[str, Any]] = ()
    only: Sequence[str] = ()
    call: bool = False

    @classmethod
    def load(cls, name: str, text: str) -> Dialect:
        """The dialect of a file in ``tables``."""
        data = tomllib.loads(text)
        rows = [*_rows(data)]
        for base in data.pop("extends", {}):
            data.setdefault("defaults", tomllib.loads(_text(base)).get("defaults", {}))
        others = tuple(row for row in rows if isinstance(row, Outside))
        own = tuple(row for row in rows if isinstance(row, Row))
        return cls(name, **data | {"rows": own, "outsiders": others})

    @cached_property
    def by_key(self) -> dict[str, list[Row]]:
        """The rows of each key in each of its spellings."""
        rows: dict[str, list[Row]] = {}
        for row in self.rows:
            for key in {row.key, self._other_spelling(row.key)}:
                rows.setdefault(key, []).append(row)
        return rows

    def _other_spelling(self, key: str) -> str:
        section, dot, name = key.rpartition(".")
        bare = name.removeprefix(self.prefix)
        return section + dot + (bare if bare != name else self.prefix + name)

    def outside(self, key: str) -> Outside | None:
        """Say why a key has no row, if that is known."""
        spellings = (key, self._other_spelling(key))
        return next(
            (o for o in self.outsiders if any(fnmatchcase(k, o.key) for k in spellings)), None
        )


_TABLES = files("shardwise.dialects").joinpath("tables")


def _text(name: str) -> str:
    return _TABLES.joinpath(f"{name}.toml").read_text("utf-8")


def _rows(data: Mapping[str, Any]) -> Iterator[Row | Outside]:
    """Its own, then those of the tables that it extends, with what keys begin with here."""
    yield from _table(data["rows"])
    for base, under in data.get("extends", {}).items():
        yield from (_renamed(row, under) for row in _rows(tomllib.loads(_text(base))))


def _renamed(row: Row | Outside, under: str) -> Row | Outside:
    key = under + (row.key.upper() if under.isupper() else row.key)
    return replace(row, key=key) if isinstance(row, Row) else row._replace(key=key)


_NAMES = sorted(Path(file.name).stem for file in _TABLES.iterdir() if file.is_file())
DIALECTS = {name: Dialect.load(name, _text(name)) for name in _NAMES}
"""All of them; a new one is a file in the folder ``tables``."""
