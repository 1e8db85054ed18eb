"""The example for Horovod's users, on one rank; tests/launch/test_launched_programs.py has it under launchers."""

import os
import sys

from pool import RankPool

from examples import horovod_mnist


def alone() -> None:
    """Where no launcher has been."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    sys.argv[1:] = ["--epochs=1", "--fp16-allreduce"]
    horovod_mnist.main()


def test_example_alone(pool: RankPool):
    with pool.spawn_ranks(alone, world=1, settings=None) as ranks:
        ranks[0].result()
        assert ranks[0].exit_code() == 0
        assert "on 1 ranks" in ranks[0].output()
