"""Prints as JSON what Horovod's queries say on this rank: a program of test_launched_programs.py."""

import json

import syncengine.horovod as hvd

hvd.init()
enabled = hvd.mpi_enabled()
answer = {"rank": hvd.rank(), "size": hvd.size(), "local": hvd.local_rank(), "built": hvd.mpi_built()}
answer["enabled"] = [enabled, isinstance(hvd.mpi_threads_supported(), bool) if enabled else None]
print(json.dumps(answer))
