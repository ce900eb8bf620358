"""No garbage is collected in a block, nor in those of other threads."""

from __future__ import annotations

import gc
import threading

from shardwise.comm.garbage import uncollected


def test_none_is_collected_in_the_block_and_afterwards_as_before() -> None:
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_several_threads_may_be_in_one_at_once_and_garbage_is_collected_after_the_last() -> None:
    """A block may let go of a comm, which waits for its watchdog, which is in another."""
    ended, entered = threading.Event(), threading.Event()

    def block() -> None:
        with uncollected():
            entered.set()
            assert ended.wait(60)

    other = threading.Thread(target=block)
    with uncollected():
        other.start()
        assert entered.wait(60)
    assert not gc.isenabled()
    ended.set()
    other.join()
    assert gc.isenabled()
