"""hvd.elastic: ranks are killed and others come in their place. The script of the ranks is this file."""

import copy
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from horovod_ranks import run_with_hvd
from repository import ROOT, SUPPORT
from torch import nn

import syncengine.horovod as hvd
from syncengine.launch.local import INSTEAD, JOIN

RANKS, EPOCHS, BATCH, COMMIT = 3, 6, 4, 2
DATA = torch.utils.data.TensorDataset(
    torch.randn(240, 8, generator=torch.Generator().manual_seed(1)),
    torch.randn(240, 4, generator=torch.Generator().manual_seed(2)),
)


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3 * hvd.size(), momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(DATA)
    return hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, steps=0, losses=[])


def train(state, until=None, each_step=lambda: None):
    """As Horovod's examples train. Returns early with the step `until`."""
    loader = torch.utils.data.DataLoader(DATA, batch_size=BATCH, sampler=state.sampler)
    for state.epoch in range(state.epoch, EPOCHS):  # noqa: B020
        for batch, (x, y) in enumerate(loader):
            state.optimizer.zero_grad()
            loss = nn.functional.mse_loss(state.model(x), y)
            loss.backward()
            each_step()
            state.optimizer.step()
            state.sampler.record_batch(batch, BATCH)
            state.steps += 1
            state.losses.append(hvd.allreduce(loss.detach(), name="loss").item())
            if state.steps == until:
                return
            if state.steps % COMMIT == 0:
                state.commit()
        state.sampler.set_epoch(state.epoch + 1)


def facts(state):
    """All that training has changed, so that files of equal facts are equal."""
    told = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}
    told |= {"sampler": state.sampler.state_dict(), "epoch": state.epoch, "losses": state.losses}
    return copy.deepcopy(told)


def digest(told):
    weights = b"".join(tensor.numpy().tobytes() for tensor in told["model"].values())
    momenta = b"".join(s["momentum_buffer"].numpy().tobytes() for s in told["optimizer"]["state"].values())
    rest = repr((told["optimizer"]["param_groups"], told["sampler"], told["epoch"], told["losses"])).encode()
    return hashlib.sha256(weights + momenta + rest).hexdigest()


def rank_of_the_job(folder, kills):
    """`kills`: by the number of a process, in which of its own steps it dies."""
    torch.set_num_threads(1)
    hvd.init()
    name = os.environ.get(JOIN, os.environ["RANK"])
    assert (hvd.size(), hvd.local_size()) == (RANKS, RANKS)  # also of a process that is still to join
    assert hvd.rank() == hvd.local_rank() == int(os.environ.get(INSTEAD, os.environ["RANK"]).split("/")[0])
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    state, own_steps, resets = make(), [0], []

    def each_step():
        own_steps[0] += 1
        if own_steps[0] == kills.get(name):
            os.kill(os.getpid(), signal.SIGKILL)
        if hvd.size() < RANKS:
            time.sleep(0.4)  # so that another one can come before all has ended

    def on_reset():
        resets.append(hvd.size())
        for group in state.optimizer.param_groups:
            group["lr"] = 1e-3 * hvd.size()

    @hvd.elastic.run
    def begin(state, each_step):
        if hvd.rank() == 0:
            torch.save((hvd.size(), state.steps, facts(state)), Path(folder) / f"{time.time_ns()}.pt")
        train(state, each_step=each_step)
        return "ended"

    state.register_reset_callbacks([on_reset])
    assert begin(state, each_step) == "ended"
    assert int(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == hvd.size() == RANKS
    os.write(1, f"{name} {digest(facts(state))} {resets}\n".encode())  # at once, among those of the others


def replay(file, until):
    """What a run that nobody disturbs makes of the state in `file`."""
    hvd.init()
    _, steps, told = torch.load(file, weights_only=True)
    state = make()
    state.model.load_state_dict(told["model"])
    state.optimizer.load_state_dict(told["optimizer"])
    state.sampler.load_state_dict(told["sampler"])
    state.epoch, state.steps, state.losses = told["epoch"], steps, told["losses"]
    train(state, until)
    return digest(facts(state))


@pytest.mark.nightly
def test_ranks_are_killed_and_come_back(pool, tmp_path):
    """Rank 0 dies, and so does who comes in its place. What each part of the run ends with is what ranks make of its
    beginning when nobody dies: each part but the last ends with a commit, from which the next one goes on."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)]), "SYNCENGINE_SUMMARY": "0"}
    command = [sys.executable, "-m", "syncengine", "run", "-n", str(RANKS), "--keep-going", "--restart", __file__]
    command += [str(tmp_path), json.dumps({"0": 5, "3": 4})]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.split()[0] for line in lines] == ["1", "2", "4"], done.stdout + done.stderr
    assert lines[0].endswith(" [2, 3, 2, 3]") and lines[2].endswith(" []"), lines
    parts = [(file, *torch.load(file, weights_only=True)) for file in sorted(tmp_path.iterdir())]
    assert [size for _, size, _, _ in parts] == [3, 2, 3, 2, 3]
    assert parts[1][2] == 4  # rank 0 died in the step after that
    expected = [(steps, told) for _, _, steps, told in parts[1:]]
    for (file, size, steps, _), (until, told) in zip(parts, expected, strict=False):
        assert until % COMMIT == 0 and until > steps
        told["optimizer"]["param_groups"][0]["lr"] = 1e-3 * size  # before the callbacks
        assert set(pool.run(replay, file, until, world=size, settings=None)) == {digest(told)}
    assert set(pool.run(replay, parts[-1][0], None, world=RANKS, settings=None)) == {line.split()[1] for line in lines}


@run_with_hvd()
def test_state():
    model, rank = nn.Linear(2, 2), hvd.rank()
    with torch.no_grad():
        model.weight.fill_(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + rank)
    groups = optimizer.param_groups
    state = hvd.elastic.TorchState(model, optimizer, batch=20 + rank, seen=[rank])
    state.sync()
    assert (state.batch, state.seen, groups[0]["lr"]) == (20, [0], 0.1)
    assert torch.equal(model.weight, torch.zeros(2, 2))
    with torch.no_grad():
        model.weight.fill_(7)
    state.batch, groups[0]["lr"] = 21, 5.0
    state.seen.append(1)
    state.restore()
    assert (state.batch, state.seen, groups[0]["lr"]) == (20, [0], 0.1)
    assert torch.equal(state.model.weight, torch.zeros(2, 2)) and optimizer.param_groups is groups
    state.batch = 22
    state.seen.append(2)
    state.commit()
    state.batch = 23
    state.restore()
    assert (state.batch, state.seen) == (22, [0, 2])


@run_with_hvd(world=3)
def test_sampler():
    """The order is that of Horovod's; what was recorded is not dealt again."""
    data, rank = range(20), hvd.rank()
    sampler = hvd.elastic.ElasticSampler(data, seed=3)
    sampler.set_epoch(2)
    order = list(data)
    random.Random(5).shuffle(order)
    assert len(sampler) == 7
    assert list(sampler) == [*order, order[0]][rank::3]
    sampler.record_batch(0, 2)
    sampler.record_batch(1, 2)
    state = hvd.elastic.TorchState(sampler=sampler)
    sampler.record_batch(2, 2)
    state.restore()
    assert list(sampler) == [*order[12:], order[12]][rank::3]
    assert list(hvd.elastic.ElasticSampler(data, shuffle=False)) == [*data, 0][rank::3]


@run_with_hvd()
def test_errors_of_the_script():
    """HorovodInternalError, by one rank, sends all back to the last commit; other errors end the run on all ranks that
    raise them."""
    state = make()
    tries = []

    @hvd.elastic.run
    def fail_once(state):
        tries.append(state.steps)
        train(state, until=6)
        if len(tries) == 1 and hvd.rank() == 1:
            raise hvd.elastic.HorovodInternalError("as if a collective had failed")
        train(state, until=8)

    fail_once(state)
    assert (tries, state.steps, hvd.size()) == ([0, 4], 8, 2)

    @hvd.elastic.run
    def differ(state):
        hvd.allreduce(torch.zeros(1 + (hvd.rank() == 1)), name="differs")

    with pytest.raises(hvd.HorovodInternalError, match="differs"):
        differ(state)

    @hvd.elastic.run
    def mistake(state):
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        mistake(state)


@run_with_hvd(world=3)
def test_a_rank_that_is_one_commit_behind_gets_that_commit():
    state = make()
    begun = []

    @hvd.elastic.run
    def leave_one_behind(state):
        begun.append((state.steps, digest(facts(state))))
        if len(begun) == 1:
            train(state, until=3)  # the last commit is of step 2
            if hvd.rank() == 1:
                raise hvd.elastic.HorovodInternalError("as if a collective had failed")
            state.commit()
            begun.append((state.steps, digest(facts(state))))
            hvd.allreduce(torch.ones(1))

    leave_one_behind(state)
    of_ranks = hvd.allgather_object(begun)
    assert of_ranks[0] == of_ranks[2] and of_ranks[0][1][0] == 3
    assert of_ranks[0][2] == of_ranks[0][1] == of_ranks[1][1]


if __name__ == "__main__":
    rank_of_the_job(sys.argv[1], json.loads(sys.argv[2]))
