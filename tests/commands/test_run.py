"""`syncengine run`: ranks that outlive each other, and others that join. The script of the ranks is this file."""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch
from command import alone
from marks import mostly_nightly
from repository import ROOT, SUPPORT
from torch import nn

import syncengine
from syncengine.launch import local
from syncengine.launch.local import JOIN

STEPS, TOTAL = 300, 8


def train(killed="", other=""):
    """Rank `killed` dies in step 3; the model of rank `other`, which joins, is a wrong one. While there are fewer ranks
    than at first, a step takes long enough for another one to come."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    syncengine.init()
    name = os.environ.get(JOIN, os.environ["RANK"])
    data = torch.utils.data.TensorDataset(torch.randn(160, 8), torch.randn(160, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, drop_last=True)
    width = 31 if name == other else 30
    model = syncengine.Parallel(nn.Sequential(nn.Linear(8, width), nn.Dropout(0.2), nn.ReLU(), nn.Linear(width, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sizes = []

    def run(elastic):
        batches = syncengine.micro_batches(model, loader, total=TOTAL)
        batches.step = elastic.step
        sizes.append(syncengine.world_size())
        for step in elastic.steps(STEPS):
            if name == killed and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            if sizes[-1] < sizes[0]:
                time.sleep(0.5)
            for _, (x, y) in batches:
                nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    syncengine.elastic(run, model=model, optimizer=optimizer)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(weights).hexdigest(), syncengine.default_communicator().global_ranks


def launched(programs, *arguments):
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)])}
    return alone(programs, "run", *arguments, environ={**path, "SYNCENGINE_SUMMARY": "0"})


@pytest.mark.nightly
def test_another_process_joins_in_the_place_of_the_dead(pool, programs):
    """Rank 3, the first to come, has another model: it hears so, and the others go on, until rank 4 comes."""
    undisturbed = pool.run(train, world=1, settings=None)[0][0]
    done = launched(programs, "-n", "3", "--keep-going", "--restart", __file__, "1", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{undisturbed} [0, 2, 4]"] * 3, done.stdout + done.stderr
    assert "Mismatch: rank 3 has another state for elastic() than rank 0" in done.stderr


REPLACED = """
import os, pathlib, sys, time
came, instead = pathlib.Path({came!r}), os.environ.get({instead!r})
if instead:
    came.with_name("new").write_text(f"{{os.environ[{join!r}]}} for {{instead}}")
    came.with_name("new").rename(came)
elif os.environ["RANK"] == "1":
    sys.exit(3)
while not came.exists() and time.monotonic() < {deadline}:
    time.sleep(0.01)
"""


def run_as_if_all_had_met(script):
    """`syncengine run -n 2 --keep-going --restart script`, with ranks that only pretend to meet."""
    serve_store = local.serve_store

    def serve(*arguments):
        store = serve_store(*arguments)
        store.set(local._CONNECTED, "")
        return store

    with mock.patch.object(local, "serve_store", serve):
        return local.run_script(2, [script], keep_going=True, restart=True)


def test_a_process_is_started_in_the_place_of_the_dead(pool, tmp_path):
    script, came = tmp_path / "script.py", tmp_path / "came"
    script.write_text(
        REPLACED.format(came=str(came), join=local.JOIN, instead=local.INSTEAD, deadline=time.monotonic() + 60)
    )
    assert pool.run(run_as_if_all_had_met, str(script), world=1, settings=None) == [0]
    assert came.read_text() == "2 for 1/2"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "others"),
    mostly_nightly(
        [((), "time.sleep(100)"), (("--keep-going", "--restart"), "import syncengine; syncengine.init()")], 1
    ),
)
def test_all_end_with_the_first_that_fails_before_they_have_met(programs, tmp_path, options, others):
    script = tmp_path / "script.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    time.sleep(1)\n    os._exit(7)\n" + others)
    began = time.monotonic()
    assert launched(programs, "-n", "3", *options, str(script)).returncode == 7
    assert time.monotonic() - began < 90


@pytest.mark.parametrize(
    ("end", "code", "told"),
    mostly_nightly(
        [
            ("raise SystemExit(3)", 3, "ended with exit code 3"),
            ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
            ("os.kill(os.getpid(), 40)", 168, "was killed by signal 40"),
        ],
        0,
        1,
    ),
)
def test_how_a_rank_has_failed_is_told(programs, tmp_path, end, code, told):
    script, pid = tmp_path / "script.py", tmp_path / "pid"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '0':\n    time.sleep(100)\n"
        f"open({str(pid)!r}, 'w').write(str(os.getpid()))\n{end}\n"
    )
    done = launched(programs, "-n", "2", str(script))
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == f"syncengine run: rank 1 (pid {pid.read_text()}) {told}\n"


SPEAKING = "import os, sys\nrank = os.environ['RANK']\nprint('one', rank, end='\\ntwo')\nprint(rank, file=sys.stderr)\n"


def test_lines_have_the_rank_in_front(programs, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SPEAKING)
    done = launched(programs, "-n", "2", "--label", str(script))
    assert done.returncode == 0
    for rank in "01":
        assert [line for line in done.stderr.splitlines() if line.endswith(rank)] == [f"[rank {rank}] {rank}"]
        assert f"[rank {rank}] one {rank}\n" in done.stdout
        assert f"[rank {rank}] two" in done.stdout


WRITING = "import pathlib\nfor _ in range({lines}):\n    print('x' * 99)\npathlib.Path({ended!r}).touch()\n"


@contextlib.contextmanager
def labelled(script):
    """A run whose output nobody reads yet."""
    command = [sys.executable, "-m", "syncengine", "run", "-n", "1", "--label", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as run:
        try:
            yield run
        finally:
            run.kill()


@pytest.mark.nightly
def test_ranks_end_when_nobody_reads_their_lines_any_more(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WRITING.format(lines=10_000, ended=str(tmp_path / "ended")))
    with labelled(script) as run:
        assert run.stdout.readline() == f"[rank 0] {'x' * 99}\n"
        run.stdout.close()
        assert run.wait(100) != 0
        assert any(line.startswith("[rank 0]") and "BrokenPipeError" in line for line in run.stderr)
    assert not (tmp_path / "ended").exists()


@pytest.mark.nightly
def test_a_late_reader_misses_no_line(tmp_path):
    """The rank has ended by then: the pipes hold all that it has written."""
    script, ended = tmp_path / "script.py", tmp_path / "ended"
    script.write_text(WRITING.format(lines=1000, ended=str(ended)))
    with labelled(script) as run:
        deadline = time.monotonic() + 100
        while not ended.exists():
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(2.5)
        assert run.communicate(timeout=100) == (f"[rank 0] {'x' * 99}\n" * 1000, "")
        assert run.returncode == 0


CHILD = """
import contextlib, time
for i in range(1000):
    with contextlib.suppress(OSError):
        print('child', i, flush=True)
    time.sleep(0.3)
"""


@pytest.mark.thorough
def test_a_child_that_outlives_its_rank_is_not_waited_for(tmp_path):
    script = tmp_path / "script.py"
    start = f"import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', {CHILD!r}]).pid)\n"
    script.write_text(start)
    with labelled(script) as run:
        child = int(run.stdout.readline().split()[-1])
        try:
            assert run.wait(100) == 0
            os.kill(child, 0)  # the child lives still
        finally:
            os.kill(child, signal.SIGKILL)


def test_each_rank_has_a_log(programs, tmp_path):
    script, logs = tmp_path / "script.py", tmp_path / "new" / "logs"
    script.write_text(SPEAKING + "os._exit(5) if rank == '1' and not sys.stdout.flush() else None\n")
    for times in (1, 2):  # the second run adds to the files
        done = launched(programs, "-n", "2", "--log-dir", str(logs), str(script))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (5, "", 1)
        assert done.stderr.endswith(f"ended with exit code 5; its output: {logs / 'rank1.log'}\n")
        assert sorted((logs / "rank1.log").read_text()) == sorted("one 1\ntwo1\n" * times)


@pytest.mark.thorough
def test_strangers_reach_no_store(programs, tmp_path):
    """It listens on loopback alone: the kernel's list of sockets has no other listener on its port."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, syncengine\nsyncengine.init()\nport = f':{int(os.environ[\"MASTER_PORT\"]):04X}'\n"
        "rows = [row.split() for name in ('tcp', 'tcp6') for row in open(f'/proc/net/{name}')]\n"
        "os.write(1, f'{[row[1] for row in rows if row[1].endswith(port) and row[3] == \"0A\"]}\\n'.encode())\n"
    )
    done = launched(programs, "-n", "2", str(script))
    assert done.returncode == 0, done.stderr
    assert [row.split(":")[0] for row in done.stdout.splitlines()] == ["['0100007F"] * 2, done.stdout


def test_a_module(programs):
    done = launched(programs, "-n", "2", "-m", "json.tool", "--help")
    assert (done.returncode, done.stdout.count("usage: ")) == (0, 2), done.stderr


@pytest.mark.parametrize("arguments", [["-n", "2", "--restart", "x.py"], ["-n", "0", "x.py"], ["-n", "2"]])
def test_what_makes_no_sense(programs, arguments):
    done = alone(programs, "run", *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


if __name__ == "__main__":
    weights, ranks = train(*sys.argv[1:])
    os.write(1, f"{weights} {ranks}\n".encode())  # at once, among those of the others
