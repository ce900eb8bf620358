"""Names of repeated layers are one line, and none is lost."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.units.names import NameGroup, group_names


def folded(*names: str) -> list[str]:
    return [group.name for group in group_names((name, ()) for name in names)]


def test_layers_are_one_line() -> None:
    names = [f"model.layers.{n}.mlp.up.weight" for n in range(32)]
    assert group_names((name, "bf16") for name in names) == [
        NameGroup("model.layers.{0…31}.mlp.up.weight", 32, "bf16")
    ]


def test_only_like_tensors_are_folded() -> None:
    kinds = [("h.0.w", 1), ("h.1.w", 2), ("h.2.w", 1), ("norm", 1)]
    assert group_names(kinds) == [
        NameGroup("h.{0,2}.w", 2, 1),
        NameGroup("h.1.w", 1, 2),
        NameGroup("norm", 1, 1),
    ]


def test_experts_are_folded_in_both_numbers() -> None:
    names = [f"layers.{n}.experts.{k}.w" for n in range(3) for k in range(4)]
    assert folded(*names) == ["layers.{0…2}.experts.{0…3}.w"]
    names.remove("layers.1.experts.2.w")
    assert folded(*names) == ["layers.{0,2}.experts.{0…3}.w", "layers.1.experts.{0…1,3}.w"]


def test_a_number_is_a_whole_part_of_a_name() -> None:
    assert folded("conv1.w", "conv2.w") == ["conv1.w", "conv2.w"]
    assert folded("0.weight", "1.weight") == ["{0…1}.weight"]
    assert folded("x.0", "x.1") == ["x.{0…1}"]
    assert folded("exp_avg/0.w", "exp_avg/1.w") == ["exp_avg/{0…1}.w"]
    assert folded("a.01", "a.02") == ["a.01", "a.02"]


def test_many_gaps_are_counted() -> None:
    assert folded(*(f"h.{2 * n}.w" for n in range(9))) == ["h.{9 of 0…16}.w"]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), unique=True))
def test_no_name_is_lost_or_made_up(numbers: list[tuple[int, int]]) -> None:
    groups = group_names((f"a.{n}.b.{k}", ()) for n, k in numbers)
    plural: Counter[str] = Counter()
    for name, count, _ in groups:
        texts = [""]
        for part in name.split("."):
            texts = [f"{text}.{one}" for text in texts for one in unfolded(part)]
        assert len(texts) == count
        plural.update(text[1:] for text in texts)
    assert plural == Counter(f"a.{n}.b.{k}" for n, k in numbers)


def unfolded(part: str) -> list[str]:
    if not part.startswith("{"):
        return [part]
    runs = [run.split("…") for run in part.strip("{}").split(",")]
    return [str(n) for run in runs for n in range(int(run[0]), int(run[-1]) + 1)]


def test_a_name_of_very_many_numbers_is_shown_as_it_is() -> None:
    deep = ".".join(["1"] * 1_500)
    assert folded(deep, f"{deep}.w") == [deep, f"{deep}.w"]
