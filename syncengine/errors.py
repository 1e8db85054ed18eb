"""Every error that syncengine raises. The extension raises these same classes.

A text names the rank, parameter, bucket or variable at fault, and what to do about it.
"""


class SyncError(RuntimeError):
    """Base of all errors of syncengine.

    After an error in a collective its communicator stays failed; Parallel and init() on all ranks open a new one.
    """


class PeerLost(SyncError):
    """Another rank died or left while this rank still needed it."""


class Timeout(SyncError, TimeoutError):
    """A deadline passed; the text names the ranks that did not arrive and what they were waited for."""


class Mismatch(SyncError):
    """Ranks called different collectives, or with different shapes, dtypes, layouts or settings."""


class Aborted(SyncError):
    """Another rank raised an exception, whose text this carries, or this rank was interrupted."""


class InvalidUsage(SyncError, ValueError):
    """A call, argument or environment variable that can't work, whatever the other ranks do."""


class NotFinite(SyncError, FloatingPointError):
    """A rank has brought NaN or Inf into a gradient (``Parallel(nonfinite="raise")``); the model can go on."""


class TornWeights(SyncError):
    """A rank has ended in the middle of an update of weights that all share: continue from a checkpoint."""
