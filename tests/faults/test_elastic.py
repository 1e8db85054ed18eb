"""syncengine.elastic: ranks die at any instant, and the weights are those of a run that nobody disturbed."""

import functools
import gc
import hashlib
import os
import random
import signal
import time
from functools import partial

import numpy as np
import pytest
import torch
from faults import Outcome, my_rank, needs_hooks, others, set_fault, suffer
from marks import mostly_nightly
from pool import RankFailure, run_on_ranks
from torch import nn
from whims import Leaving, Whim

import syncengine
from syncengine.errors import InvalidUsage
from syncengine.parallel.open_step import drop_open_step

STEPS, TOTAL = 10, 8
RANDOM = int(os.environ.get("SYNCENGINE_TEST_KILLS", "6"))
PLACES = ("begin", "forward", "backward", "summed", "updated", "finished")


class Sampler:
    """State that a step changes before anybody knows whether it will have happened, and of which NumPy makes a part."""

    def __init__(self):
        self.drawn, self.random = 0, np.random.RandomState(3)

    def draw(self):
        self.drawn += TOTAL
        self.random.rand()

    def state_dict(self):
        return {"drawn": np.int64(self.drawn), "random": self.random.get_state()}

    def load_state_dict(self, state):
        assert type(state["drawn"]) is np.int64
        self.drawn = int(state["drawn"])
        self.random.set_state(state["random"])


class Net(nn.Module):
    """With dropout, and buffers: one that each step changes in the same way, statistics, a counter and a running mean
    that forwards change and use, and one that appears and grows in a forward, while another one vanishes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 300), nn.Dropout(0.2), nn.ReLU(), nn.LayerNorm(300), nn.BatchNorm1d(300), nn.Linear(300, 4)
        )
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("first", torch.ones(3))
        self.register_buffer("cache", None)

    def forward(self, x):
        needed = int(self.seen) // 2 + 1
        if self.cache is None or len(self.cache) < needed:
            self.cache = torch.arange(needed, dtype=torch.float32)
        if needed > 2:
            self.first = None
            self.register_buffer("late", torch.full((), 0.1), persistent=False)
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.layers((x - self.mean) * (1 + 0.1 * self.calls)) + 1e-3 * self.cache.sum()


class Data(torch.optim.Optimizer):
    """With momentum, past torch's counters of versions."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    def step(self, closure=None):
        for group in self.param_groups:
            move(group["params"], self.state, group["lr"])


class NoOptimizer:
    """The same, by a class that torch knows nothing of."""

    def __init__(self, parameters):
        self.parameters, self.state = list(parameters), {}

    def step(self):
        move(self.parameters, self.state, 1e-2)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self):
        return {"momenta": [self.state[p]["momentum"] for p in self.parameters if p in self.state]}

    def load_state_dict(self, state):
        momenta = zip(self.parameters, state["momenta"], strict=False)
        self.state = {parameter: {"momentum": momentum.clone()} for parameter, momentum in momenta}


def move(parameters, state, lr):
    for parameter in parameters:
        own = state.setdefault(parameter, {})
        own.setdefault("momentum", torch.zeros_like(parameter.data)).mul_(0.9).add_(parameter.grad)
        parameter.data = parameter.data - lr * own["momentum"]
        parameter.data.mul_(0.999)


def make_optimizers(kind, model):
    """By name. "scaled": with a GradScaler, whose first steps are skipped."""
    parameters = list(model.parameters())
    if kind == "several":
        return {
            "one": torch.optim.SGD(parameters[:1], lr=1e-2, momentum=0.9, fused=True),
            "other": Data(parameters[1:3]),
            "last": torch.optim.Adam(parameters[3:], lr=np.float64(1e-2), foreach=True),
        }
    if kind in ("data", "no optimizer"):
        return {"optimizer": {"data": Data, "no optimizer": NoOptimizer}[kind](parameters)}
    lr = 1e-2 if kind == "fused" else np.float64(1e-2)
    return {"optimizer": torch.optim.AdamW(parameters, lr=lr, fused=kind == "fused")}


KINDS = ("adamw", "fused", "data", "no optimizer", "several", "scaled")


def digest(*objects):
    sha = hashlib.sha256()
    for one in objects:
        if isinstance(one, torch.Tensor | np.ndarray | np.generic):
            sha.update(np.asarray(one.detach() if isinstance(one, torch.Tensor) else one).tobytes())
        elif isinstance(one, dict):
            sha.update(
                digest(*(part for pair in sorted(one.items(), key=lambda p: str(p[0])) for part in pair)).encode()
            )
        elif isinstance(one, list | tuple):
            sha.update(digest(*one).encode())
        else:
            sha.update(repr(one).encode())
    return sha.hexdigest()


def leave(batches, model, whim):
    """Leaves a step in one of this rank's first two micro-batches, before a forward that synchronizes."""
    has_several = syncengine.world_size() <= TOTAL // 2
    place = whim.random.choice(["forward", "backward", "next"] if has_several else ["forward"])
    try:
        for at, (_, (x, y)) in enumerate(batches):
            whim()
            if place == "forward" or at:
                raise Leaving
            loss = nn.functional.mse_loss(model(x), y)
            whim()
            if place == "backward":
                raise Leaving
            loss.backward()
            whim()
    except Leaving as error:
        whim.kept.append(error)


def train(
    kills=(),
    at_least=1,
    count=STEPS,
    pace=0.0,
    tells=False,
    slow=(),
    timeout=60.0,
    kind="adamw",
    forgets=False,
    whims=None,
):
    """`kills`: of each rank that dies, the step and the place there, or a fault point. `pace`: seconds that a step
    takes at least. `tells`: with a collective behind each update. `slow`: ranks that wait in step 6 for a collective
    before their update, too. `kind`: of KINDS. `forgets`: to set batches.step.
    `whims`: a seed by which the collector runs, at other places on each rank, and steps are left and done again."""

    def die(step, place):
        if dict(kills).get(my_rank()) == (step, place):
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    syncengine.init(timeout=timeout)
    data = torch.utils.data.TensorDataset(torch.randn(160, 16), torch.randn(160, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, drop_last=True)
    model = syncengine.Parallel(Net())
    optimizers, sampler = make_optimizers(kind, model), Sampler()
    schedulers = {
        f"schedule of {name}": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, count)
        for name, optimizer in optimizers.items()
        if isinstance(optimizer, torch.optim.Optimizer)
    }
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3, enabled=kind == "scaled")
    average = torch.optim.swa_utils.AveragedModel(model.module.layers)
    whim = (lambda: None) if whims is None else Whim(f"{whims} {my_rank()}")
    if whims is not None:
        gc.disable()
    print("elastic begins", flush=True)

    def steps(elastic):
        batches = syncengine.micro_batches(model, loader, total=TOTAL)
        batches.step = 0 if forgets else elastic.step
        for step in elastic.steps(count):
            die(step, "begin")
            for scheduler in schedulers.values() if step % 2 else ():  # early: their next steps are those of this one
                scheduler.step()
            sampler.draw()
            model.module.seen += 1
            for _ in range(random.Random(f"{whims} {step}").choice([0, 0, 1, 2]) if whims is not None else 0):
                leave(batches, model, whim)
                whim()
            for _, (x, y) in batches:
                loss = nn.functional.mse_loss(model(x), y)
                die(step, "forward")
                whim()
                scaler.scale(loss).backward()
                die(step, "backward")
                whim()
            die(step, "summed")
            time.sleep(pace)
            if step == 6 and my_rank() in slow:
                syncengine.all_reduce(torch.ones(1))
            if kind == "scaled":
                scaler.unscale_(optimizers["optimizer"])
                syncengine.all_reduce(torch.ones(1))
            for name, optimizer in optimizers.items():
                if kind == "scaled":
                    scaler.step(optimizer)
                else:
                    optimizer.step()
                die(step, f"updated {name}")
                whim()
            scaler.update()
            die(step, "updated")
            if tells:
                syncengine.all_reduce(loss.detach())
            whim()
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            whim()
            average.update_parameters(model.module.layers)
            for scheduler in schedulers.values() if step % 2 == 0 else ():
                scheduler.step()
            die(step, "finished")

    state = {"model": model, **optimizers, **schedulers, "scaler": scaler, "sampler": sampler, "average": average}
    try:
        syncengine.elastic(steps, at_least=at_least, **state)
    finally:
        gc.enable()
    assert model.module.seen == count and sampler.drawn == count * TOTAL
    buffers = dict(model.named_buffers())
    return digest(
        buffers, *(one.state_dict() for one in state.values())
    ), syncengine.default_communicator().global_ranks


def disturbed(kills, **how) -> Outcome:
    gc.freeze()  # the collector is quick where there is little
    for rank, fault in kills.items():
        if isinstance(fault, str):
            set_fault(rank, fault)
    return suffer(lambda step: train(kills, **how), timeout=60.0)


@functools.cache
def undisturbed(pool, kind="adamw", count=STEPS):
    """The digest of all state of one rank alone."""
    return pool.run(partial(train, kind=kind, count=count), world=1, settings=None)[0][0]


def check(pool, kills, world=3, hosts="", kind="adamw", **how):
    """Some ranks die, and the others end as one rank alone."""
    expected, call = undisturbed(pool, kind), partial(disturbed, kind=kind, **how)
    with pool.spawn_ranks(call, kills, world=world, hosts=hosts, settings=None) as ranks:
        check_those_left(ranks, kills, expected)


def check_those_left(ranks, kills, expected):
    """A rank of `kills` may be spared: it does not come to its place where another one's death takes it elsewhere."""
    lost = set()
    for number, rank in enumerate(ranks):
        try:
            outcome = rank.result(timeout=120.0)
        except RankFailure:
            if number in kills and rank.exit_code() == -signal.SIGKILL:
                lost.add(number)
                continue
            raise
        outcome.check()
        assert outcome.value[0] == expected
    assert len(lost) < len(ranks)
    assert lost or not kills


@pytest.mark.nightly
def test_nobody_dies(pool):
    for world in (2, 3):
        assert {value[0] for value in pool.run(train, world=world, settings=None)} == {undisturbed(pool)}


@pytest.mark.thorough
@pytest.mark.parametrize("place", mostly_nightly(PLACES, 2))
def test_killed_in_a_step(pool, place):
    check(pool, {PLACES.index(place) % 3: (3, place)})


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("place", ["summed", "updated"])
def test_killed_in_a_step_of_other_optimizers(pool, place, kind):
    check(pool, {1: (3, place)}, kind=kind)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", mostly_nightly(range(24), 0))
def test_killed_while_the_collector_runs_anywhere(pool, seed):
    """Steps are left by errors meanwhile, and done again."""
    draw = random.Random(seed)
    kind, places = draw.choice(KINDS), [*PLACES[:-1], *PLACES[1:4]]
    victims = draw.sample(range(4), draw.randint(0, 3))
    kills = {rank: (draw.randrange(1, STEPS), draw.choice(places)) for rank in victims}
    check(pool, kills, world=4, kind=kind, whims=seed)


def test_killed_between_two_optimizers_steps(pool):
    check(pool, {0: (3, "updated one"), 2: (5, "updated other")}, kind="several")


@pytest.mark.thorough
def test_a_step_that_a_scaler_skipped_is_made_again_by_the_same_scale(pool):
    check(pool, {1: (0, "updated")}, kind="scaled", tells=True)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", mostly_nightly(KINDS, 2))
def test_a_step_that_was_updated_and_not_finished_is_not_made_twice(pool, kind):
    """Survivors that were slow may not have its averages yet: they make the step again, all of them."""
    expected = undisturbed(pool, kind)
    behind_an_update = partial(disturbed, tells=True, kind=kind)
    with pool.spawn_ranks(behind_an_update, {1: (6, "updated")}, world=3, settings=None) as ranks:
        assert ranks[1].exit_code() == -signal.SIGKILL
        outcomes = [rank.result(timeout=120.0) for rank in (ranks[0], ranks[2])]
    for outcome in outcomes:
        if outcomes[0].error:
            outcome.check("InvalidUsage", "can neither keep nor repeat step 6")
        else:
            outcome.check()
            assert outcome.value[0] == expected


@pytest.mark.thorough
@pytest.mark.parametrize("kind", mostly_nightly(KINDS, 0))
def test_a_step_that_the_dead_rank_alone_has_updated_is_made_again(pool, kind):
    check(pool, {1: (6, "updated")}, tells=True, slow=(0, 2), kind=kind)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("hosts", "kills"),
    mostly_nightly(
        [
            pytest.param("aaaa", {0: (2, "summed"), 2: "arrived:1:kill"}, marks=needs_hooks),
            pytest.param("aaaa", {0: (2, "backward"), 1: "proposing:1:kill", 3: (7, "updated")}, marks=needs_hooks),
            pytest.param("aaaa", {1: "reduced:30:kill", 2: "pulled:40:kill"}, marks=needs_hooks),
            pytest.param("aaaa", {0: "reducing:6:kill", 3: "arriving:1:kill"}, marks=needs_hooks),
            ("aab", {0: (2, "summed"), 1: (2, "summed")}),
            ("aab", {2: (3, "updated"), 0: (6, "backward")}),
            ("aabb", {0: (3, "finished"), 3: (3, "updated")}),
            ("aabb", {2: (2, "updated"), 3: (5, "forward"), 0: (5, "backward")}),
            ("abc", {0: (1, "begin"), 1: (4, "updated")}),
        ],
        0,
    ),
    ids=str,
)
def test_several_die(pool, hosts, kills):
    check(pool, kills, hosts=hosts)


@pytest.mark.parametrize("seed", mostly_nightly(range(RANDOM), 0, 1))
def test_random_kills(pool, seed):
    """From outside, at any instant: after the processes have come, and until the others have all that they need."""
    draw = random.Random(f"{RANDOM} {seed}")
    world = draw.randint(2, 5)
    victims = draw.sample(range(world), draw.randint(1, world - 1))
    expected = undisturbed(pool)
    with pool.spawn_ranks(partial(disturbed, pace=0.05), {}, world=world, settings=None) as ranks:
        deadline = time.monotonic() + 60
        while not all("elastic begins" in rank.output() for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.005)
        for rank in victims:
            time.sleep(draw.random() * 0.3)
            ranks[rank].signal(signal.SIGKILL)
        check_those_left(ranks, victims, expected)


def test_batches_that_begin_anew_are_refused(pool):
    with pool.spawn_ranks(partial(disturbed, forgets=True), {1: (3, "forward")}, world=3, settings=None) as ranks:
        for rank in others(ranks, 1):
            rank.result().check("InvalidUsage", "begins with step 0, but was at step 3", "batches.step = elastic.step")


@pytest.mark.parametrize("who", [[0, 1], [1]])
@run_on_ranks(spawned=True, settings=None)
def test_an_update_within_a_step_that_was_left_ends_all(who):
    """The ranks of `who` leave a step, and then update."""

    def body(_):
        model = syncengine.Parallel(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(torch.ones(64, 4), 2, drop_last=True)

        def steps(elastic):
            batches = syncengine.micro_batches(model, loader, total=4)
            batches.step = elastic.step
            for step in elastic.steps(4):
                for _, x in batches:
                    if step == 2 and my_rank() in who:
                        break
                    model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        try:
            syncengine.elastic(steps, model=model, optimizer=optimizer)
        finally:
            drop_open_step()  # which holds the model

    suffer(body, timeout=60.0).check("InvalidUsage", "SGD.step() within a step of micro_batches()")


@run_on_ranks()
def test_bad_states():
    model = syncengine.Parallel(nn.Linear(2, 2))
    with pytest.raises(InvalidUsage, match="can't keep tokens, a list"):
        syncengine.elastic(lambda run: None, model=model, tokens=[1])
    stray = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(InvalidUsage, match=r"can't keep parameter 2 of stray, of shape \(3,\): no model"):
        syncengine.elastic(lambda run: None, model=model, stray=stray)
    pair = syncengine.default_communicator().split([0, 1])
    other = syncengine.Parallel(nn.Linear(2, 2), process_group=pair)
    with pytest.raises(InvalidUsage, match="model other"):
        syncengine.elastic(lambda run: None, other=other)

    def mistake(run):
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        syncengine.elastic(mistake, model=model)
    assert syncengine.elastic(lambda run: list(run.steps(7)), model=model, step=5) == [5, 6]


@run_on_ranks(settings={"torch_group": True})
def test_a_group_that_would_keep_its_ranks_is_refused():
    with pytest.raises(InvalidUsage, match="leave torch_group out"):
        syncengine.elastic(lambda run: None, model=syncengine.Parallel(nn.Linear(2, 2)))


def test_too_few_are_left(pool):
    at_least_3 = partial(disturbed, at_least=3)
    with pool.spawn_ranks(at_least_3, {1: (2, "forward")}, world=3, settings=None) as ranks:
        for rank in others(ranks, 1):
            rank.result().check("PeerLost", "2 ranks are left")
