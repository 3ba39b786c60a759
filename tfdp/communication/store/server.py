"""Server of the store: the values, all-gathers and members of a job.

All of it runs on the thread of an `Acceptor`, without locks. A request has an `id`,
which its answer repeats; a request whose answer must wait is answered later. The
standby is the member with a copy of the store, see `replication`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import socket
import time
from typing import Any, TypeAlias

from tfdp.communication.connection.acceptor import Acceptor
from tfdp.communication.connection.handshake import Authenticated, ConnectionFailed
from tfdp.communication.connection.messages import (
    MessageConnection,
    MessageTooLong,
    encode,
)
from tfdp.communication.store.contents import Change, Contents
from tfdp.communication.store.replication import Replication

# Shortest time between two heartbeats of a worker, and limit on the heartbeats that the
# host receives per second: with more workers, each sends fewer. The end of a process is
# still detected at once, since it closes the connection.
_BEAT_SECONDS, _MAX_BEATS_PER_SECOND = 1.0, 48
# Number of intervals without a heartbeat after which a summary lists the age of a
# worker's last one. After fewer, the next heartbeat may only be on its way.
_SILENT_BEATS = 1.5
# Creating a summary of heartbeats takes time for each worker of the job, so the same
# summary is sent for this many seconds per worker.
_SUMMARY_SECONDS = 0.001
# A hanging member must not delay the end of the host. So the host waits at most
# `_SETTLE_SECONDS` until the standby has all changes, and `_DRAIN_SECONDS` in all until
# members have received the last answers, with pauses of `_POLL_SECONDS`.
_DRAIN_SECONDS, _SETTLE_SECONDS, _POLL_SECONDS = 5.0, 2.0, 0.01
# Errors that are raised for a message that does not follow the protocol. They end only
# the connection of its sender, not the server.
_MALFORMED = ValueError, KeyError, TypeError, OverflowError, RecursionError

# Request of a member, as `Change` contains it: rank of the member, id of the request,
# and smallest id of a request that the member waits for, below which answers are
# dropped.
Request: TypeAlias = tuple[int, int, int]


def beat_seconds(num_workers: int) -> float:
    """Return the time between two heartbeats of a worker.

    Args:
        num_workers: Int, number of workers of the job.

    Example:

    >>> beat_seconds(2), beat_seconds(240)
    (1.0, 5.0)
    """
    return max(_BEAT_SECONDS, num_workers / _MAX_BEATS_PER_SECOND)


class _Member(MessageConnection):
    """Connection of the host to one worker.

    Args:
        acceptor: `Acceptor` whose thread serves the connection.
        sock: `socket.socket`, non-blocking, after the handshake.
        keys: `Authenticated`, the result of the handshake.
        rank: Int, rank of the worker.
    """

    def __init__(
        self, acceptor: Acceptor, sock: socket.socket, keys: Authenticated, rank: int
    ) -> None:
        super().__init__(sock, keys, acceptor=acceptor)
        self.rank = rank


@dataclasses.dataclass
class _Gather:
    """All-gather to which members have sent texts, but not all members yet.

    Args:
        texts: Dict from the rank of a worker to its text.
        requests: Dict from the rank of a worker to the `Request` that has sent it.
        is_of_living: Bool, whether the all-gather waits only for workers that are not
            lost.
    """

    texts: dict[int, str] = dataclasses.field(default_factory=dict)
    requests: dict[int, Request] = dataclasses.field(default_factory=dict)
    is_of_living: bool = False


@dataclasses.dataclass(frozen=True)
class _Beat:
    """Last heartbeat of a worker.

    Args:
        text: String, what the worker reports.
        is_notable: Bool, whether all workers receive the report with their heartbeats.
        received_at: Float, time by `time.monotonic`.
    """

    text: str
    is_notable: bool
    received_at: float


class Server:
    """Server of the job's key-value store, hosted by the process of one worker.

    Args:
        num_workers: Int, number of workers.
        rank: Int, rank of the worker that hosts the store.
        contents: `Contents` of the host that has ended, or `None`, the default, for the
            first host of the job.
    """

    def __init__(
        self, num_workers: int, rank: int, contents: Contents | None = None
    ) -> None:
        self._num_workers, self._rank = num_workers, rank
        self._members: dict[int, _Member] = {}
        self._contents = contents or Contents()
        self._replication = Replication(rank, self._contents, self._members)
        self._has_started = contents is not None
        self._is_closed = False
        # Requests for keys that have no text yet, by key: the member that waits and the
        # id of its request, which is answered when the text is set.
        self._readers: dict[str, list[tuple[_Member, int]]] = {}
        self._gathers: dict[str, _Gather] = {}
        # A worker that was a member of the earlier host, but does not connect to this
        # one, is noticed by the age of this first heartbeat.
        first = _Beat("", False, time.monotonic())
        ranks = range(num_workers) if contents else ()
        self._beats = dict.fromkeys(set(ranks) - self._contents.lost, first)
        # Summaries of heartbeats are cached, since creating one takes time for each
        # worker. The key is whether the summary has all workers. The value also has the
        # time at which the summary expires.
        self._summaries: dict[bool, tuple[float, dict[str, Any]]] = {}

    def add(
        self, acceptor: Acceptor, sock: socket.socket, keys: Authenticated, rank: int
    ) -> None:
        """Add a worker's connection, or refuse it; called on the acceptor's thread.

        It is refused if the store is closed, or the job has no such worker, has it
        already, or has started and lost it. The worker receives the reason, and the
        socket is closed.

        Args:
            acceptor: `Acceptor` whose thread serves the connection.
            sock: `socket.socket`, after the handshake.
            keys: `Authenticated`, the result of the handshake.
            rank: Int, rank of the worker.
        """
        member = _Member(acceptor, sock, keys, rank)
        refusal = self._refusal(rank)
        member.send({"refused": refusal, "is_ending": self._is_closed})
        if refusal:
            member.close()
            return
        self._members[rank] = member
        self._contents.lost.discard(rank)
        self._beats[rank] = _Beat("", False, time.monotonic())
        acceptor.watch(member, functools.partial(self._proceed, member))
        if self._has_started:
            self._replicate(member)

    def drain(self) -> None:
        """Wait until members have received what was sent, and end their connections.

        New members are refused from then on.

        Only the direction to a member is ended: a connection that is closed while bytes
        arrive is reset, which may discard the last answer.
        """
        deadline = time.monotonic() + _DRAIN_SECONDS
        settled_by = time.monotonic() + _SETTLE_SECONDS
        while not self._replication.is_settled and time.monotonic() < settled_by:
            time.sleep(_POLL_SECONDS)
        self._is_closed = True
        for member in list(self._members.values()):
            while member.has_output and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            try:
                member.sock.shutdown(socket.SHUT_WR)
            except OSError:
                continue
        while self._members and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _replicate(self, member: _Member) -> None:
        """Send a new member the standby's rank; without a standby, choose one."""
        if self._replication.standby is None:
            self._replication.begin()
        else:
            member.send_encoded(self._replication.announcement)

    def _refusal(self, rank: int) -> str:
        """Return why a connection of a worker is refused, or `""`."""
        if self._is_closed:
            return f"worker {self._rank} is ending"
        if rank >= self._num_workers:
            return "the job has no such worker"
        if rank in self._members:
            return "another process has joined the job as this worker"
        if self._has_started and rank in self._contents.lost:
            return "the job has started, and has lost this worker"
        return ""

    def _proceed(self, member: _Member) -> bool:
        """Serve a member's messages that have arrived, without waiting for more.

        If its connection has ended, or a message is malformed, the member is removed.

        Returns:
            Bool, false if the member was removed.
        """
        try:
            for message in member.proceed():
                self._serve(member, message)
            return True
        except (ConnectionFailed, *_MALFORMED):
            pass  # the member has ended, or does not speak this protocol
        self._remove(member)
        return False

    def _remove(self, member: _Member) -> None:
        """Remove a member whose connection has ended.

        Unless the store is closed, the others receive the news that its worker is lost.
        """
        rank = member.rank
        del self._members[rank]
        self._forget_reads(member)
        if self._is_closed:
            return  # members of a closed store move to the next host: none is lost
        self._commit({"lost": [rank]})
        self._replication.remove(member)
        if not self._has_started:
            # Before all workers have joined, a lost worker may start again, and then
            # sends its text again. So its earlier text is removed.
            for gather in self._gathers.values():
                gather.texts.pop(rank, None)
                gather.requests.pop(rank, None)
        self._push(lost=[rank])
        for key in list(self._gathers):
            self._complete_gather(key)

    def _serve(self, member: _Member, message: dict[str, Any]) -> None:
        """Answer one request of a member.

        A request that was already served, here or by an earlier host, is not carried
        out again, but receives the same answer.
        """
        self._replication.check()
        request = member.rank, int(message["id"]), int(message["oldest"])
        # An earlier host may have served this request before it was lost: the member
        # sends the request again, and receives the same answer.
        answer = self._contents.answer(*request[:2])
        if answer is not None:
            self._answer(member, request[1], **answer)
        elif message["do"] == "acknowledge":
            self._replication.acknowledge(member.rank, message["number"])
        else:
            self._execute(member, request, message)

    def _execute(
        self, member: _Member, request: Request, message: dict[str, Any]
    ) -> None:
        """Carry out a request, and answer it now or later.

        Args:
            member: `_Member` that has sent the request.
            request: `Request`, a tuple of the member's rank, the request's id, and the
                smallest id that the member waits for.
            message: Dict, all fields of the request; `"do"` is its kind.

        Raises:
            ValueError: If the request is malformed; also `KeyError` or `TypeError`.
        """
        match message["do"]:
            case "put":
                self._put(request, message["key"], message["text"])
            case "get":
                self._get(member, request[1], message["key"])
            case "cancel":
                self._forget_reads(member, message["get"])
                self._answer_now(member, request[1])
            case "delete":
                self._complete([request], {}, values={message["key"]: None})
            case "gather":
                is_of_living = bool(message["is_of_living"])
                self._gather(request, message["key"], message["text"], is_of_living)
            case "expel":
                self._expel(message["ranks"])
                self._answer_now(member, request[1])
            case "missing":
                self._answer_now(
                    member, request[1], ranks=self._missing(message["key"])
                )
            case "withdraw":
                is_open = self._withdraw(member.rank, message["key"], message["reason"])
                self._answer(member, request[1], is_withdrawn=is_open)
            case "beat":
                self._beat(member, request[1], message)
            case other:
                raise ValueError(other)

    def _commit(self, change: Change) -> None:
        """Apply a change, and send it to the standby."""
        self._contents.apply(change)
        self._replication.send(change)

    def _complete(
        self, requests: list[Request], answer: dict[str, Any], **change: Any
    ) -> None:
        """Commit a change, and answer the requests that it completes.

        Args:
            requests: List of `Request`s, tuples of the rank of a member, an id, and the
                smallest id that the member waits for.
            answer: Dict, their answer.
            **change: Further fields of the `Change`, such as `values`.

        Raises:
            MessageTooLong: If the answer exceeds the limit; nothing has changed then.
        """
        body = encode(answer)
        self._commit({**change, "answer": answer, "to": requests})
        for rank, number, _ in requests:
            if rank in self._members:
                self._reply(self._members[rank], number, body)

    def _answer_now(self, member: _Member, number: int, **answer: Any) -> None:
        """Answer request `number` with the fields `answer`, without the standby.

        It is sent at once, which is right only for an answer that depends on no change
        of the store's contents.
        """
        member.send({"id": number, **answer})

    def _answer(self, member: _Member, number: int, **answer: Any) -> None:
        """Answer request `number` with the fields `answer`, after the standby's copy.

        The answer is sent once the standby has all changes that it may depend on.
        """
        self._reply(member, number, encode(answer))

    def _reply(self, member: _Member, number: int, body: bytes) -> None:
        """Answer a member's request, once the standby has the changes.

        Args:
            member: `_Member` that has sent the request.
            number: Int, id of the request, which is added to the answer.
            body: Bytes, the encoded JSON object of the answer's other fields.
        """
        fields = body[1:] if body == b"{}" else b"," + body[1:]
        self._replication.answer(member, b'{"id":%d' % number + fields)

    def _push(self, **news: Any) -> None:
        """Send news of workers to all members, without a request.

        Args:
            **news: Parts of the summary that `Store.beat` returns.
        """
        encoded = encode({"news": news})
        for member in self._members.values():
            member.send_encoded(encoded)

    def _beat(self, member: _Member, number: int, request: dict[str, Any]) -> None:
        """Record a heartbeat; answer it with a summary of the workers' heartbeats.

        Args:
            member: `_Member` of the worker.
            number: Int, id of the request.
            request: Dict, whose fields are the arguments of `Store.beat`.
        """
        text, rank = request["text"], member.rank
        beat = _Beat(text, bool(request["is_notable"]), time.monotonic())
        self._beats[rank] = beat
        if request["is_news"]:
            self._summaries.clear()
            self._push(beats={rank: [0.0, text]})
        self._answer_now(member, number, **self._summary(bool(request["wants_all"])))

    def _summary(self, has_all: bool) -> dict[str, Any]:
        """Return a summary of the workers' heartbeats, cached for a short time.

        Args:
            has_all: Bool, whether `"beats"` has all workers. Otherwise it has only
                reports that were sent as notable, so that the summary of a thousand
                workers stays short.

        Returns:
            Dict: `"beats"`, from the rank of a worker to the age of its last report in
            seconds and the report; `"ages"` of other workers whose last one is old; and
            `"lost"`, the ranks whose connection has ended.
        """
        now = time.monotonic()
        until, summary = self._summaries.get(has_all, (0.0, {}))
        if now < until:
            return summary
        beats = {
            rank: [now - beat.received_at, beat.text]
            for rank, beat in self._beats.items()
            if beat.text and (has_all or beat.is_notable)
        }
        oldest = now - _SILENT_BEATS * beat_seconds(self._num_workers)
        ages = {
            rank: now - beat.received_at
            for rank, beat in self._beats.items()
            if rank not in beats and beat.received_at < oldest
        }
        summary = {"beats": beats, "ages": ages, "lost": sorted(self._contents.lost)}
        self._summaries[has_all] = now + _SUMMARY_SECONDS * self._num_workers, summary
        return summary

    def _put(self, request: Request, key: str, text: str) -> None:
        """Set a key's text; answer this request, and members that wait for the text."""
        self._complete([request], {}, values={key: text})
        for member, number in self._readers.pop(key, ()):
            self._answer(member, number, text=text)

    def _get(self, member: _Member, number: int, key: str) -> None:
        """Answer request `number` with a key's text, now or once it is set."""
        if (text := self._contents.values.get(key)) is not None:
            self._answer(member, number, text=text)
        else:
            self._readers.setdefault(key, []).append((member, number))

    def _forget_reads(self, member: _Member, number: int | None = None) -> None:
        """Forget requests of a member that wait for a key's text.

        Args:
            member: `_Member` that has sent them.
            number: Int, id of the only request to forget, or `None` for all of them.
        """
        for key, readers in list(self._readers.items()):
            self._readers[key] = [
                (its, other)
                for its, other in readers
                if its is not member or number not in (None, other)
            ]
            if not self._readers[key]:
                del self._readers[key]

    def _expel(self, ranks: list[int]) -> None:
        """Remove members that others have declared lost; they cannot connect again."""
        self._commit({"lost": ranks})
        for rank in ranks:
            if rank in self._members:
                # The socket is shut down rather than closed: the acceptor's thread,
                # which also runs this method, then reads the end of the connection, and
                # calls `_remove`.
                with contextlib.suppress(OSError):  # the connection has ended already
                    self._members[rank].sock.shutdown(socket.SHUT_RDWR)
        for key in list(self._gathers):
            self._complete_gather(key)

    def _gather(
        self, request: Request, key: str, text: str, is_of_living: bool
    ) -> None:
        """Add a member's text; answer all with all texts once each has sent its own.

        Args:
            request: `Request` of the member.
            key: String, identity of the all-gather.
            text: String, the member's text.
            is_of_living: Bool, whether lost workers need not send a text.
        """
        gather = self._gathers.setdefault(key, _Gather(is_of_living=is_of_living))
        rank = request[0]
        gather.texts[rank], gather.requests[rank] = text, request
        self._complete_gather(key)

    def _complete_gather(self, key: str) -> None:
        """Send all texts to the members of an all-gather, unless a text is missing.

        The first complete one shows that all workers have joined: the job has started,
        and the standby is chosen.
        """
        if self._missing(key):
            return
        gather = self._gathers.pop(key)
        if not self._has_started:
            # All workers have joined. They receive the texts once one of them, the
            # standby, has a copy of the contents.
            self._has_started = True
            self._replication.begin()
        requests = list(gather.requests.values())
        texts = [gather.texts.get(rank) for rank in range(self._num_workers)]
        try:
            self._complete(requests, {"texts": texts})
        except MessageTooLong as error:
            self._complete(requests, {"ended": str(error)})

    def _missing(self, key: str) -> list[int]:
        """Return the ranks of the workers whose text an all-gather waits for."""
        gather = self._gathers.get(key)
        if gather is None:  # the all-gather was complete before the member asked
            return []
        lost = self._contents.lost if gather.is_of_living else ()
        ranks = range(self._num_workers)
        return [r for r in ranks if r not in gather.texts and r not in lost]

    def _withdraw(self, rank: int, key: str, reason: str) -> bool:
        """Withdraw a member's text; with a reason, end the all-gather for all members.

        Returns:
            Bool, whether the text is withdrawn; false if the all-gather was complete.
        """
        gather = self._gathers.get(key)
        if gather is None:
            return False
        gather.texts.pop(rank, None)
        gather.requests.pop(rank, None)
        if reason:
            del self._gathers[key]
            self._complete(list(gather.requests.values()), {"ended": reason})
        return True
