"""What elastic() keeps of a step's beginning, and sends: buffers of any kind, NumPy's arrays, and no Python objects."""

import collections
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from faults import Outcome, suffer
from launcher import Launcher
from pool import run_on_ranks
from torch import nn
from torch.optim import lr_scheduler

import syncengine
from syncengine import _joining
from syncengine._keeping import Updates
from syncengine._sending import pack, refuse_unsendable, unpack
from syncengine.errors import InvalidUsage
from syncengine.launch.local import JOIN
from syncengine.parallel.kept_buffers import KeptBuffers, buffers_of, write_buffers

STRUCTURE = [("a", "i1"), ("b", ">f8"), ("c", "U3")]
SENT = [
    np.random.RandomState(3).get_state(),
    np.random.default_rng(3).bit_generator.state,
    np.random.Generator(np.random.MT19937(3)).bit_generator.state,
    np.random.Generator(np.random.Philox(3)).bit_generator.state,
    random.getstate(),
    torch.get_rng_state(),
    np.float64(1e-3),
    np.longdouble(1) / 3,
    np.bool_(True),
    np.str_("text"),
    np.datetime64("2026-11-28"),
    np.array([(1, 2.5, "abc")], dtype=STRUCTURE),
    np.array([(1, 2.5, "abc")], dtype=np.dtype(STRUCTURE, align=True)),
    np.array([(1, 2.5, "abc")], dtype=STRUCTURE)[0],
    np.array(["a", "bcd"]),
    np.array([b"a\0b"]),
    np.array(3.0),
    np.zeros((0, 3), np.complex64),
    np.asfortranarray(np.arange(6.0).reshape(2, 3))[:, ::2],
    {np.int64(3): [np.float16(1), {"deep": (np.ones(2, bool), torch.ones(2))}], ("a", 1): {1, 2}},
    collections.Counter({np.int64(30): 1}),
    (1.5, 3j, 2**200, b"bytes", None, torch.float16, torch.Size([3])),
]


def same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return (
            [*map(type, one)] == [*map(type, other)] and [*one] == [*other] and all(same(one[k], other[k]) for k in one)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes() and np.shape(one) == np.shape(other)
    return one == other


@pytest.mark.parametrize("value", SENT, ids=lambda value: type(value).__name__)
def test_it_arrives_as_it_was(value):
    refuse_unsendable("it", value)
    assert same(unpack(pack(value)), value)


def test_attributes_of_a_models_state_arrive():
    arrived = unpack(pack(nn.BatchNorm1d(2).state_dict()))
    assert arrived._metadata[""] == {"version": 2}


def test_the_states_of_torchs_schedulers_can_be_sent():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=np.float64(0.1), momentum=0.9)
    one = lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    for scheduler in (
        one,
        lr_scheduler.MultiStepLR(optimizer, np.array([3, 5])),
        lr_scheduler.OneCycleLR(optimizer, np.float64(0.1), 10),
        lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, scale_fn=lambda x: x),
        lr_scheduler.ReduceLROnPlateau(optimizer),
        lr_scheduler.SequentialLR(optimizer, [one, lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]),
        lr_scheduler.ChainedScheduler([one]),
        torch.optim.swa_utils.SWALR(optimizer, 0.1),
    ):
        refuse_unsendable("scheduler", scheduler.state_dict())


class Odd:
    """State of which a part is something else from a step on."""

    def __init__(self, part, since=0):
        self.part, self.since, self.step = part, since, 0

    def state_dict(self):
        return {"step": self.step, "parts": [1, {"odd": self.part if self.step >= self.since else 0}]}

    def load_state_dict(self, state):
        self.step = state["step"]


WHERE = r"the state of odd: state_dict\(\)\['parts'\]\[1\]\['odd'\], a {}, is neither"
ODD = {
    "PosixPath": Path("/"),
    "ndarray": np.array([None]),
    "MaskedArray": np.ma.array([1]),
    "function": test_it_arrives_as_it_was,
    "Odd": Odd(1),
    "SeedSequence": np.random.SeedSequence(1),
    "deque": collections.deque(),
}


@run_on_ranks(world=1)
def test_what_cannot_be_sent_is_refused_by_name():
    model = syncengine.Parallel(nn.Linear(2, 2))

    def steps(elastic):
        for _ in elastic.steps(3):
            odd.step += 1

    for kind, part in ODD.items():
        for since in (0, 1):  # at the start, and behind the first step
            odd = Odd(part, since)
            with pytest.raises(InvalidUsage, match=WHERE.format(kind)):
                syncengine.elastic(steps, model=model, odd=odd)
            assert odd.step == since


def meets_somebody(steps) -> Outcome:
    _joining._LOOK = 0.0

    def body(_):
        model, odd = syncengine.Parallel(nn.Linear(2, 2)), Odd(Path("/"), since=2)

        def train(elastic):
            for _ in elastic.steps(steps):
                odd.step += 1
                syncengine.all_reduce(torch.ones(1))

        door = _joining.Door.somebody_waits
        _joining.Door.somebody_waits = lambda self: odd.step >= 3 and door(self)
        syncengine.elastic(train, model=model, odd=odd)

    return suffer(body, timeout=60.0)


def test_what_can_no_more_be_sent_is_refused_on_all_ranks_when_somebody_joins(pool):
    with Launcher(pool, meets_somebody, 10**9) as launcher:
        launcher.start(2)
        launcher.join(2)
        for outcome in launcher.outcomes(60.0).values():
            assert outcome.error == "InvalidUsage" and "the state of odd" in outcome.text, outcome


# --- Buffers


class Caches(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.register_buffer("grows", torch.arange(2.0))
        self.register_buffer("resized", torch.arange(3.0), persistent=False)
        self.register_buffer("vanishes", torch.full((2,), -0.0))
        self.register_buffer("appears", None)
        self.register_buffer("retyped", torch.ones(2))
        with torch.inference_mode():
            self.register_buffer("inferred", torch.ones(2))

    def forward(self, x):
        self.inner(x)
        self.grows = torch.cat([self.grows, self.grows])
        self.resized.resize_(5).fill_(7)
        self.vanishes.zero_()
        del self.vanishes
        self.appears = torch.ones(4)
        self.retyped = self.retyped.double()
        self.inner.register_buffer("another", torch.ones(()), persistent=False)
        self.register_buffer("not_saved", torch.ones(1), persistent=False)
        with torch.inference_mode():
            self.inferred.add_(1)


def facts(model):
    return [
        (path, name, None if b is None else (b.dtype, b.tolist(), [*map(str, b.view(-1).tolist())]))
        for path, module in model.named_modules()
        for name, b in module._buffers.items()
    ], [*model.state_dict()]


def test_buffers_are_put_back():
    model = Caches()
    before, kept, tensor = facts(model), KeptBuffers(model), model.inner.running_mean
    for _ in range(2):
        model(torch.randn(3, 2))
        assert facts(model) != before
        kept.put_back()
        assert facts(model) == before
        assert model.inner.running_mean is tensor


def test_buffers_are_given_to_a_rank_that_is_behind():
    ahead, behind = Caches(), Caches()
    ahead(torch.randn(3, 2))
    write_buffers(behind, unpack(pack(buffers_of(ahead))))
    assert facts(behind) == facts(ahead)


# --- Updates


def test_every_change_of_weights_counts():
    net = nn.Linear(2, 3)
    net.small = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    net.column, net.one = nn.Parameter(torch.ones(3, 2)[:, :1]), nn.Parameter(torch.ones(3)[::3])
    optimizer = torch.optim.SGD([net.weight], lr=0.0, fused=True)
    updates = Updates({"net": net, "optimizer": optimizer})
    seen = [updates.look()]

    def counts(what):
        what()
        now = updates.look()
        changed, seen[:] = now != seen[-1], [now]
        return changed

    with updates.counting():
        assert not counts(lambda: net(torch.ones(1, 2)).sum().backward())
        assert counts(optimizer.step)
        assert counts(lambda: torch.optim.SGD(net.parameters(), lr=0.0, fused=True).step())
        for write in (lambda: net.bias.data.neg_(), lambda: setattr(net.small, "data", torch.zeros(3).bfloat16())):
            assert counts(write)
        assert all(counts(lambda p=p: p.data.neg_()) for p in (net.column, net.one))
        assert not counts(lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step())
        optimizer.zero_grad()
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        assert not counts(lambda: None)  # it has had no gradients
        evaluations = []

        class Twice(torch.optim.Optimizer):
            def step(self, closure):
                evaluations.append(closure())
                closure()

        def closure():
            assert evaluations == [] or counts(lambda: None)
            return 1 if not evaluations else 1 / 0

        for given in ({}, {"closure": closure}):
            evaluations.clear()
            with pytest.raises(ZeroDivisionError):
                Twice([net.weight], {}).step(*(() if given else [closure]), **given)
            assert evaluations == [1]
    assert not counts(optimizer.step)


# --- The launcher


def loses_the_launcher(name) -> Outcome:
    """The process called `name` loses the launcher's store when it has connected."""
    _joining._LOOK = 0.0
    if int(os.environ.get(JOIN, os.environ["RANK"])) == name:

        class Lost:
            def __init__(self, store):
                self._store = store

            def __getattr__(self, call):
                return getattr(self._store, call)

            def add(self, *_):
                raise dist.DistNetworkError("Connection reset by peer")

        meet = _joining.Door._meet

        def meets_and_loses(door, *arguments):
            connection = meet(door, *arguments)
            door._store = Lost(door._store)
            return connection

        _joining.Door._meet = meets_and_loses

    def body(_):
        def train(elastic):
            for _ in elastic.steps(50):
                syncengine.all_reduce(torch.ones(1))
            return elastic.step

        return syncengine.elastic(train, model=syncengine.Parallel(nn.Linear(2, 2))), syncengine.world_size()

    return suffer(body, timeout=60.0)


def test_a_rank_that_loses_the_launcher_while_another_one_joins_does_not_go_on(pool):
    with Launcher(pool, loses_the_launcher, 1) as launcher:
        launcher.join(3)
        assert launcher.watch(lambda: launcher.store.check([_joining.CAME]))
        launcher.start(3)
        outcomes = launcher.outcomes(60.0)
    outcomes[1].check("Undecided", "the launcher, or its store, has ended")
    for name in (0, 2):
        assert (outcomes[name].error, outcomes[name].value[0]) == ("", 50), outcomes[name]
        assert outcomes[name].value[1] in (2, 3), outcomes[name]  # with the process that waits again, or before


def test_a_process_that_waits_to_join_hears_that_the_launcher_has_ended(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(_joining, "_PATIENCE", 5.0)
    door = _joining.Door(f"127.0.0.1:{store.port}", 3)
    port = store.port
    del store
    with pytest.raises(syncengine.errors.PeerLost, match="the launcher, or its store, has ended"):
        door.enter("", 60.0)
    monkeypatch.setattr(_joining, "_PATIENCE", 0.5)
    with pytest.raises(syncengine.errors.PeerLost, match="the launcher, or its store, has ended"):
        _joining.Door(f"127.0.0.1:{port}", 3)


def test_the_first_rank_says_once_that_nobody_can_join_any_more(caplog):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    door = _joining.Door(f"127.0.0.1:{store.port}", None)
    assert door._waiting() == []
    del store
    for _ in range(2):
        assert door._waiting() == []
    said = "the launcher, or its store, has ended: nobody can join any more"
    assert [record.getMessage() for record in caplog.records] == [said]
