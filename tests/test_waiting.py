from __future__ import annotations

import pytest

from tests.waiting import wait_for


def test_what_holds_is_not_waited_for() -> None:
    wait_for(lambda: True, 0)


def test_a_test_that_waits_in_vain_fails_and_says_what_it_has_seen() -> None:
    with pytest.raises(AssertionError, match="nobody came"):
        wait_for(lambda: False, 0.05, lambda: "nobody came")
