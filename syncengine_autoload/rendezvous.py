"""The meeting of ranks over a torch.distributed store that may outlive them.

torchrun's agent keeps one store for all restarts, and a process group made anew finds the keys of the one before. So a
key in the store proves nothing by being there. Each rank signs in with a nonce; all nonces together name a session, and
a rank writes its payload under a session's name. A payload in a session of this rank's nonce was written after this
rank came. When a nonce is replaced, because its rank was restarted or tries again, there is another session, and all
write anew. A failing rank's notice is kept beside, as that rank may have signed in anew before others look.

A nonce names the process that signs in. So ranks of one machine see that a process for which others wait has ended,
though it may not have a communicator yet.

This module is not in syncengine.launch, since the patch needs it where syncengine can't be imported.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import time
from collections.abc import Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from syncengine_autoload import tell

_Nonces = tuple[bytes, ...]

# The nonces that this process saw in each meeting, by its own nonce there: their failures are old in its next meeting.
_seen: dict[bytes, _Nonces] = {}
_HEARD_WITHIN = 30.0  # seconds
_MOST_SEEN = 1024  # meetings; a forgotten one costs at most that an old failure is heard once more


class Failed(Exception):
    """A rank has failed; `notice` is its message to the others."""

    def __init__(self, notice: bytes) -> None:
        super().__init__(notice)
        self.notice = notice


class _Signature(NamedTuple):
    """The entry of a rank in the store: that it has come, or, with a notice, that it has failed."""

    nonce: bytes
    attempt: str
    there: _Nonces  # the ranks at its failure: they hear of it, and if they fail in turn, that is no news
    notice: bytes


class Rendezvous:
    """One meeting, over `store`, of the ranks with these `numbers`. This process is the one at index `rank` of them.

    A rank's n-th meeting for a `purpose` is the n-th of the others. If a rank ended or gave up before it met them, its
    next one takes the place of that meeting. No method waits.
    """

    def __init__(self, store: dist.Store, purpose: str, rank: int, numbers: Sequence[int]) -> None:
        # The place depends on the ranks: others may have met under this name, as torch numbers new groups from 0 again.
        place = hashlib.sha256(repr(list(numbers)).encode()).hexdigest()[:16]
        self.store = dist.PrefixStore(f"syncengine/{purpose}/{place}", store)
        self.values: dict[int, bytes] = {}  # the payloads that have come in this round, by index
        self.met = False  # whether the first round is complete: from then on the session stays
        self._told: bytes | None = None  # the notice of the rank that has failed
        self._session: dist.PrefixStore | None = None  # keys of the ranks that take part now, and of nobody else
        self._members: _Nonces = ()  # the nonces of the session
        self._rank, self._size = rank, len(numbers)
        self._serves = numbers[rank] == 0  # whether this process serves the store, unless an agent does
        self._round = 0
        self._changes = b""  # how many signatures there were when this rank looked
        self._failures = self.store.add("failures", 0)  # earlier ones are known by signatures that are still there
        self._unread: list[int] = []
        self._nonces, failures = self._read()
        self._found = self._nonces
        self._came: set[bytes] = set()  # nonces of the ranks that have met this one in some session
        known = _seen.pop(self._nonces[rank], ()) if self._nonces[rank] else ()
        of_attempts = (failure.nonce for failure in failures if failure.attempt != _attempt())
        self._past = {self._nonces[rank], *known, *of_attempts}
        self._nonce = b":".join([secrets.token_hex(8).encode(), _process(os.getpid()) or b""])
        self._remember(self._nonces)
        self._sign(b"")
        self._hear(failures)

    def gather(self, payload: bytes) -> bool:
        """Gives this rank's payload. Returns whether all ranks have given theirs, which are in `values` then.

        Call it with the same payload until it returns True. Raises Failed once a rank has failed.
        """
        changed = not self.met and self._look()
        # The payloads of the old session come first: others may have completed it, and signed in anew since.
        complete = self._collect()
        if not complete:
            self._raise_what_is_told()
            if changed:
                self._enter(payload)
                complete = self._collect()
        self.check()
        if complete and not self.met:
            self.met = True
            self._remember(self._members)  # and not the ranks that have signed in since
        return complete

    def check(self) -> None:
        """Raises Failed once a rank of this session has failed."""
        if self._session is not None and self._session.check(["failed"]):
            self._told = self._session.get("failed")
            self._raise_what_is_told()

    def begin_round(self, payload: bytes) -> None:
        """Begins the next round of the same ranks, after a complete one. Then call gather()."""
        assert self._session is not None
        self.values, self._round = {}, self._round + 1
        self._give(payload)

    def missing(self) -> set[int]:
        """Indices of the ranks that have not signed in; if all have, of the ranks that have not given their payload."""
        away = {peer for peer, nonce in enumerate(self._nonces) if not nonce}
        return away or set(range(self._size)) - self.values.keys()

    def there(self) -> dict[int, bool]:
        """Whether the ranks that have signed in since this one came still live, as far as is known, by index."""
        nonces = self._members if self.met else self._nonces
        here = (peer for peer, nonce in enumerate(nonces) if nonce in self._came or nonce != self._found[peer])
        return {peer: not _has_ended(nonces[peer]) for peer in here if peer != self._rank}

    def fail(self, notice: bytes) -> None:
        """Ends the meeting by `notice`, for ranks that are there and ranks that come later. The first notice counts."""
        if not self.met:
            self._look()
        if self._told is not None:
            self._leave(self._told)
        elif self._session is None or not self._session.check(["failed"]):
            self._leave(notice)
            signature = self._signature(notice)
            self.store.set(f"failure/{self.store.add('failures', 1)}", signature)  # type: ignore[arg-type]
            self._sign(notice)

    def stay_until_heard(self, to_come: bool) -> None:
        """Makes this process, if it serves the store, wait at its end until ranks have heard of the failure.

        Call this after fail(), or after Failed was raised. The process waits for 30 s at most: for ranks that are
        waiting; with `to_come` also for those that have not come yet. It does not wait if all ranks have met before.
        """
        store: dist.Store = self.store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        serves = self._serves and isinstance(store, dist.TCPStore)
        if serves and not self.met and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            Finalize(None, _wait_until_heard, (self, to_come), exitpriority=0)

    def unheard(self, to_come: bool) -> bool:
        """Whether ranks have not heard of the failure that this one knows of: see stay_until_heard()."""
        for peer in range(self._size):
            signature = self._read_signature(str(peer))
            if signature is None:
                if to_come:
                    return True
            elif peer != self._rank and not signature.notice and signature.nonce not in self._past:
                left = f"left/{peer}"
                if not self.store.check([left]) or self.store.get(left) != signature.nonce:
                    return True
        return False

    def superseded(self) -> bool:
        """Whether a rank has signed in anew after all had given their payload."""
        if self.met:
            self._look()
        return self.met and self._nonces != self._members

    def _raise_what_is_told(self) -> None:
        if self._told is not None:
            self._leave(self._told)
            raise Failed(self._told)

    def _leave(self, notice: bytes) -> None:
        """Ends the session, so that others can't complete it with this rank's payload when this rank signs in anew."""
        if self._session is not None and not self._session.check(["failed"]):
            self._session.set("failed", notice)  # type: ignore[arg-type] # bytes are what it takes
        self.store.set(f"left/{self._rank}", self._nonce)  # type: ignore[arg-type]

    def _signature(self, notice: bytes) -> bytes:
        there = (self._members if self.met else self._nonces) if notice else ()
        return b" ".join([self._nonce, b",".join([_attempt().encode() or b"-", *there]), notice])

    def _sign(self, notice: bytes) -> None:
        self.store.set(str(self._rank), self._signature(notice))  # type: ignore[arg-type]
        self.store.add("changes", 1)

    def _read(self) -> tuple[_Nonces, list[_Signature]]:
        """Each rank's nonce, b"" for a rank without one; and the signatures of failures."""
        signatures = [self._read_signature(str(peer)) for peer in range(self._size)]
        nonces = tuple(b"" if signature is None else signature.nonce for signature in signatures)
        return nonces, [signature for signature in signatures if signature and signature.notice]

    def _read_signature(self, key: str) -> _Signature | None:
        if not self.store.check([key]):
            return None
        nonce, then, notice = self.store.get(key).split(b" ", 2)
        attempt, *there = then.split(b",")
        return _Signature(nonce, attempt.decode(), tuple(there), notice)

    def _read_failures(self) -> list[_Signature]:
        """The failures since this rank came, whether the ranks have signed in anew since or not."""
        before, self._failures = self._failures, self.store.add("failures", 0)
        numbers = [*self._unread, *range(before + 1, self._failures + 1)]
        read = {number: self._read_signature(f"failure/{number}") for number in numbers}
        self._unread = [number for number, failure in read.items() if failure is None]  # counted, and not yet written
        return [failure for failure in read.values() if failure is not None]

    def _hear(self, failures: list[_Signature]) -> None:
        for failure in failures:
            if failure.nonce not in self._past and failure.nonce != self._nonce and self._told is None:
                self._told = failure.notice
                self._remember((failure.nonce, *failure.there))

    def _look(self) -> bool:
        """Looks at the signatures. Returns whether the ranks that take part have changed since the last look."""
        changes = self.store.get("changes")  # there, since this rank has signed in
        if changes == self._changes:
            return False
        before = self._nonces
        self._nonces, failures = self._read()
        if not self.met:
            if self._told is None:
                self._remember(self._nonces)
            self._hear(self._read_failures() + failures)
        first, self._changes = not self._changes, changes
        return first or self._nonces != before

    def _remember(self, nonces: _Nonces) -> None:
        _seen[self._nonce] = nonces
        if len(_seen) > _MOST_SEEN:
            del _seen[next(iter(_seen))]

    def _enter(self, payload: bytes) -> None:
        """Enters the session that all nonces name, also while ranks are missing: others may want to see who came."""
        self._members = self._nonces
        name = hashlib.sha256(b" ".join(self._nonces)).hexdigest()[:32]
        self.values, self._session = {}, dist.PrefixStore(name, self.store)
        self._give(payload)

    def _give(self, payload: bytes) -> None:
        assert self._session is not None
        self._session.set(f"{self._round}/{self._rank}", payload)  # type: ignore[arg-type]

    def _collect(self) -> bool:
        if self._session is None:
            return False
        for peer in range(self._size):
            key = f"{self._round}/{peer}"
            if peer not in self.values and self._session.check([key]):
                self.values[peer] = self._session.get(key)
                self._came.add(self._members[peer])
        return len(self.values) == self._size  # all ranks had signed in, then


def fail_in_groups(notice: bytes) -> None:
    """Ends the meetings where ranks decide about DDP, in all groups of torch.distributed that have this rank."""
    for group, (_, store) in list(dist.distributed_c10d._world.pg_map.items()):
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
        if rank >= 0 and len(ranks) > 1:
            with contextlib.suppress(dist.DistError):
                meeting = Rendezvous(store, "patch", rank, ranks)
                meeting.fail(notice)
                meeting.stay_until_heard(to_come=False)


def _wait_until_heard(meeting: Rendezvous, to_come: bool) -> None:
    begin, told = time.monotonic(), False
    with contextlib.suppress(dist.DistError):
        while meeting.unheard(to_come) and (waited := time.monotonic() - begin) < _HEARD_WITHIN:
            if waited > 1 and not told:
                told = True
                tell(f"this process serves the store, and ends when the others have heard why, or {_HEARD_WITHIN:g} s")
            time.sleep(0.02)


def _process(pid: int) -> bytes | None:
    """A name for the process of this number that no other process has on any machine.

    The name is b"" if the process has ended or its machine has no name; None if /proc can't tell: no descriptor, say.
    """
    try:  # of the first thread: QEMU's user mode shows a process other numbers of itself than the others see
        state, *numbers = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return b""
    except OSError:
        return None
    return b"" if state in "ZX" or not _place() else f"{_place()}/{numbers[18]}/{pid}".encode()


@functools.cache
def _place() -> str:
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    return ""


def _has_ended(nonce: bytes) -> bool:
    process = nonce.partition(b":")[2]
    place, _, pid = process.rpartition(b"/")
    return place.rpartition(b"/")[0] == _place().encode() and _process(int(pid or 0)) not in (None, process)


def _attempt() -> str:
    """A text that names the ranks' attempt: no restart lies between signatures that have the same text.

    With several nodes it is "", which says nothing, since their agents count restarts apart.
    """
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "none")
    return count if count == "none" or os.environ.get("GROUP_WORLD_SIZE") == "1" else ""
