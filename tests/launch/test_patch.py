"""SYNCENGINE_PATCH=1: scripts for DDP train with Parallel, unchanged; what it can't serve stays DDP's, and is told."""

import copy
import inspect
import math
import os
import pickle
import re
import runpy
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from marks import mostly_nightly
from pool import RankPool, run_on_ranks
from repository import TESTS
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from wrapping_tensors import Beside

import syncengine
import syncengine_autoload
from syncengine import patch
from syncengine_autoload import ddp
from syncengine_autoload.rendezvous import Rendezvous

SCRIPTS = TESTS / "scripts"

# What a script may have imported, before or after.
NAMES = {
    "torch.nn.parallel": torch.nn.parallel.DistributedDataParallel,
    "torch.nn.parallel.distributed": torch.nn.parallel.distributed.DistributedDataParallel,
    "a module that was imported before": DistributedDataParallel,
}


def run_script(name: str, arguments: list[str], patched: bool) -> str:
    os.environ["SYNCENGINE_PATCH"] = "1" if patched else "0"
    syncengine_autoload.load()
    sys.argv = [name, *arguments]
    runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    return "ends"


def weights(pool: RankPool, port: int, folder: Path, script: str, patched: bool) -> tuple[dict, str]:
    """What the script saves, and what its rank 0 says."""
    output = str(folder / f"{patched}.pt")
    environ = {"MASTER_PORT": str(port)}
    with pool.spawn_ranks(run_script, script, [output], patched, settings=None, environ=environ) as ranks:
        assert [rank.result(120) for rank in ranks] == ["ends"] * 2
        return torch.load(output), ranks[0].output()


@pytest.mark.thorough
@pytest.mark.parametrize("script", mostly_nightly(["nanogpt_style.py", "timm_style.py"], 0))
def test_scripts_train_to_the_bits_of_ddp(pool: RankPool, tmp_path: Path, script: str, unused_port: int):
    theirs, said = weights(pool, unused_port, tmp_path, script, patched=False)
    assert "wrapped by DistributedDataParallel True" in said
    ours, said = weights(pool, unused_port, tmp_path, script, patched=True)
    assert "wrapped by DistributedDataParallel True" in said
    assert said.count("syncengine: ") == 1
    assert list(ours) == list(theirs)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


# --- On ranks whose process is patched


def is_served(model: nn.Module) -> bool:
    return type(model) is DistributedDataParallel and isinstance(model, syncengine.Parallel)


class Own(DistributedDataParallel):
    pass


def names_and_instances() -> None:
    syncengine_autoload.patch()
    for cls in NAMES.values():
        assert is_served(cls(nn.Linear(2, 2)))
        assert is_served(cls(module=nn.Linear(2, 2)))
    model = DistributedDataParallel(nn.Linear(2, 2), broadcast_buffers=None, find_unused_parameters=True)
    assert isinstance(model, DistributedDataParallel)
    assert model.find_unused_parameters
    assert model.process_group is dist.group.WORLD
    assert is_served(pickle.loads(pickle.dumps(model)))
    assert is_served(copy.deepcopy(model))
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such'"):
        DistributedDataParallel(nn.Linear(2, 2), no_such=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'module'"):
        DistributedDataParallel()
    parameters = list(inspect.signature(DistributedDataParallel).parameters)
    assert parameters == list(inspect.signature(DistributedDataParallel.__init__).parameters)[1:]
    own = Own(nn.Linear(2, 2))  # with DDP's machinery
    assert type(own) is Own
    own(torch.ones(1, 2)).sum().backward()
    assert type(syncengine.Parallel(nn.Linear(2, 2))) is syncengine.Parallel
    stays = pickle.loads(pickle.dumps(own))
    assert type(stays) is Own


def test_every_name_of_ddp_makes_a_parallel(pool: RankPool):
    with pool.spawn_ranks(names_and_instances, gloo=True, settings=None) as ranks:
        for rank in ranks:
            rank.result()
        told = [line for line in ranks[0].output().splitlines() if line.startswith("syncengine: ")]
    assert len(told) == 2
    assert told[0].endswith("(2 ranks, backend gloo)")
    assert told[1].startswith("syncengine: SYNCENGINE_PATCH=1 has no effect on Own: it is a subclass")


class OwnParallel(syncengine.Parallel):
    pass


@run_on_ranks(gloo=True, settings=None, spawned=True)
def test_what_programs_ask_of_a_models_type():
    """One model that Parallel serves and one that stays torch's: what is asked of one is heard of the other."""
    syncengine_autoload.patch()
    DistributedDataParallel.reset = lambda model, n=1: (model.module.in_features, n)  # as fastai does
    served = DistributedDataParallel(nn.Linear(3, 2))
    stays = DistributedDataParallel(nn.Linear(3, 2), check_reduction="yes")  # of a kind that Parallel refuses
    assert isinstance(served, syncengine.Parallel)
    assert not isinstance(stays, syncengine.Parallel)
    assert not isinstance(served, OwnParallel)
    for model in (served, stays):
        kind = type(model)
        assert kind is model.__class__ is DistributedDataParallel
        assert kind in (nn.parallel.DataParallel, nn.parallel.DistributedDataParallel)
        assert (kind.__name__, kind.__module__) == ("DistributedDataParallel", "torch.nn.parallel.distributed")
        assert repr(model).startswith("DistributedDataParallel(\n")
        assert isinstance(model, DistributedDataParallel)
        assert model.reset() == (3, 1)
        assert model.reset(n=2) == (3, 2)
        with pytest.raises(AttributeError, match="'DistributedDataParallel' object has no attribute 'no_such'"):
            print(model.no_such)
        assert list(model.state_dict()) == ["module.weight", "module.bias"]
        assert [*inspect.signature(model.forward).parameters] == ["inputs", "kwargs"]
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
            assert type(again) is DistributedDataParallel
            assert isinstance(again, syncengine.Parallel) == (model is served)
            assert torch.equal(again.module.weight, model.module.weight)
            inputs = torch.full((1, 3), float(dist.get_rank()))
            DistributedDataParallel.forward(again, inputs).sum().backward()  # called on the class
            assert again.module.weight.grad.tolist() == [[0.5] * 3] * 2
            again.zero_grad()
            with DistributedDataParallel.no_sync(again):
                assert not again.require_backward_grad_sync
                again(inputs).sum().backward()
            assert again.module.weight.grad.tolist() == [[float(dist.get_rank())] * 3] * 2
            again.zero_grad()
            again.require_backward_grad_sync = False
            again(inputs).sum().backward()
            assert again.module.weight.grad.tolist() == [[float(dist.get_rank())] * 3] * 2
        assert model.require_backward_grad_sync
    assert hasattr(served, "stragglers")
    assert not hasattr(stays, "stragglers")
    assert not hasattr(DistributedDataParallel, "stragglers")
    with pytest.raises(AttributeError, match="has no attribute '_reduces'"):
        print(stays._reduces)
    del stays.require_backward_grad_sync
    with pytest.raises(AttributeError, match="has no attribute 'require_backward_grad_sync'"):
        print(stays.require_backward_grad_sync)


@run_on_ranks(gloo=True, settings=None, spawned=True)
def test_a_class_that_a_program_has_changed():
    syncengine_autoload.patch()
    told: list[str] = []
    ddp.tell = told.append
    theirs = DistributedDataParallel._pre_forward
    linear = nn.Linear(2, 2)
    if dist.get_rank() == 1:  # on one rank alone
        DistributedDataParallel._pre_forward = lambda model, *inputs, **kwargs: theirs(model, *inputs, **kwargs)
    assert not isinstance(DistributedDataParallel(linear), syncengine.Parallel)
    DistributedDataParallel._pre_forward = theirs
    DistributedDataParallel.stats = lambda model: "the program's"
    model = DistributedDataParallel(nn.Linear(2, 2))
    assert model.stats() == "the program's"
    model(torch.ones(1, 2)).sum().backward()
    del DistributedDataParallel.stats
    served = DistributedDataParallel(nn.Linear(2, 2))
    assert is_served(served)
    either = DistributedDataParallel.forward
    DistributedDataParallel.forward = lambda model, *inputs: either(model, *inputs) * 2
    assert not isinstance(DistributedDataParallel(nn.Linear(2, 2)), syncengine.Parallel)
    assert torch.equal(served(torch.ones(1, 2)), served.module(torch.ones(1, 2)) * 2)
    if dist.get_rank() == 0:
        changed = "the program has given DistributedDataParallel another"
        reasons = [f"rank 1: {changed} '_pre_forward'", f"{changed} 'stats'", "", f"{changed} 'forward'"]
        assert [line.partition("torch's: ")[2] for line in told] == reasons


@run_on_ranks(gloo=True, settings=None, spawned=True)
def test_all_ranks_stay_with_ddp_if_one_must():
    syncengine_autoload.patch()
    told: list[str] = []
    ddp.tell = told.append
    if dist.get_rank() == 1:
        sys.modules["syncengine.patch"] = None  # as where it can't be imported: on one rank alone
    for _ in range(2):
        model = DistributedDataParallel(nn.Linear(2, 2))
        assert not isinstance(model, syncengine.Parallel)
    model(torch.ones(1, 2)).sum().backward()
    sys.modules["syncengine.patch"] = patch
    again = copy.deepcopy(model.module)
    assert is_served(DistributedDataParallel(again))
    from torch.distributed._composable.replicate import replicate

    net = replicate(nn.Linear(2, 2))
    net(torch.ones(1, 2) * dist.get_rank()).sum().backward()
    assert net.weight.grad.tolist() == [[0.5] * 2] * 2
    for kind, place, served in (("opaque", "frozen", True), ("opaque", "trained", False)):
        model = DistributedDataParallel(Beside(kind, place, dist.get_rank()))
        assert isinstance(model, syncengine.Parallel) == served
        model(torch.ones(1, 8) * dist.get_rank()).sum().backward()
    with pytest.raises(RuntimeError, match="DistributedDataParallel is not needed when a module doesn't have"):
        DistributedDataParallel(nn.ReLU())
    if dist.get_rank() == 1:
        assert told == []
        return
    unable, able, replicated, trained, needless = told
    assert "does not support training parameter odd of type Opaque" in trained
    assert unable.startswith("SYNCENGINE_PATCH=1 has no effect on the DistributedDataParallel of a Linear, ")
    assert "rank 1: syncengine can't be imported: ModuleNotFoundError" in unable
    assert able.startswith("DistributedDataParallel is syncengine.Parallel")
    assert "replicate()" in replicated
    assert "is not needed" in needless


@run_on_ranks(gloo=True, settings=None, spawned=True)
def test_who_waits_is_told_of_an_interrupt():
    syncengine_autoload.patch()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    wait = ddp._wait_for
    if dist.get_rank() == 1:
        ddp._wait_for = interrupted
        with pytest.raises(KeyboardInterrupt):
            DistributedDataParallel(nn.Linear(2, 2))
        ddp._wait_for = wait
    else:
        with pytest.raises(RuntimeError, match="rank 1: KeyboardInterrupt"):
            DistributedDataParallel(nn.Linear(2, 2))
    dist.barrier()
    assert is_served(DistributedDataParallel(nn.Linear(2, 2)))


# What each argument may be given by mistake, or as other libraries do.
ODD = [None, True, False, 0, 1, -1, 1.5, math.nan, math.inf, 2**70, "x", ""]
ODD += [[], [0], [0, 1], [-1], ["x"], (), {}, {1: 2}]
ODD += [torch.device("cpu"), [torch.device("cpu")], ["cpu"], "cpu", torch.float16, nn.Linear(1, 1), nn.ReLU(), object()]


def outcome(name: str, value: object) -> str:
    """What DDP does with it: a step's gradient, or an error."""
    arguments = {"module": nn.Linear(2, 1), name: value}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = DistributedDataParallel(**arguments)
        except Exception as error:
            return re.sub(r"0x[0-9a-f]+", "", f"{type(error).__name__}: {error}").splitlines()[0]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        if name == "module":
            return "accepted"
        try:
            model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
        except Exception as error:
            return f"accepted; a step: {type(error).__name__}"
        return f"accepted; {model.module.weight.grad.tolist()}"


def outcomes(patched: bool) -> dict[str, str]:
    if patched:
        syncengine_autoload.patch()
        ddp.tell = lambda text: None
    names = list(inspect.signature(DistributedDataParallel.__init__).parameters)[1:]
    return {f"{name}[{i}]": outcome(name, value) for name in names for i, value in enumerate(ODD)}


@pytest.mark.nightly
def test_odd_arguments_end_as_ddps(pool: RankPool):
    """Each of DDP's arguments with each odd value: accepted as by DDP, or refused with its class and words."""
    answers = []
    for patched in (False, True):
        with pool.spawn_ranks(outcomes, patched, gloo=True, settings=None) as ranks:
            answers.append([rank.result(300) for rank in ranks])
    theirs, ours = (answer[0] for answer in answers)
    assert len(theirs) > 400
    assert {name: (ours[name], theirs[name]) for name in theirs if ours[name] != theirs[name]} == {}


@run_on_ranks(world=3, gloo=True, settings=None, spawned=True)
def test_models_on_subgroups():
    syncengine_autoload.patch()
    pair, other = dist.new_group([0, 2]), dist.new_group([1])
    group = other if dist.get_rank() == 1 else pair
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=group)
    assert is_served(model)
    assert model.process_group is group
    model(torch.full((1, 1), float(dist.get_rank()))).backward()
    assert model.module.weight.grad.item() == 1.0


@run_on_ranks(world=1, settings=None, spawned=True)
def test_groups_that_it_cant_adopt():
    syncengine_autoload.patch()
    told: list[str] = []
    ddp.tell = told.append
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        DistributedDataParallel(nn.Linear(2, 2))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    assert type(DistributedDataParallel(nn.Linear(2, 2))) is DistributedDataParallel
    dist.destroy_process_group()
    (line,) = told
    assert line.endswith("its process group's backend is fake, over which syncengine can't find the other ranks")


@run_on_ranks(settings=None, spawned=True)
def test_a_group_of_syncengine_is_used_itself(tmp_path: Path):
    syncengine_autoload.patch()
    dist.init_process_group("syncengine", f"file://{tmp_path}/store", rank=int(os.environ["RANK"]), world_size=2)
    model = DistributedDataParallel(nn.Linear(2, 2))
    assert model.communicator is dist.group.WORLD._get_backend(torch.device("cpu")).communicator


# --- Reasons, one by one


def test_what_parallel_does_not_take(monkeypatch: pytest.MonkeyPatch):
    linear = nn.Linear(2, 2)
    assert patch.refusal((linear,), {}, 2) is None
    assert "unexpected keyword argument 'of_a_torch_to_come'" in patch.refusal((linear,), {"of_a_torch_to_come": 1}, 2)
    assert patch.refusal((linear,), {}, 65) == "syncengine can't connect 65 ranks, 64 at most"
    assert patch.refusal((3,), {}, 2) == "it is no torch.nn.Module"
    assert "parameter weight on meta" in patch.refusal((nn.Linear(2, 2, device="meta"),), {}, 2)
    locked = Beside("locked", "buffer", 0)
    assert "odd is a Locked, into which nothing can be copied" in patch.refusal((locked,), {}, 2)
    assert patch.refusal((locked,), {"broadcast_buffers": False}, 2) is None
    sparse = nn.Module()
    sparse.weight = nn.Parameter(torch.eye(2).to_sparse())
    assert "weight" in patch.refusal((sparse,), {}, 2)
    monkeypatch.setattr(patch, "device_of", lambda named: torch.device("cuda", 0))
    monkeypatch.setattr(patch, "has_cuda", False)
    assert "syncengine was built without CUDA: with nvcc" in patch.refusal((linear,), {}, 2)
    monkeypatch.setattr(patch, "has_cuda", True)
    assert patch.refusal((linear,), {}, 2) is None
    normed = nn.BatchNorm1d(2)
    assert "buffer running_mean on cpu" in patch.refusal((normed,), {}, 2)


def test_ranks_that_wrap_nothing_are_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Where only some ranks have the variable, say."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=60))
    meeting = Rendezvous(store, "patch", 0, [1, 3, 7])
    tell = ddp.tell

    def tell_and_lose_patience(text: str) -> None:
        tell(text)
        store.set_timeout(timedelta(seconds=0.05))

    monkeypatch.setattr(ddp, "tell", tell_and_lose_patience)
    with pytest.raises(TimeoutError, match=r"ranks 3, 7 did not wrap .* all ranks .* with SYNCENGINE_PATCH=1"):
        ddp._wait_for(meeting, b"", [1, 3, 7], log_after=0.0)
    (line,) = caplog.messages
    assert re.match(r"waiting since \d+ s: ranks 3, 7 did .*; do they have SYNCENGINE_PATCH=1, too\?", line)
    store.set_timeout(timedelta(seconds=60))
    meetings = [Rendezvous(store, "patch", rank, [1, 3, 7]) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda meeting: ddp._wait_for(meeting, b"", [1, 3, 7]), meetings))
    assert [len(meeting.values) for meeting in meetings] == [3] * 3
