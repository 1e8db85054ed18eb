"""A stream: operations of all ranks, one after the other, each of which begins by saying what it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, NoReturn

import torch

from syncengine._C import Communicator
from syncengine.errors import InvalidUsage, Mismatch, SyncError
from syncengine.horovod.requests import JOIN, REFUSED, SIZE, Request, as_told, refusal, told_class


class Round(NamedTuple):
    """What every rank does next."""

    requests: list[Request]

    @property
    def joined(self) -> list[int]:
        """The ranks that have run out of data."""
        return [rank for rank, request in enumerate(self.requests) if request.kind == JOIN.kind]

    @property
    def agreed(self) -> Request | None:
        """The request of those that have not joined, who all make the same, or all none; None if all have joined."""
        return next((request for request in self.requests if request.kind != JOIN.kind), None)


class Announcement:
    """A request on its way to all ranks."""

    def __init__(self, stream: Stream, request: Request) -> None:
        self._stream = stream
        self._request = request
        data = request.encode()
        self._own = torch.frombuffer(bytearray(data.ljust(SIZE, b"\0")), dtype=torch.uint8)
        self._all = torch.empty(stream.size * SIZE, dtype=torch.uint8, device="cpu")
        self._work = stream.announcements.all_gather(self._all, self._own, async_op=True)
        self._round: Round | None = None

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work.is_completed()

    def wait(self) -> Round:
        """Blocks until every rank has said what it does. Raises Mismatch if they do not all do the same, and what a
        rank has raised that can't do it.
        """
        if self._round is None:
            self._work.wait()
            rows = self._all.view(self._stream.size, SIZE)
            if torch.equal(rows, self._own.expand_as(rows)):
                self._round = Round([self._request] * self._stream.size)
            else:
                round = Round([Request.decode(bytes(row.tolist())) for row in rows])
                self._check(round)
                self._round = round
        return self._round

    def has_failed(self) -> bool:
        """Once it is completed: whether `wait` raises."""
        try:
            self.wait()
        except SyncError:
            return True
        return False

    @contextmanager
    def explains(self) -> Iterator[None]:
        """In it this rank takes its part in the operation, for which the others wait: what it raises there, they raise,
        too. Where the operation does not fit the others', this says it in Horovod's words.
        """
        try:
            yield
        except Mismatch:
            self.wait()
            raise
        except Exception as error:
            self.tell(error)
            raise

    def tell(self, error: Exception) -> None:
        """Ends the operation for all ranks by what this one has raised in it, unless it has failed."""
        if not self._stream.has_failed():
            kind, reason = as_told(error)
            self._stream.abort(f"{self._stream.own_name} in {self._request}: {reason}", kind.__name__)

    def _check(self, round: Round) -> None:
        ranks = self._stream.communicator.global_ranks
        active = [(rank, r) for rank, r in zip(ranks, round.requests, strict=True) if r.kind != JOIN.kind]
        calls = [(rank, request) for rank, request in active if request.kind != REFUSED]
        if not calls:  # nobody has begun anything
            return
        for rank, request in active:
            if request.kind == REFUSED:
                self._stream.fail(
                    f"rank {rank} in {request.name}, while rank {calls[0][0]} called {calls[0][1]}: {request.what}",
                    told_class(request),
                )
        for rank, request in active:
            if request.digest != active[0][1].digest:
                self._stream.fail(
                    f"rank {active[0][0]} called {active[0][1]}, but rank {rank} called {request}: Horovod matches "
                    "tensors by name, syncengine by the order of the calls, so make the same calls in the same order "
                    "on every rank",
                    Mismatch,
                )


class Stream:
    """The operations of one communicator, in the order in which every rank calls them.

    Announcements have a communicator of their own, so that they arrive where the operations themselves do not fit.
    Collective.
    """

    in_step = False  # whether this rank has begun an operation that it must go on with itself
    needed = True  # whether this rank may still begin one

    def __init__(self, communicator: Communicator) -> None:
        announcements = communicator.split(list(range(communicator.size)))
        assert announcements is not None
        self.communicator, self.announcements = communicator, announcements
        self.rank, self.size = communicator.rank, communicator.size
        self._announced = 0
        self._refusals: list[Announcement] = []  # of which this rank does not know yet what the others did

    @property
    def own_name(self) -> str:
        """As errors call this rank."""
        return f"rank {self.communicator.global_ranks[self.rank]}"

    def close(self) -> None:
        """Disconnects. No rank may still need it."""
        for communicator in (self.announcements, self.communicator):
            communicator.close()

    def announce(self, request: Request) -> Announcement:
        """Tells all ranks of this rank's next operation; does not wait for theirs, unless this rank has refused the one
        before: then it begins nothing before it knows that all have.
        """
        while self._refusals:
            self._refusals.pop(0).wait()
        announcement = Announcement(self, request)
        self._announced += 1
        return announcement

    @contextmanager
    def refusing(self, call: str) -> Iterator[None]:
        """In it this rank comes to announce an operation. If it raises before, it announces that, without waiting: the
        others raise it, too, unless all ranks refuse, which have lost nothing then.
        """
        announced = self._announced
        try:
            yield
        except Exception as error:
            if self._announced == announced and not self.has_failed():
                with suppress(SyncError):
                    self._refusals.append(Announcement(self, refusal(call, error)))
                    self._announced += 1
            raise

    def has_failed(self) -> bool:
        """Whether all ranks have heard of an error, or will."""
        return any(c.exception() is not None for c in (self.announcements, self.communicator))

    def fail(self, text: str, error: type[SyncError] = InvalidUsage) -> NoReturn:
        """Raises `error`, here and on every rank that waits for this one."""
        self.abort(text, error.__name__)
        raise error(text)

    def abort(self, text: str, error: str = "Aborted") -> None:
        """Every rank that waits for this one raises `error`."""
        for communicator in (self.announcements, self.communicator):
            communicator.abort(text, error)

    def refuse_joined(self, round: Round) -> None:
        """Raises InvalidUsage on all ranks if one of them has joined."""
        if round.joined and round.agreed is not None:
            ranks = ", ".join(str(self.communicator.global_ranks[rank]) for rank in round.joined)
            self.fail(
                f"{round.agreed.kind} needs every rank, but rank {ranks} has called join(): call it before the first "
                "rank can run out of data, or after join()"
            )

    def serve(self) -> int:
        """Takes part, without data, in what the others do until all have joined; returns in how many operations."""
        served = 0
        while True:
            round = self.announce(JOIN).wait()
            if round.agreed is None:
                return served
            if round.agreed.kind == REFUSED:
                continue
            self.shadow(round)
            served += 1

    def shadow(self, round: Round) -> None:
        """One operation of the others, in which this rank has nothing."""
        raise NotImplementedError
