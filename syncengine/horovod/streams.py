"""Streams of operations (not CUDA's). An operation begins when all ranks of its stream have announced it, by its name.

Ranks announce in rounds: each is an all-gather of one request from each rank. Every rank sees the same rounds, so all
begin the same operations in the same order, whatever the order of their calls.
"""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from syncengine._C import Backend, Communicator, Work
from syncengine.errors import InvalidUsage, Mismatch, SyncError
from syncengine.horovod.requests import JOIN, REFUSED, SIZE, WAITING, Flat, Request, as_told, key_of, told
from syncengine.parallel.replication import own_name

Round = Sequence[Request]  # what every rank has announced for one operation


class Plan(NamedTuple):
    """The plan of a call: texts for all ranks to compare, and functions for this rank."""

    what: str = ""  # the first four: see Request
    flat: Flat = ()
    how: str = ""
    own: int = 0
    begin: Callable[[Round], Sequence[Work]] = lambda _: ()  # called in the same order on all ranks, on any thread
    finish: Callable[[], Any] = lambda: None  # once the works have ended: makes the result


class Operation:
    """A call of this rank: first announced, then begun, then ended."""

    __slots__ = ("__weakref__", "_finish", "_stream", "begin", "begun", "ended", "error", "request", "works", "writes")

    def __init__(self, stream: Stream, request: Request, plan: Plan) -> None:
        self._stream, self.request = stream, request
        self.begin, self._finish = plan.begin, plan.finish
        self.begun = False
        self.works: Sequence[Work] = ()
        self.error: BaseException | None = None
        self.ended = False  # whether its script knows that it has ended
        self.writes: list[tuple[int, int]] = []  # memory that is not free before `result`, from address to address

    def is_completed(self) -> bool:
        """Whether `result` would return at once."""
        if not self.begun and self.error is None:
            self._stream.advance()
        self.ended = self.error is not None or (self.begun and all(work.is_completed() for work in self.works))
        return self.ended

    def result(self) -> Any:
        """Blocks until the operation has ended; returns its result.

        Raises Mismatch if calls differ, or a rank's error if it can't make the call; the stream goes on after either.
        """
        self.ended = True
        try:
            self._stream.wait(self)
            if self.error is not None:
                raise self.error
            for work in self.works:
                work.wait()
            return self._finish()
        finally:
            self.writes.clear()

    def tell(self, error: Exception) -> None:
        """Ends the operation and its stream, for all ranks, by an error of this rank, unless the stream has failed."""
        if not self._stream.has_failed():
            kind, reason = as_told(error)
            self._stream.abort(f"{own_name(self._stream.communicator)} in {self.request}: {reason}", kind.__name__)


class Stream:
    """The operations of one communicator, in the same order on all its ranks, which construct the stream together.

    Announcements have a second communicator, so that they arrive even while operations on the first do not match.
    """

    in_step = False  # whether this rank is in a step that it must finish itself, so that it may not join()
    needed = True  # whether this rank may still begin an operation
    refused: Operation | None = None  # the last operation that this rank has refused
    joinable: frozenset[str] = frozenset()  # the kinds of operations that take place without those who have joined

    def __init__(self, communicator: Communicator) -> None:
        announcements = communicator.split(list(range(communicator.size)))
        assert announcements is not None
        self.communicator, self.announcements = communicator, announcements
        self.rank, self.size = communicator.rank, communicator.size
        self._backend: Any = Backend(announcements)  # the same ranks with futures; torch does not declare its type
        self._lock = threading.RLock()  # guards the fields below
        self._unnamed = itertools.count()
        self._submitted = 0
        # The last operation of each name, while the script holds it. After that, its tensors and its name are free.
        self._named: weakref.WeakValueDictionary[str, Operation] = weakref.WeakValueDictionary()
        # Rounds on their way: this rank's request, its bytes, the tensor for all ranks' requests, and the work.
        self._rows: deque[tuple[Request, torch.Tensor, torch.Tensor, Work]] = deque()
        self._own: dict[str, Operation] = {}  # this rank's, by key, until all ranks have announced them
        self._announced: dict[str, dict[int, Request]] = {}  # requests by key and rank, until all have come
        self._all_joined = False
        self._served = 0
        self._shadow_works: list[Work] = []

    def close(self) -> None:
        """Disconnects. No rank may need the stream any more."""
        for communicator in (self.announcements, self.communicator):
            communicator.close()

    def submit(self, kind: str, name: str | None, plan: Plan, watched: bool = False) -> Operation:
        """Announces an operation. It begins at the latest at this rank's next wait or poll after all have announced it.

        A `watched` operation begins as soon as all ranks have announced it. Raises InvalidUsage, on this rank alone,
        while another operation of this name is under way: until the script has waited for it, or has seen it end.
        """
        key = f"#{next(self._unnamed)}" if name is None else key_of(kind, name)
        operation = Operation(self, Request(kind, key, plan.what, plan.flat, plan.how, plan.own), plan)
        with self._lock:
            if name is not None:
                if self._is_under_way(key):
                    gc.collect()  # perhaps only a cycle still holds it
                    if self._is_under_way(key):
                        raise InvalidUsage(  # in Horovod's words
                            "Requested to allreduce, allgather, or broadcast a tensor with the same name as another "
                            "tensor that is currently being processed.  If you want to request another tensor, use a "
                            "different tensor name."
                        )
                self._named[key] = operation
            self._own[key] = operation
            self._submitted += 1
            self._announce(operation.request, watched)
        return operation

    def _is_under_way(self, key: str) -> bool:
        operation = self._named.get(key)
        return operation is not None and not operation.ended

    def _announce(self, request: Request, watched: bool = False) -> None:
        own = torch.frombuffer(bytearray(request.encode()), dtype=torch.uint8)
        every = torch.empty((self.size, SIZE), dtype=torch.uint8, device="cpu")
        work = self._backend._allgather_base(every, own)
        self._rows.append((request, own, every, work))
        if watched:
            work.get_future().add_done_callback(lambda _: self.advance())

    def wait(self, operation: Operation) -> None:
        """Blocks until all ranks have announced the operation, or it has failed. Raises the stream's failure."""
        while True:
            with self._lock:
                if operation.begun or operation.error is not None:
                    return
                if not self._rows:  # the others may still announce something else before
                    self._announce(Request(WAITING, operation.request.key, str(operation.request)))
                work = self._rows[0][-1]
            work.wait()
            self.advance()

    def advance(self) -> None:
        """Begins the operations that all ranks have announced by now."""
        with self._lock:
            while self._rows and self._rows[0][-1].is_completed():
                request, own, every, work = self._rows.popleft()
                try:
                    work.wait()
                except SyncError as error:  # the stream has failed
                    for operation in self._own.values():
                        operation.error = error
                    self._own.clear()
                    return
                if torch.equal(every, own.expand_as(every)) and request.kind not in (JOIN, WAITING):
                    self._settle(request.key, [request] * self.size, request.kind != REFUSED)
                else:
                    self._compare([Request.decode(bytes(data.tolist())) for data in every])

    def _compare(self, requests: list[Request]) -> None:
        joined = [rank for rank, request in enumerate(requests) if request.kind == JOIN]
        self._all_joined = len(joined) == self.size
        news: dict[str, None] = {}  # a set, in an order that is the same on all ranks
        for rank, request in enumerate(requests):
            if request.kind not in (JOIN, WAITING):
                self._announced.setdefault(request.key, {})[rank] = request
                news[request.key] = None
        absent = {rank: Request(JOIN) for rank in joined}
        settled = False
        for key in list(self._announced) if joined else news:
            if len(absent | self._announced[key]) == self.size:
                calls = absent | self._announced.pop(key)
                self._settle(key, [calls[rank] for rank in range(self.size)])
                settled = True
        if self._all_joined:  # ranks that have joined later have made more calls
            self._unnamed = itertools.count()
        waiting = {rank: request for rank, request in enumerate(requests) if request.kind == WAITING}
        if settled or not waiting or len(waiting) + len(joined) < self.size:
            return
        for request in waiting.values():  # each for another call, of a rank that waits, too
            operation = self._own.pop(request.key, None)
            self._announced.pop(request.key, None)
            if operation is not None:
                operation.error = self._mismatch(waiting)

    def _settle(self, key: str, round: Round, agreed: bool = False) -> None:
        """Begins an operation that all ranks have announced, unless their requests differ."""
        operation = self._own.pop(key, None)
        error = None if agreed else self._objection(round)
        if operation is None:
            if round[self.rank].kind == JOIN:
                self._served += 1
                others = (request for request in round if request.kind != JOIN)
                self._shadow_works += () if error else self.shadow(next(others))
            return
        operation.error = error
        try:
            operation.works = () if error else operation.begin(round)
        except Mismatch as mismatch:  # all ranks raise it
            operation.error = mismatch
        except Exception as raised:
            operation.tell(raised)
            operation.error = raised
        operation.begun = True  # the last: other threads look at it

    def _objection(self, round: Round) -> SyncError | None:
        ranks = self.communicator.global_ranks
        active = {rank: request for rank, request in enumerate(round) if request.kind != JOIN}
        calls = {rank: request for rank, request in active.items() if request.kind != REFUSED}
        if not calls:  # no rank has begun anything
            return None
        caller, call = next(iter(calls.items()))
        for rank, request in active.items():
            if request.kind == REFUSED:
                return told(ranks[rank], request, f"rank {ranks[caller]} called {call}")
        if any(request.digest != call.digest for request in calls.values()):
            return self._mismatch(calls)
        if len(active) < self.size and call.kind not in self.joinable:
            missing = ", ".join(str(ranks[rank]) for rank, request in enumerate(round) if request.kind == JOIN)
            return InvalidUsage(
                f"{call.kind} needs every rank, but rank {missing} has called join(): call it before the first rank "
                "can run out of data, or after join()"
            )
        return None

    def _mismatch(self, calls: dict[int, Request]) -> Mismatch:
        ranks = self.communicator.global_ranks
        (first, call), *others = calls.items()
        rank, other = next(((r, o) for r, o in others if (o.digest, o.key) != (call.digest, call.key)), (first, call))
        return Mismatch(
            f"rank {ranks[first]} called {call}, but rank {ranks[rank]} called {other}: calls with a name are matched "
            "by it, calls without one by their order, so make the same calls on every rank, those without a name in "
            "the same order"
        )

    @contextmanager
    def refusing(self, call: str, name: str | None = None) -> Iterator[None]:
        """A context in which this rank prepares an operation: if it raises before the announcement, all ranks raise."""
        submitted = self._submitted
        try:
            yield
        except Exception as error:
            if self._submitted == submitted:
                self.refuse(error, call, name)
            raise

    def refuse(self, error: Exception, call: str, name: str | None = None) -> None:
        """Announces, without waiting, why this rank can't begin an operation: others raise that, unless all refuse."""
        told_class, reason = as_told(error)
        with suppress(SyncError, TypeError):
            if not self.has_failed():
                key = f"#{next(self._unnamed)}" if not isinstance(name, str) else key_of(call, name)
                request = Request(REFUSED, key, reason, how=f"{told_class.__name__} {call}")
                with self._lock:
                    if key not in self._own:
                        self._own[key] = self.refused = Operation(self, request, Plan())
                        self._announce(request)

    def has_failed(self) -> bool:
        """Whether the stream has failed: all ranks have heard of an error, or will."""
        return any(c.exception() is not None for c in (self.announcements, self.communicator))

    def abort(self, text: str, error: str = "Aborted") -> None:
        """Makes the stream fail on all ranks, which raise `text` as an error of the class named `error`."""
        for communicator in (self.announcements, self.communicator):
            communicator.abort(text, error)

    def serve(self) -> int:
        """Takes part in the other ranks' operations, without data, until all have joined. Returns in how many."""
        with self._lock:
            self._served, self._all_joined = 0, False
        ended = False
        while not ended:
            with self._lock:  # never within a round, at which another thread may be
                ended = self._all_joined
                if not self._rows and not ended:
                    self._announce(Request(JOIN))
                works, self._shadow_works = self._shadow_works, []
                works += [work for *_, work in itertools.islice(self._rows, 1)]
            for work in works:
                work.wait()
            self.advance()
        return self._served

    def shadow(self, request: Request) -> Sequence[Work]:
        """Begins this rank's part, without data, in an operation of the other ranks. Returns its works."""
        raise NotImplementedError
