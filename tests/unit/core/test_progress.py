"""Progress counts once, whoever advances it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ingot.core.runtime.progress import Progress, ProgressEvent


def test_events_add_up():
    events = []
    progress = Progress(10, events.append, processed=2)
    progress.advance(3, "a")
    progress.advance(5, "b")
    assert events == [ProgressEvent(5, 10, "a"), ProgressEvent(10, 10, "b")]


def test_threads_lose_nothing():
    seen = []
    progress = Progress(4000, lambda event: seen.append(event.processed))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: progress.advance(1), range(4000)))
    assert seen == list(range(1, 4001))


def test_without_a_callback_it_only_counts():
    progress = Progress(1)
    progress.advance(1)
    assert progress.processed == 1


def test_a_callback_may_end_the_job():
    def stop(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Progress(1, stop).advance(1)
