"""Launchers of the other nodes of a job, as the launcher of this one hears them."""

from __future__ import annotations

import dataclasses
import signal
from typing import Any

from tfdp.launch.cli.screen import Screen
from tfdp.launch.cli.worker import Worker
from tfdp.launch.rendezvous.failure import NODE_LOST
from tfdp.launch.rendezvous.member import Member


@dataclasses.dataclass(frozen=True)
class StopOrder:
    """Order to stop, since a worker of another node has failed, or a user wants it.

    Args:
        code: Int, the exit code.
        signum: Int, the signal that the workers get.
    """

    code: int
    signum: int


class OtherNodes:
    """Other nodes of a job: what they say, and what this one tells them.

    Args:
        member: `Member`, the connection to the rendezvous.
        screen: The `Screen` for what they say.

    Attributes:
        attempt: Int, the number of the attempt that runs, or 0.
        has_left: Bool, whether this node has told that it was told to end.
    """

    def __init__(self, member: Member, screen: Screen) -> None:
        self.attempt = 0
        self.has_left = False
        self._member = member
        self._screen = screen
        self._put_back: dict[str, Any] | None = None

    def fileno(self) -> int:
        """Return the descriptor that can be read when they have said something."""
        return self._member.fileno()

    def take(self) -> dict[str, Any] | None:
        """Take the next message that somebody has to act on, or return `None`."""
        message, self._put_back = self._put_back, None
        if message is not None:
            return message
        while (message := self._member.take()) is not None:
            if message.get("type") != "notice":
                return message
            self._screen.message(f"tfdp: {message.get('text')}")
        return None

    def order(self) -> StopOrder | None:
        """Return the order to stop the workers that has come, or `None`.

        The message itself stays for who looks after the attempts.
        """
        message = self.take()
        if message is None:
            return None
        self._put_back = message
        kind, code = message.get("type"), message.get("code")
        if kind == "stop" and message.get("attempt") != self.attempt:
            self._put_back = None
            return None
        signum = message.get("signal", signal.SIGTERM)
        return StopOrder(code if isinstance(code, int) else NODE_LOST, signum)

    def tell_failure(self, failed: Worker, cause: Worker) -> None:
        """Tell which worker has failed here.

        Args:
            failed: `Worker` that was seen to fail first.
            cause: `Worker` of this node that it says was lost, or the same one.
        """
        for worker in [cause, failed] if cause is not failed else [failed]:
            if worker.exit_code:
                self._member.send(worker.failure.to_message(self.attempt))

    def tell_end(self, code: int, *, has_saved: bool) -> None:
        """Tell that no worker of this node runs any more.

        Args:
            code: Int, the exit code; 0 if all workers are done.
            has_saved: Bool, whether training was saved because of a signal.
        """
        kind = "stopped" if code else "done"
        self._send(type=kind, code=code, has_saved=has_saved)

    def offer(self, ports: list[int]) -> None:
        """Tell the ports of the workers of this node."""
        self._send(type="ports", ports=ports)

    def leave(self, why: str, code: int, signum: int) -> None:
        """Tell that this node was told to end.

        Args:
            why: String, such as `"SIGINT received"`.
            code: Int, the exit code of all.
            signum: Int, the signal that the workers get.
        """
        self.has_left = True
        self._send(type="leaving", why=why, code=code, signal=int(signum))

    def _send(self, **message: Any) -> None:
        self._member.send({"attempt": self.attempt, **message})
