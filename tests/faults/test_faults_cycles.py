"""Ranks that wait for each other crosswise: a cycle is named, and what only looks like one is left alone."""

import logging.handlers
import multiprocessing
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import resource_sharer
from unittest.mock import patch

import pytest
import torch
from faults import Outcome, my_rank, suffer
from faults_model import model_and_step
from marks import mostly_nightly
from pool import run_on_ranks
from torch.utils.data._utils.pin_memory import _pin_memory_loop

import syncengine


@pytest.mark.thorough
@run_on_ranks(world=2, settings=None)
def test_threads_that_wait_crosswise_are_no_cycle():
    """Rank 0 is late for backward, rank 1 for the other thread's calls: what looks like a cycle resolves itself."""

    def body(step):
        _, train = model_and_step()
        for _ in range(3):
            train()

        def metrics():
            syncengine.all_reduce(torch.ones(10))
            if my_rank() == 1:
                time.sleep(1.0)
            syncengine.all_reduce(torch.ones(10))

        with ThreadPoolExecutor(1) as threads:
            other = threads.submit(metrics)
            time.sleep(1.2 if my_rank() == 0 else 0.2)
            train()
            other.result()

    suffer(body, timeout=100.0).check()


@pytest.mark.thorough
@run_on_ranks(world=2, settings=None)
def test_a_thread_that_has_made_no_call_yet_may_bring_what_is_missing():
    """Backward on one rank, metrics on the other; the thread that brings the rest makes its first call much later."""

    def body(step):
        _, train = model_and_step()
        for _ in range(3):
            train()

        begun = threading.Event()

        def late():
            begun.set()
            time.sleep(1.2)
            train() if my_rank() == 0 else syncengine.all_reduce(torch.ones(10))

        with ThreadPoolExecutor(1) as threads:
            other = threads.submit(late)
            begun.wait()
            syncengine.all_reduce(torch.ones(10)) if my_rank() == 0 else train()
            other.result()

    suffer(body, timeout=100.0).check()


def run_beside(beside, stack):
    """Starts a thread as programs have them."""
    if beside == "idle":
        done = threading.Event()
        start(threading.Thread(target=done.wait), done.set, stack)
    elif beside == "feeder":  # as a DataLoader's workers have
        feeder = multiprocessing.Queue()
        feeder.put(1)
        stack.callback(feeder.join_thread)
        stack.callback(feeder.close)
    elif beside == "sharer":  # as in a process that has sent a tensor to another
        resource_sharer.DupFd(0)
        stack.callback(resource_sharer.stop)
    elif beside == "pin_memory":  # a DataLoader's, where there is an accelerator
        stack.enter_context(patch("torch.accelerator.set_device_index"))
        done, batches = threading.Event(), queue.Queue()
        arguments = (batches, queue.Queue(), 0, done, "")
        start(threading.Thread(target=_pin_memory_loop, args=arguments), lambda: batches.put((0, None)), stack)
        stack.callback(done.set)
    elif beside in ("worker", "busy worker"):  # torch.compile leaves one
        task = threading.Event()
        stack.enter_context(ThreadPoolExecutor(1)).submit(task.wait)
        (task.set if beside == "worker" else partial(stack.callback, task.set))()
    elif beside == "logging":
        listener = logging.handlers.QueueListener(queue.Queue())
        listener.start()
        stack.callback(listener.stop)


def start(thread, end, stack):
    thread.start()
    stack.callback(thread.join)
    stack.callback(end)


def crosswise(beside) -> Outcome:
    """A collective on another communicator each; `beside`: what other threads there are."""

    def body(step):
        world = syncengine.default_communicator()
        first, second = world.split([0, 1]), world.split([0, 1])
        with ExitStack() as stack:
            run_beside(beside, stack)
            step()
            (first if my_rank() == 0 else second).all_reduce(torch.ones(10))

    return suffer(body, timeout=2.0 if beside in ("idle", "busy worker") else 30.0)


@pytest.mark.parametrize("beside", ["none", "feeder", "sharer", "pin_memory", "logging", "worker"])
def test_crosswise_on_two_communicators(pool, beside):
    pool.refresh()  # a thread that an earlier test has left (autograd keeps some) could bring what is missing
    for outcome in pool.run(crosswise, beside, world=2, settings=None):
        outcome.check("Mismatch", "of another communicator for rank", soon=True)


@pytest.mark.thorough
@pytest.mark.parametrize("beside", mostly_nightly(["idle", "busy worker"], 1))
def test_crosswise_beside_another_thread_is_a_timeout_that_names_both(pool, beside):
    outcomes = pool.run(crosswise, beside, world=2, settings=None)
    # Who is first leaves, and waits no more when the other comes to its own deadline.
    timeouts = [outcome.text for outcome in outcomes if outcome.error == "Timeout"]
    assert any("; meanwhile rank" in text and "of another communicator for rank" in text for text in timeouts), outcomes
