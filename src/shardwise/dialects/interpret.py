"""Reading a dialect into a policy, and writing a policy in a dialect, by the same rows.

Every key of the input is one entry of the report: used (it is called the same here, or is so by
default), translated, ignored with the reason, contradictory, or to be filled in. After them come
the defaults of the program that was configured. What a dialect has no words for is found by reading
back what was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from shardwise.dialects.contradictions import CONTRADICTIONS, MISSING, NEEDED, NOTES, UNREAD
from shardwise.dialects.keys import flatten, nest
from shardwise.dialects.policy import FILL_IN, Policy
from shardwise.dialects.rows import DIALECTS, Dialect, Outside, Row
from shardwise.dialects.settings import Expression
from shardwise.errors import ConfigError
from shardwise.recipe.recipe import keys

_OURS = DIALECTS["recipe"]
_OFF: tuple[Any, ...] = (None, False, (), "no", "local")  # needs no option of an engine
_COMPUTED = "it is computed when this runs"
_OFF_WORDS = ("false", "no", "0", "", "[]", "{}")


class Entry(NamedTuple):
    """The outcome of one key.

    Attributes:
        status: ``used``, ``translated``, ``ignored``, ``contradictory``, ``fill in`` (a recipe
            needs a value that is not shown), or ``default`` (an absent key has this value).
        text: where it went, or why it did not.
    """

    key: str
    value: Any
    status: str
    text: str


@dataclass(frozen=True, repr=False)
class Report:
    """The policy that a configuration means, and each of its keys once, in its order; defaults.

    ``flat`` has our keys, with ``FILL_IN`` for what a program computes and has a default.
    """

    dialect: Dialect
    policy: Policy
    entries: tuple[Entry, ...]
    flat: Mapping[str, Any]

    def __repr__(self) -> str:
        lines = (f"  {e.status:<13} {e.key}: {e.value} → {e.text}" for e in self.entries)
        return "\n".join([f"Report of {self.dialect.title}:", *lines])

    def check(self, strict: bool = False) -> None:
        """Raise if keys contradict each other; with ``strict`` also if one is not used.

        Raises:
            ConfigError: with all of these keys.
        """
        fatal = ("contradictory", "ignored", "fill in") if strict else ("contradictory",)
        wrong = [
            f"{key}: {value} is {status}: {text}"
            for key, value, status, text in self.entries
            if status in fatal
        ]
        if wrong:
            raise ConfigError("\n".join([f"{self.dialect.title} cannot be followed:", *wrong]))

    def places(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what is used, as a recipe, and by its place where a recipe has no key for it."""
        recipe = nest({place: value for place, value in self.flat.items() if is_in_recipe(place)})
        return recipe, {place: v for place, v in self.flat.items() if not is_in_recipe(place)}


class Written(NamedTuple):
    """A policy in a dialect.

    Attributes:
        tree: nested as the dialect nests it.
        lost: field → its value, and what the dialect's reader would take instead.
    """

    tree: dict[str, Any]
    lost: dict[str, tuple[Any, Any]]


class _Match(NamedTuple):
    key: str
    raw: Any
    row: Row
    value: Any


def guess(tree: Any) -> Dialect:
    """The dialect that knows most of the keys.

    Raises:
        ConfigError: none knows any of them.
    """
    known = {}  # keys that are read, and those of which it is said why they are not
    for name, dialect in DIALECTS.items():
        if not dialect.call:
            given = [key for key, _ in flatten(tree, dialect.words)]
            read_ones = sum(key in dialect.by_key for key in given)
            patterns = [outside.key for outside in dialect.outsiders if outside.key != "*"]
            explained = sum(any(fnmatchcase(key, pattern) for pattern in patterns) for key in given)
            known[name] = read_ones, explained
    best = max(known, key=lambda name: known[name])
    if not any(known[best]):
        first = ", ".join(key for key, _ in list(flatten(tree))[:6])
        raise ConfigError(f"none of {', '.join(known)} has any of the keys {first}.")
    return DIALECTS[best]


def read(tree: Any, dialect: str | None = None, strict: bool = False) -> Report:
    """The policy of a configuration, and what became of each key.

    Args:
        tree: nested mappings; values may be torch's objects.
        dialect: its name in ``DIALECTS``; ``None`` = the one that knows most of the keys.
        strict: raise where ``Report.check`` does.

    Raises:
        ConfigError: see ``strict``; ``tree`` has no keys, or no dialect knows them.
    """
    if not isinstance(tree, Mapping) or not (tree or dialect):
        raise ConfigError(
            f"a configuration is a mapping of at least one key to its value, and this is the "
            f"{type(tree).__name__} {tree!r:.60}. Pass what json.load() or yaml.safe_load() made "
            "of the file; for a library's defaults name the dialect."
        )
    chosen = DIALECTS[dialect] if dialect else guess(tree)
    # An environment has other programs' variables, too, and a program has other calls.
    only = chosen.only or ("*",)
    items = flatten(tree, chosen.words)
    flat = {key: raw for key, raw in items if any(fnmatchcase(key, pattern) for pattern in only)}
    matches = {key: _match(chosen, key, raw) for key, raw in flat.items()}
    matches |= _in_data_set(matches)
    matched = [match for match in matches.values() if isinstance(match, _Match)]
    version = next((match.value for match in matched if match.row.field == "fsdp_version"), None)
    winners = _winners(matched, version or chosen.version)
    computed = {f for f, winner in winners.items() if winner.value == FILL_IN and f not in NEEDED}
    named = Policy(**{f: winner.value for f, winner in winners.items() if f not in computed})
    defaults = _defaults(chosen, flat, named)
    completed = replace(named, **{name: value for name, (value, _) in defaults.items()})
    computed &= defaults.keys()  # which only stand for what is computed
    ours = dict(_flat(completed.settled(), _OURS))
    ours |= {r.key: FILL_IN for r in _OURS.rows if r.field in computed and r.key in ours}
    policy = replace(completed, **dict.fromkeys(computed)).settled()
    entries = [
        (_overruled(match, winners[match.row.field]) or _judge(match, named, completed, ours))
        if isinstance(match, _Match)
        else match
        for match in matches.values()
    ]
    defaults = {name: default for name, default in defaults.items() if name not in computed}
    assumed = [*_assumed(chosen, completed, defaults, ours)]
    report = Report(chosen, policy, (*_once(entries, assumed),), ours)
    if strict:
        report.check(strict)
    return report


def _match(dialect: Dialect, key: str, raw: Any) -> _Match | Entry:
    """The first row of ``key`` that knows the value; else what is wrong."""
    problem, is_computed = "", isinstance(raw, Expression)
    for row in dialect.by_key.get(key, ()):
        try:
            if is_computed and (row.field in NEEDED or not row.convert.words):
                raise ValueError("it is an expression")
            value = row.convert.none if raw is None else row.convert.read(raw)
            return _Match(key, raw, row, value)
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            problem = problem or f"not a value of this key; {error}"
    if is_computed and key == dialect.words:
        return Entry(key, raw, "ignored", f"{_COMPUTED}; set sharding.strategy in the recipe")
    outside = dialect.outside(key)
    if problem and (outside is None or outside.key != key):
        if is_computed:
            return _Match(key, raw, dialect.by_key[key][0], FILL_IN)
        return Entry(key, raw, "contradictory", problem)
    if outside:
        return _outside(key, raw, raw, outside)
    others = (outside.key for outside in dialect.outsiders if "*" not in outside.key)
    near = get_close_matches(key, [*dialect.by_key, *others], 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return Entry(key, raw, "ignored", f"there is no such key{hint}")


def _in_data_set(matches: Mapping[str, _Match | Entry]) -> dict[str, _Match]:
    """Find files of ``load_dataset("OWNER/NAME", data_files=…)``: they are in the data set."""
    base = matches.get("load_dataset.0")
    if not isinstance(base, _Match) or base.value is None:  # the kind of files on this machine
        return {}
    named = {
        key: match
        for key, match in matches.items()
        if key.startswith("load_dataset.data_files") and isinstance(match, _Match)
    }
    files = {
        key: match._replace(value=f"{base.value}/{match.raw}")
        if base.value != FILL_IN and match.value == match.raw
        else match._replace(value=FILL_IN)
        for key, match in named.items()
    }
    trained = (match.value for match in files.values() if match.row.field == "dataset")
    return {**files, base.key: base._replace(value=next(trained, base.value))}


def _outside(key: str, raw: Any, value: Any, outside: Outside) -> Entry:
    word = str(value).lower()
    is_off = word in _OFF_WORDS and "true" not in outside.harmless
    harmless = value is None or is_off or {word, "*"} & {*outside.harmless}
    return Entry(key, raw, "used" if harmless else "ignored", outside.because)


def _winners(matched: list[_Match], version: int) -> dict[str, _Match]:
    """Return for each field the first key of this version of FSDP, or else the first key."""
    winners: dict[str, _Match] = {}
    for match in sorted(
        matched,
        key=lambda g: (g.value is None, g.value == FILL_IN, g.row.version not in (0, version)),
    ):
        winners.setdefault(match.row.field, match)
    return winners


def _overruled(match: _Match, winner: _Match) -> Entry | None:
    """The entry of a key that says something else than the field's winner."""
    if match.value in (None, FILL_IN, winner.value):
        return None
    if match.row.version and match.row.version != winner.row.version:
        text = f"it is a key of FSDP{match.row.version}, and {winner.key} is given"
        return Entry(match.key, match.raw, "ignored", text)
    text = f"{winner.key} is {winner.raw}, and both mean one thing; keep one of them"
    return Entry(match.key, match.raw, "contradictory", text)


def _defaults(
    dialect: Dialect, flat: Mapping[str, Any], named: Policy
) -> dict[str, tuple[Any, str]]:
    """Field → value, and whose default that is, of what a script and its libraries take."""
    lines = [f"{key} = {raw}" for key, raw in flat.items()]
    sources = [
        (source["values"], source["whose"])
        for source in dialect.implied
        if all(any(fnmatchcase(line, pattern) for line in lines) for pattern in source["when"])
    ]
    if (
        is_of_trainer(dialect, flat)
        or (named.lr, named.epochs, named.steps, named.micro) != (None,) * 4
    ):
        sources.append((dialect.defaults, dialect.whose))
    dataset = named.dataset or (named.model and FILL_IN)
    if dataset and dialect.call:
        sources.append(({"dataset": dataset}, "no data set is shown"))
    if dataset and dialect.call and not dataset.endswith(".txt"):
        shown = "alpaca" if "alpaca" in dataset else FILL_IN
        sources.append(({"data_format": shown}, "by the data set's name"))
    defaults: dict[str, tuple[Any, str]] = {}
    for values, whose in sources:
        for name, value in values.items():
            if getattr(named, name) is None:
                defaults.setdefault(name, (value, whose))
    return defaults


def is_of_trainer(dialect: Dialect, flat: Mapping[str, Any]) -> bool:
    """Is a whole training configured, by a program or the command line of a known script?

    A script is known by its name, or by its options: most of them are Trainer's.
    """
    if "launch.script" not in flat:
        return any(key.startswith("TrainingArguments.") for key in flat)
    own = [key for key in flat if not key.startswith(("launch.", "env."))]
    known = [key for key in own if key in dialect.by_key or dialect.outside(key)]
    line = f"launch.script = {flat['launch.script']}"
    return 2 * len(known) > len(own) or any(line in source["when"] for source in dialect.implied)


def _assumed(
    dialect: Dialect,
    completed: Policy,
    defaults: Mapping[str, tuple[Any, str]],
    ours: Mapping[str, Any],
) -> Iterator[Entry]:
    """An entry for each default that changes the recipe; its key is ``-`` if it has none."""
    flat = dict(_flat(completed.settled(), _OURS))
    for name, (value, whose) in defaults.items():
        without = replace(completed, **{name: None}).settled()
        rows = [row for row in dialect.rows if row.field == name]
        if name == "dataset":
            yield Entry(rows[0].key, None, "fill in", _missing(name, completed))
        if value == FILL_IN or dict(_flat(without, _OURS)) == flat:
            continue
        keys = _flat(Policy(**{name: value}), dialect)
        place = next(row.key for row in _OURS.rows if row.field == name and row.key in flat)
        yield Entry(*next(keys, ("-", value)), "default", f"{place}: {ours[place]} ({whose})")


def _once(entries: list[Entry], assumed: list[Entry]) -> Iterator[Entry]:
    """Each key once: one that says no value of its own has the line of its default."""
    lines = {entry.key: entry for entry in assumed if entry.key != "-"}
    for entry in entries:
        line = lines.pop(entry.key, None) if entry.status == "used" else None
        yield entry._replace(status=line.status, text=line.text) if line else entry
    given = {entry.key for entry in entries}
    yield from (entry for entry in assumed if entry.key not in given)


def _judge(match: _Match, named: Policy, completed: Policy, ours: Mapping[str, Any]) -> Entry:
    """The entry of a key: of what is ``named``, with defaults ``completed``, and our keys."""
    if match.value == FILL_IN and match.row.field not in NEEDED:
        return Entry(match.key, match.raw, *_computed(match.row.field, ours))
    both = ("contradictory", CONTRADICTIONS, named), ("ignored", UNREAD, completed)
    for status, rules, meant in both:
        for rule in rules:
            if rule.field == match.row.field and rule.broken(meant):
                return Entry(match.key, match.raw, status, rule.sentence)
    if match.value is not None and (missing := _missing(match.row.field, completed.settled())):
        return Entry(match.key, match.raw, "fill in", missing)
    if always := [outside for outside in _OURS.outsiders if outside.key == match.row.field]:
        return _outside(match.key, match.raw, match.value, always[0])
    status, text = _placed(match, ours)
    notes = [rule for rule in NOTES if rule.field == match.row.field and rule.broken(named)]
    note = "; ".join(filter(None, [match.row.note, *(rule.sentence for rule in notes)]))
    return Entry(match.key, match.raw, status, f"{text} ({note})" if note else text)


def _missing(field: str, policy: Policy) -> str:
    return "; ".join(r.sentence for r in MISSING if r.field == field and r.broken(policy))


def _computed(field: str, ours: Mapping[str, Any]) -> tuple[str, str]:
    places = [r.key for r in _OURS.rows if r.field == field and ours.get(r.key) == FILL_IN]
    if places:
        return "fill in", f"{' and '.join(places)} needs a value: {_COMPUTED}"
    return "ignored", f"{_COMPUTED}; set it in the recipe"


def _placed(match: _Match, flat: Mapping[str, Any]) -> tuple[str, str]:
    """Status and text of a key by its place in ``flat``, our own dialect."""
    places = [row.key for row in _OURS.rows if row.field == match.row.field]
    place = next((place for place in places if place in flat), places[0])
    value = flat.get(place)
    if place not in flat and match.value in _OFF:
        return "used", "as it is by default"
    if place not in flat:
        return "ignored", f"{place} has no such value"
    is_same_name = match.key.rpartition(".")[2].removeprefix("fsdp_") == place.rpartition(".")[2]
    return "used" if is_same_name and value == match.value else "translated", f"{place}: {value}"


def write(policy: Policy, dialect: str) -> Written:
    """The policy in a dialect, and which fields it has no words for.

    FSDP1's keys are written, or FSDP2's where the policy says version 2, or a mesh's sizes, for
    which FSDP1 has no keys.
    """
    policy = policy.settled()
    version = policy.fsdp_version or (2 if policy.replicate or policy.shard else 1)
    # DeepSpeed has a key of its own for the optimizer's state.
    complete = replace(policy, fsdp_version=version, offload_state=policy.offload)
    flat = dict(_flat(complete, DIALECTS[dialect], version))
    tree = nest({**DIALECTS[dialect].constants, **flat})
    back = read(tree, dialect).policy
    both = ((f.name, getattr(policy, f.name), getattr(back, f.name)) for f in fields(policy))
    return Written(tree, {n: (a, b) for n, a, b in both if a is not None and a != b})


def _flat(policy: Policy, dialect: Dialect, version: int = 0) -> Iterator[tuple[str, Any]]:
    """Key and value of each row that can express the policy's field."""
    for row in dialect.rows:
        value = getattr(policy, row.field)
        if value is None or not row.writes or (version and row.version not in (0, version)):
            continue
        try:
            yield row.key, row.convert.write(value)
        except ValueError:
            continue


def is_in_recipe(place: str) -> bool:
    """Is it a key of a recipe?"""
    return place in {key.name for key in keys()}
