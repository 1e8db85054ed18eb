"""join: a rank that has run out of data takes part, with zeros, until all ranks have."""

from concurrent.futures import ThreadPoolExecutor

from syncengine.errors import InvalidUsage, Mismatch, SyncError, error_text
from syncengine.horovod.calls import Calls, table
from syncengine.horovod.process_sets import refusing, streams
from syncengine.horovod.streams import Stream
from syncengine.parallel.replication import own_name


def join(device: int = -1) -> int:
    """Blocks until every rank has joined; meanwhile this rank contributes zeros where the others reduce tensors.

    An Average is still divided by the number of all ranks. Calls that need every rank raise on the ranks that make
    them, as in Horovod. Returns the rank that joined last, the same on all: its model has seen the most steps, so
    broadcast its model. `device` is not needed.
    """
    served_here = streams()
    with refusing(None, "join") as main:
        if any(stream.in_step for stream in served_here):
            raise InvalidUsage(
                "join() between backward and step(): the other ranks wait for these gradients; call optimizer.step() "
                "or synchronize() before"
            )
    errors: list[BaseException] = []

    def serve(stream: Stream) -> int:
        try:
            return stream.serve()
        except BaseException as error:
            errors.append(error)
            kind = type(error).__name__ if isinstance(error, SyncError) else "Aborted"
            for other in served_here:  # else their threads wait for the others
                other.abort(f"{own_name(main.communicator)} in hvd.join(): {error_text(error, named=False)}", kind)
            raise

    try:
        with ThreadPoolExecutor(len(served_here)) as pool:
            others = [pool.submit(serve, stream) for stream in served_here[1:]]
            served = serve(main) + sum(future.result() for future in others)
    except SyncError as error:  # perhaps only that another rank has left, because of what one of these says
        raise next((cause for cause in errors if isinstance(cause, (InvalidUsage, Mismatch))), error) from None
    # The rank that took part in the fewest operations without data was the last to join.
    counts = table(main.communicator, [served])
    for stream in served_here:
        if isinstance(stream, Calls):
            stream.close_unneeded()
    return max(rank for rank, count in enumerate(counts) if count == min(counts))
