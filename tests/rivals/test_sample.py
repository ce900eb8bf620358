"""A few of the cases beside it, in ``make test``; all of them are in ``make prove``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.rivals import test_ddp as ddp
from tests.rivals import test_fsdp1 as fsdp1
from tests.rivals import test_fsdp2 as fsdp2

SAMPLE = [
    fsdp2.test_unused_forward_output,
    fsdp2.test_dataclass_input,
    fsdp2.test_cached_state_dict,
    fsdp2.test_multi_forward_mixed_requires_grad,
    fsdp1.test_ignored_modules_nested,
    fsdp1.test_mixture_of_experts,
    ddp.test_multiple_outputs_multiple_backward,
    ddp.test_output_of_a_class_of_its_own,
]


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.__name__)
def test_a_case_of_pytorch(case: Callable[[], None]) -> None:
    case()
