"""join: a rank that has run out of data takes part, with zeros, until all have."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from syncengine.errors import InvalidUsage
from syncengine.horovod.process import calls, close_unneeded_optimizers, optimizers


def join(device: int = -1) -> int:
    """Blocks until every rank has joined; meanwhile this rank adds zeros to what the others reduce.

    An Average is still divided by the number of all ranks. Returns the rank that joined last, the same on all: its
    model has seen the most steps, so broadcast that. `device` is not needed.
    """
    main = calls()
    streams = [main, *optimizers()]
    if any(stream.in_step for stream in streams):
        raise InvalidUsage(
            "join() between backward and step(): the other ranks wait for these gradients; call optimizer.step() or "
            "synchronize() before"
        )
    with ThreadPoolExecutor(len(streams)) as pool:
        others = [pool.submit(stream.serve) for stream in streams[1:]]
        try:
            served = main.serve() + sum(future.result() for future in others)
        except BaseException as error:
            for stream in streams:  # else their threads wait for the others
                stream.abort(f"rank {main.communicator.global_ranks[main.rank]} in hvd.join(): {error}")
            raise
    # Who took part in the fewest operations without data was the last to join.
    counts = torch.empty(main.size, dtype=torch.int64, device="cpu")
    main.communicator.all_gather(counts, torch.tensor([served], dtype=torch.int64, device="cpu"))
    close_unneeded_optimizers()
    fewest = counts.min()
    return int((counts == fewest).nonzero().max())
