"""Ranks that wait for each other crosswise: a cycle is named, and what only looks like one is left alone."""

import multiprocessing
import threading
import time

import pytest
import torch
from faults import WITHIN, Outcome, my_rank, suffer
from faults_model import model_and_step

import syncengine


def two_threads() -> Outcome:
    """Rank 0 is late for backward, rank 1 for the other thread's calls: what looks like a cycle resolves itself."""

    def body(step):
        _, train = model_and_step()
        for _ in range(3):
            train()
        errors = []

        def metrics():
            try:
                syncengine.all_reduce(torch.ones(10))
                if my_rank() == 1:
                    time.sleep(1.0)
                syncengine.all_reduce(torch.ones(10))
            except syncengine.errors.SyncError as error:
                errors.append(error)

        thread = threading.Thread(target=metrics)
        thread.start()
        time.sleep(1.2 if my_rank() == 0 else 0.2)
        try:
            train()
        finally:
            thread.join()
        if errors:
            raise errors[0]

    return suffer(body, timeout=30.0)


def test_threads_that_wait_crosswise_are_no_cycle(pool):
    for outcome in pool.run(two_threads, world=2, settings=None):
        assert (outcome.error, outcome.left) == ("", []), outcome


def late_thread() -> Outcome:
    """Backward on one rank, metrics on the other; the thread that brings the rest makes its first call much later."""

    def body(step):
        _, train = model_and_step()
        for _ in range(3):
            train()
        errors = []

        def late():
            time.sleep(1.2)
            try:
                train() if my_rank() == 0 else syncengine.all_reduce(torch.ones(10))
            except syncengine.errors.SyncError as error:
                errors.append(error)

        thread = threading.Thread(target=late)
        thread.start()
        try:
            syncengine.all_reduce(torch.ones(10)) if my_rank() == 0 else train()
        finally:
            thread.join()
        if errors:
            raise errors[0]

    return suffer(body, timeout=30.0)


def test_a_thread_that_has_made_no_call_yet_may_bring_what_is_missing(pool):
    for outcome in pool.run(late_thread, world=2, settings=None):
        assert (outcome.error, outcome.left) == ("", []), outcome


def crosswise(beside) -> Outcome:
    """A collective on another communicator each; `beside`: what other threads there are."""

    def body(step):
        world = syncengine.default_communicator()
        first, second = world.split([0, 1]), world.split([0, 1])
        done = threading.Event()
        idle = threading.Thread(target=done.wait)
        feeder = multiprocessing.Queue()
        if beside == "idle":
            idle.start()
        elif beside == "feeder":  # as a DataLoader's workers have
            feeder.put(1)
        step()
        try:
            (first if my_rank() == 0 else second).all_reduce(torch.ones(10))
        finally:
            done.set()
            feeder.close()
            feeder.join_thread()

    return suffer(body, timeout=2.0 if beside == "idle" else 30.0)


@pytest.mark.parametrize("beside", ["none", "feeder"])
def test_crosswise_on_two_communicators(pool, beside):
    for outcome in pool.run(crosswise, beside, world=2, settings=None):
        assert outcome.error == "Mismatch", outcome
        assert "of another communicator for rank" in outcome.text
        assert outcome.seconds < WITHIN


def test_crosswise_beside_another_thread_is_a_timeout_that_names_both(pool):
    outcomes = pool.run(crosswise, "idle", world=2, settings=None)
    # Who is first leaves, and waits no more when the other comes to its own deadline.
    timeouts = [outcome.text for outcome in outcomes if outcome.error == "Timeout"]
    assert any("; meanwhile rank" in text and "of another communicator for rank" in text for text in timeouts), outcomes
