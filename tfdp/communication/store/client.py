"""Connection of a member to the store of its job."""

from __future__ import annotations

import concurrent.futures
import itertools
import socket
import threading
from collections.abc import Callable
from typing import Any

from tfdp.communication.connection.handshake import NO_SIGNAL, ConnectionFailed
from tfdp.communication.store.messages import Decoder, encode

_RECEIVE_BYTES = 1 << 16
# Longest wait of an all-gather for what the host knows of it, in seconds.
_ANSWER_SECONDS = 2.0


class HostLost(ConnectionError):
    """Error: the process that hosts the job's store has ended, or was not reached."""


class Store:
    """Store of a job, as one of its members uses it; any thread may call.

    Args:
        sock: `socket.socket`, connected to the server, after the handshake.
        host: Int, rank of the worker that hosts the store.

    Raises:
        ConnectionFailed: If the server refuses this end.

    Attributes:
        news: Callable, receives news of workers that the host sends unasked, a dict;
            called on the thread that reads the connection.
        lost: Callable, called on that thread once the connection has ended.
    """

    def __init__(self, sock: socket.socket, host: int) -> None:
        self.sock, self.host = sock, host
        self.fileno, self.close = sock.fileno, sock.close
        self._await_admission()
        sock.settimeout(None)
        self.news: Callable[[dict[str, Any]], None] = lambda news: None
        self.lost: Callable[[], None] = lambda: None
        self._numbers = itertools.count(1)
        self._prefixes = itertools.count()
        self._lock = threading.Lock()
        self._sends = threading.Lock()
        self._waiting: dict[int, concurrent.futures.Future] = {}
        # Why the store is lost, or `None`.
        self._reason: str | None = None

    def _await_admission(self) -> None:
        """Receive the server's first message, by which it admits or refuses this end.

        Raises:
            ConnectionFailed: If it refuses this end, or has ended.
        """
        self._decoder = Decoder()
        messages: list[dict[str, Any]] = []
        while not messages:
            try:
                received = self.sock.recv(_RECEIVE_BYTES)
                messages = self._decoder.feed(received)
            except (OSError, ValueError) as error:
                raise ConnectionFailed(str(error)) from error
            if not received:
                raise ConnectionFailed("it closed the connection")
        if reason := messages[0]["refused"]:
            raise ConnectionFailed(reason)

    def new_prefix(self) -> str:
        """Return a new prefix of keys; all members call this in the same order."""
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
        asked = self.ask("get", key=key)
        try:
            return asked.result(timeout_seconds)["text"]
        except concurrent.futures.TimeoutError:
            self.ask("cancel", get=asked.number).result()
            if asked.done():  # the text came meanwhile
                return asked.result()["text"]
            self._forget(asked)
            raise TimeoutError(key) from None

    def delete(self, key: str) -> None:
        """Delete a key and its text, if it has one.

        Args:
            key: String, the key.
        """
        self.ask("delete", key=key).result()

    def gather(self, key: str, text: str) -> Gathering:
        """Send this member's text to an all-gather.

        Args:
            key: String, key of the all-gather, equal on all members.
            text: String, text of this member.

        Returns:
            `Gathering`, which has all texts once each member has sent its own.
        """
        return Gathering(self, key, self.ask("gather", key=key, text=text))

    def beat(
        self, text: str, *, is_notable: bool, is_news: bool, wants_all: bool
    ) -> dict[str, Any]:
        """Send a heartbeat, and receive what is known of the workers.

        Args:
            text: String, what this worker reports.
            is_notable: Bool, whether all workers receive it with their next heartbeat.
            is_news: Bool, whether all workers receive it now.
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

    def receive(self) -> bool:
        """Read what the server has sent; called on the acceptor's thread.

        Returns:
            Bool, false at the end of the connection.
        """
        try:
            received = self.sock.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
            messages = self._decoder.feed(received)
        except BlockingIOError:
            return True
        except (OSError, ValueError):
            received, messages = b"", []
        for message in messages:
            if "news" in message:
                self.news(message["news"])
            else:
                self._settle(message)
        if not received:
            self.fail()
            self.lost()
        return bool(received)

    def fail(self, reason: str = "") -> None:
        """Let all calls that wait, and all later ones, raise `HostLost`.

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

    def ask(self, kind: str, **request: Any) -> Asked:
        """Send a request, and return the future of its answer.

        Args:
            kind: String, what to do; see `Server`.
            **request: Fields of the request, which JSON supports.

        Raises:
            HostLost: If the store is lost.
            MessageTooLong: If the request exceeds the limit.
        """
        asked = Asked(next(self._numbers))
        encoded = encode({"id": asked.number, "do": kind, **request})
        with self._lock:
            if self._reason is not None:
                raise HostLost(self._reason)
            self._waiting[asked.number] = asked
        try:
            with self._sends:
                self.sock.sendall(encoded, NO_SIGNAL)
        except OSError:
            self.fail()
        return asked

    def _settle(self, answer: dict[str, Any]) -> None:
        """Pass an answer to the call that waits for it."""
        with self._lock:
            future = self._waiting.pop(answer["id"], None)
        if future is not None:
            future.set_result(answer)

    def _forget(self, asked: Asked) -> None:
        """Forget a request that is not waited for any more."""
        with self._lock:
            self._waiting.pop(asked.number, None)


class Asked(concurrent.futures.Future):
    """Future of the answer to a request.

    Args:
        number: Int, id of the request.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class Gathering:
    """All-gather in which this member has sent its text.

    Args:
        store: `Store`.
        key: String, key of the all-gather.
        asked: Future of the answer.
    """

    def __init__(self, store: Store, key: str, asked: Asked) -> None:
        self.key = key
        self._store, self._asked = store, asked

    def texts(self, timeout_seconds: float) -> list[str] | None:
        """Return all texts by rank, or `None` if some are missing for so long.

        Args:
            timeout_seconds: Float, the longest wait.

        Raises:
            TimeoutError: If a member has ended the all-gather, with its reason.
            HostLost: If the store is lost.
        """
        try:
            answer = self._asked.result(timeout_seconds)
        except concurrent.futures.TimeoutError:
            return None
        if "ended" in answer:
            raise TimeoutError(answer["ended"])
        return answer["texts"]

    def missing(self) -> list[int]:
        """Return the ranks whose text has not arrived; none if the host is lost.

        The host may end right after its answer, which `texts` then returns. While the
        host does not answer, it is what is missing.
        """
        try:
            asked = self._store.ask("missing", key=self.key)
            return asked.result(_ANSWER_SECONDS)["ranks"]
        except concurrent.futures.TimeoutError:
            return [self._store.host]
        except HostLost:
            return []

    def withdraw(self, reason: str = "") -> bool:
        """Take the text back; return false if all have arrived, or the host is lost.

        While the host does not answer, this member does not wait for it.

        Args:
            reason: String, text of the error by which the all-gather ends for the other
                members, or `""` if they continue to wait. Defaults to `""`.
        """
        try:
            asked = self._store.ask("withdraw", key=self.key, reason=reason)
            return asked.result(_ANSWER_SECONDS)["is_withdrawn"]
        except concurrent.futures.TimeoutError:
            return True
        except HostLost:
            return False
