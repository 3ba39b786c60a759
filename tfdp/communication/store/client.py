"""Connection of a member to the store of its job."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from tfdp.communication.connection.handshake import ConnectionFailed
from tfdp.communication.connection.messages import encode
from tfdp.communication.store.contents import Contents
from tfdp.communication.store.hosts import HostConnection, Hosts, Refused
from tfdp.ground.base.threads import start_thread

# The host answers some requests at once, such as the withdrawal from an all-gather. A
# host that needs more than this many seconds for one of these is assumed to hang.
_ANSWER_SECONDS = 2.0
# After the loss of the host, a member tries for `_FOLLOW_SECONDS` to connect to the
# standby, with pauses of `_RETRY_SECONDS`. The standby tries for `_PROBE_SECONDS` to
# reach the old host, which may still run.
_FOLLOW_SECONDS, _RETRY_SECONDS, _PROBE_SECONDS = 3.0, 0.02, 1.0
# Longest wait for the end of the connection to a lost host: if the host hangs or is
# off, the connection does not end by itself.
_END_SECONDS = 1.0
# Longest random delay before a member without open requests follows the standby, so
# that not all members connect at once.
_MAX_DELAY_SECONDS = 0.5


class HostLost(ConnectionError):
    """Error: no process hosts the job's store, or its host was not reached."""


class Store:
    """Client of the job's key-value store; any thread may call the methods.

    If the process that hosts the store ends, the worker with the copy, the standby,
    becomes the host: waiting calls continue to wait, and no value is lost.

    Args:
        rank: Int, rank of this worker.
        host: Int, rank of the worker that hosts the store.
        hosts: `Hosts`, which connects to the host.

    Raises:
        ConnectionFailed: If the host is not reached, or refuses this process.

    Attributes:
        connection: `HostConnection` to the host, or `None` between two hosts.
        news: Callable, receives a dict of news about workers that the host sends
            unasked; called on the thread that reads the connection.
        lost: Callable, called on the same thread once the connection has ended, while
            `host` is still the rank of the lost host.
        is_ending: Bool, whether this process leaves the job, and so follows no host.
    """

    # Ids of requests are never repeated in this process, even by a later store, since a
    # host takes a request with a known id for the same request, sent again.
    _numbers = itertools.count(1)

    def __init__(self, rank: int, host: int, hosts: Hosts) -> None:
        self.rank, self.host, self._hosts = rank, host, hosts
        self.is_ending = False
        self.news: Callable[[dict[str, Any]], None] = lambda news: None
        self.lost: Callable[[], None] = lambda: None
        self._prefixes = itertools.count()
        self._lock = threading.Lock()
        self._sends = threading.Lock()
        self._waiting: dict[int, PendingAnswer] = {}
        # Future that `wake` completes, so that calls that wait for texts of other
        # workers return.
        self.alarm: concurrent.futures.Future[None] = concurrent.futures.Future()
        # Reason that calls raise once the store is lost, or `None` before.
        self._reason: str | None = None
        # The standby keeps a copy of the store's contents, to host the store if the
        # host ends. `_copy` is set only on the standby; `_standby` is its rank, if
        # there is one.
        self._copy: Contents | None = None
        self._standby: int | None = None
        # Event that ends the random delay before this worker follows the standby: it is
        # set if a call waits for the next host, or this worker is the standby.
        self._hurry = threading.Event()
        # Event that is set while this process has no connection to a host. `give_up`
        # waits for it, since the store is not lost if all workers follow the standby.
        self._has_ended = threading.Event()
        self.connection: HostConnection | None = hosts.connect(host)
        self._begin_reading(self.connection)

    def new_prefix(self) -> str:
        """Return a new prefix for keys, the same on all members.

        All members call this in the same order.
        """
        return f"tfdp/{next(self._prefixes)}"

    def put(self, key: str, text: str) -> None:
        """Set the text of a key.

        Args:
            key: String, the key.
            text: String, its text.

        Raises:
            HostLost: If the store is lost.
            MessageTooLong: If the text exceeds the limit of a message.
        """
        self.ask("put", key=key, text=text).result()

    def get(self, key: str, timeout_seconds: float) -> str:
        """Wait until a key has a text, and return it.

        Args:
            key: String, the key.
            timeout_seconds: Float, the longest wait.

        Raises:
            TimeoutError: If the key has no text in time.
            HostLost: If the store is lost.
        """
        pending = self.ask("get", key=key)
        try:
            return pending.result(timeout_seconds)["text"]
        except concurrent.futures.TimeoutError:
            self.ask("cancel", get=pending.number).result()
            # The host may have sent the text before it received the cancellation.
            if pending.done():
                return pending.result()["text"]
            self.forget(pending)
            raise TimeoutError(key) from None

    def delete(self, key: str) -> None:
        """Delete a key and its text, if it has one.

        Args:
            key: String, the key.
        """
        self.ask("delete", key=key).result()

    def gather(self, key: str, text: str, *, is_of_living: bool = False) -> Gathering:
        """Send this member's text to an all-gather, without a wait for other texts.

        Args:
            key: String, key of the all-gather, equal on all members.
            text: String, text of this member.
            is_of_living: Bool, whether the all-gather waits only for members that are
                not lost. Defaults to `False`.

        Returns:
            `Gathering`, which has all texts once each member has sent its own.
        """
        pending = self.ask("gather", key=key, text=text, is_of_living=is_of_living)
        return Gathering(self, key, pending)

    def expel(self, ranks: list[int]) -> None:
        """Declare members lost: their connections end, and they cannot return.

        Args:
            ranks: List of ints, the members.

        Raises:
            HostLost: If the store is lost, or its host does not answer.
        """
        try:
            self.ask("expel", ranks=ranks).result(_ANSWER_SECONDS)
        except concurrent.futures.TimeoutError:
            raise HostLost(f"Worker {self.host}, the store's host, hangs.") from None

    def beat(
        self, text: str, *, is_notable: bool, is_news: bool, wants_all: bool
    ) -> dict[str, Any]:
        """Send a heartbeat; return the host's summary of the workers' heartbeats.

        Args:
            text: String, what this worker reports.
            is_notable: Bool, whether other workers receive it with their next
                heartbeats.
            is_news: Bool, whether all workers receive it at once.
            wants_all: Bool, whether this worker receives the reports of all workers,
                not only the notable ones.

        Returns:
            Dict: `"beats"`, from the rank of a worker to the age of its last report in
            seconds and the report; `"ages"` of other workers whose last one is old; and
            `"lost"`, the ranks whose connection has ended.

        Raises:
            HostLost: If the store is lost.
        """
        return self.ask(
            "beat",
            text=text,
            is_notable=is_notable,
            is_news=is_news,
            wants_all=wants_all,
        ).result()

    def wake(self) -> None:
        """Make all present and later waits of `Gathering.texts` return at once.

        They return `None` if texts are missing. Waits without `may_wake` continue.
        """
        with self._lock:
            if not self.alarm.done():
                self.alarm.set_result(None)

    def fail(self, reason: str = "") -> None:
        """Make all waiting and later calls raise `HostLost`.

        Args:
            reason: String, why the store is lost, or `""`, the default, if its
                connection has ended.
        """
        reason = reason or (
            f"The connection to the job's store, on worker {self.host}, has ended."
        )
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            self._reason = reason
        for future in waiting.values():
            future.set_exception(HostLost(reason))

    def give_up(self, host: int, reason: str) -> None:
        """Make all calls fail, unless a lost host's connection ends within a second.

        This call waits for the end of the connection. If the connection ends, all
        workers follow the standby instead.

        Args:
            host: Int, rank of the host, which is lost.
            reason: String, as in `fail`.
        """
        if not self._has_ended.wait(_END_SECONDS) and self.host == host:
            self.fail(reason)

    def close(self, reason: str) -> None:
        """End the connection, and make all calls fail.

        Args:
            reason: String, why the store can no longer be used.
        """
        self.fail(reason)
        # A call may be blocked while it sends to a suspended host. Shutting down the
        # socket also ends that call.
        connection = self.connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def ask(self, kind: str, **request: Any) -> PendingAnswer:
        """Send a request to the store's host; return the future of its answer, a dict.

        Args:
            kind: String, the kind of the request, one of those in `Server._execute`.
            **request: Fields of the request, which JSON supports.

        Raises:
            HostLost: If the store is lost.
            MessageTooLong: If the request exceeds the limit.
        """
        with self._sends:
            with self._lock:
                if self._reason is not None:
                    raise HostLost(self._reason)
                number = next(self._numbers)
                oldest = next(iter(self._waiting), number)
                message = {"id": number, "oldest": oldest, "do": kind, **request}
                pending = self._waiting[number] = PendingAnswer(number, encode(message))
            if self.connection is not None:
                self.connection.send_encoded(pending.encoded)
            else:
                self._hurry.set()
        return pending

    def forget(self, pending: PendingAnswer) -> None:
        """Forget a request, whose answer is then ignored; the host is not notified."""
        with self._lock:
            self._waiting.pop(pending.number, None)

    def _read(self, connection: HostConnection) -> bool:
        """Handle what the host has sent: answers, news of workers, changes of the copy.

        Called on the acceptor's thread.

        Returns:
            Bool, false at the end of the connection.
        """
        try:
            for message in connection.receive():
                self._receive(message)
        except ConnectionFailed:
            self._lose_host()
            return False
        return True

    def _receive(self, message: dict[str, Any]) -> None:
        """Handle a message of the host.

        An answer completes the request that waits for it. A report for all workers is
        passed to `news`. This worker begins a copy of the store when it becomes the
        standby, applies and acknowledges each change, and drops the copy when another
        worker is the standby.
        """
        match message:
            case {"id": number}:
                with self._lock:
                    pending = self._waiting.pop(number, None)
                if pending is not None:
                    pending.set_result(message)
            case {"news": news}:
                self.news(news)
            case {"copies": _}:
                self._copy = Contents()
            case {"change": change, "number": number} if self._copy is not None:
                self._copy.apply(change)
                self._acknowledge(number)
            case {"standby": rank}:
                self._standby = rank
                if rank != self.rank:
                    self._copy = None

    def _acknowledge(self, number: int) -> None:
        """Report to the host that the copy has a change; no answer follows.

        Args:
            number: Int, number of the change.
        """
        message = {"id": 0, "oldest": 0, "do": "acknowledge", "number": number}
        with self._sends:
            if self.connection is not None:
                self.connection.send(message)

    def _lose_host(self) -> None:
        """Handle the loss of the host: follow the standby, or fail without one.

        Called on the acceptor's thread.
        """
        with self._sends:
            self.connection = None
        self._has_ended.set()
        self.lost()
        if self._reason is not None:
            return
        if self._standby is None or self.is_ending:
            self.fail()
            return
        if self._waiting or self._standby == self.rank:
            self._hurry.set()
        try:
            start_thread("tfdp store follows", self._connect_to_standby)
        except RuntimeError:  # the interpreter is shutting down and starts no thread
            self.fail()

    def _connect_to_standby(self) -> None:
        """Connect to the standby once it is the host, and send open requests again.

        Called on a separate thread after the loss of the host. If this worker is the
        standby, it first becomes the host. All calls fail if the standby has ended, or
        is not reached within about three seconds.
        """
        standby = self._standby
        assert standby is not None
        # At the end of a job, most workers have no open request, and exit during this
        # random delay: they need not connect to the standby.
        self._hurry.wait(random.SystemRandom().uniform(0.0, _MAX_DELAY_SECONDS))
        self._hurry.clear()
        deadline = time.monotonic() + _FOLLOW_SECONDS
        try:
            if standby == self.rank:
                self._become_host()
            while True:
                try:
                    connection = self._hosts.connect(standby)
                    break
                except ConnectionFailed as error:
                    is_gone = isinstance(error.__cause__, ConnectionRefusedError)
                    if is_gone or self.is_ending or time.monotonic() > deadline:
                        raise
                time.sleep(_RETRY_SECONDS)
        except (ConnectionFailed, ValueError, OSError) as error:
            if not self.is_ending:
                self.fail(
                    f"The connection to the job's store, on worker {self.host}, has "
                    f"ended, and worker {standby}, which has a copy, does not continue "
                    f"it: {error}."
                )
            return
        with self._sends:
            if self.is_ending or self._reason is not None:
                connection.close()
                return
            self.host, self._standby, self.connection = standby, None, connection
            self._has_ended.clear()
            with self._lock:
                waiting = list(self._waiting.values())
            for pending in waiting:
                connection.send_encoded(pending.encoded)
        self._begin_reading(connection)

    def _begin_reading(self, connection: HostConnection) -> None:
        """Handle the first messages of a new connection; watch it for later ones."""
        for message in connection.first:
            self._receive(message)
        self._hosts.watch(connection, functools.partial(self._read, connection))

    def _become_host(self) -> None:
        """Host the store in this process, the standby, if the old host has ended.

        Raises:
            ConnectionFailed: If the old host still runs, or the store has failed.
        """
        try:
            self._hosts.connect(self.host, _PROBE_SECONDS).close()
        except Refused as error:
            if not error.is_ending:
                raise
        except (ConnectionFailed, ValueError):
            pass
        else:
            raise ConnectionFailed(f"worker {self.host} runs")
        copy, self._copy = self._copy, None
        assert copy is not None
        copy.apply({"lost": [self.host]})
        with self._lock:
            # The store may have failed while the old host was probed. This process may
            # then host a later store, which must not be replaced.
            if self._reason is not None:
                raise ConnectionFailed(self._reason)
            self._hosts.host(copy)


class PendingAnswer(concurrent.futures.Future):
    """Future of the host's answer to a request, a dict.

    Args:
        number: Int, id of the request.
        encoded: Bytes, the request, sent again to the next host if this host ends.
    """

    def __init__(self, number: int, encoded: bytes) -> None:
        super().__init__()
        self.number, self.encoded = number, encoded


class Gathering:
    """All-gather in which this member has sent its text.

    Args:
        store: `Store`.
        key: String, key of the all-gather.
        pending: `PendingAnswer`, the future of the answer.
    """

    def __init__(self, store: Store, key: str, pending: PendingAnswer) -> None:
        self.key = key
        self._store, self._pending = store, pending

    def texts(
        self, timeout_seconds: float, *, may_wake: bool = True
    ) -> list[Any] | None:
        """Return all texts by rank, or `None` if some are missing at the timeout.

        In an all-gather of living members, the text of a lost one is `None`.

        Args:
            timeout_seconds: Float, the longest wait.
            may_wake: Bool, whether `Store.wake` ends the wait. Defaults to `True`.

        Raises:
            TimeoutError: If a member has ended the all-gather, with its reason.
            HostLost: If the store is lost.
        """
        futures = [self._pending, self._store.alarm] if may_wake else [self._pending]
        concurrent.futures.wait(futures, timeout_seconds, "FIRST_COMPLETED")
        if not self._pending.done():
            return None
        answer = self._pending.result()
        if "ended" in answer:
            raise TimeoutError(answer["ended"])
        return answer["texts"]

    def missing(self) -> list[int]:
        """Ask the host for the ranks of the workers whose text has not arrived.

        If the host does not answer within two seconds, the list has only the host's own
        rank. It is empty if the store is lost: the host may have sent the texts before,
        and `texts` returns them or raises `HostLost`.
        """
        try:
            pending = self._store.ask("missing", key=self.key)
            return pending.result(_ANSWER_SECONDS)["ranks"]
        except concurrent.futures.TimeoutError:
            return [self._store.host]
        except HostLost:
            return []

    def withdraw(self, reason: str = "") -> bool:
        """Withdraw this member's text, unless all texts have arrived at the host.

        If the host does not answer, the text counts as withdrawn.

        Args:
            reason: String, text of the error with which the all-gather ends on the
                other members, or `""` if they continue to wait. Defaults to `""`.

        Returns:
            Bool, `False` if all texts have arrived or the host is lost.
        """
        try:
            pending = self._store.ask("withdraw", key=self.key, reason=reason)
            if is_withdrawn := pending.result(_ANSWER_SECONDS)["is_withdrawn"]:
                self.abandon()
            return is_withdrawn
        except concurrent.futures.TimeoutError:
            self.abandon()
            return True
        except HostLost:
            return False

    def abandon(self) -> None:
        """Stop waiting for the texts; the host is not notified."""
        self._store.forget(self._pending)
