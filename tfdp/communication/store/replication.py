"""Copy of a store's contents on a second worker, which hosts it if the host ends.

The host sends an answer that depends on a change only when the standby has the change.
So what a member has received survives the end of either machine.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping
from typing import Protocol

from tfdp.communication.connection.messages import encode
from tfdp.communication.store.contents import Change, Contents

# Answers wait for the standby's acknowledgements. If the standby sends none for this
# many seconds, another member becomes the standby.
_SLOW_SECONDS = 2.0


class Receiver(Protocol):
    """Connection of a member, to which the host sends encoded messages."""

    rank: int

    @property
    def has_output(self) -> bool:
        """Bool, whether bytes wait to be sent."""

    def send_encoded(self, text: bytes) -> object:
        """Send a message that `encode` has encoded; the result is not used."""


class Replication:
    """Keeper of a copy of the store's contents on one of the members, the standby.

    All calls are made on the thread that serves the store.

    Args:
        host: Int, rank of the worker that hosts the store.
        contents: `Contents` of the store.
        members: Mapping from the rank of each connected worker to its `Receiver`.

    Attributes:
        standby: `Receiver` of the member that has the copy or receives it, or `None`.
    """

    def __init__(
        self, host: int, contents: Contents, members: Mapping[int, Receiver]
    ) -> None:
        self.standby: Receiver | None = None
        self._host, self._contents, self._members = host, contents, members
        # Changes are numbered, so that the standby can acknowledge them. `_sent` is the
        # last change sent, `_begun` the last one before the copy, `_complete` the one
        # that completes the copy, and `_acknowledged` the last one acknowledged, or 0
        # while the copy is incomplete.
        self._sent = self._begun = self._complete = self._acknowledged = 0
        self._waits_since = 0.0
        # Answers that wait for the standby's acknowledgement, each with the number of
        # the last change on which the answer may depend.
        self._waiting: collections.deque[tuple[int, Receiver, bytes]] = (
            collections.deque()
        )
        self._slow: set[int] = set()

    @property
    def is_settled(self) -> bool:
        """Bool, whether no answer waits for the standby, and no copy is incomplete."""
        return not self._waiting and (self.standby is None or self._acknowledged > 0)

    @property
    def announcement(self) -> bytes:
        """Bytes, a message to members: which of them has a complete copy, if any."""
        holder = self.standby if self._acknowledged else None
        return encode({"standby": None if holder is None else holder.rank})

    def begin(self) -> None:
        """Choose the standby, and send it the contents.

        It is the first member by rank, except for the host and for members that have
        been slow to acknowledge changes. Without such a member there is no standby, and
        answers do not wait for a copy.
        """
        ranks = sorted(self._members.keys() - self._slow - {self._host})
        self.standby = self._members[ranks[0]] if ranks else None
        if self.standby is None:
            self._announce()
            return
        self.standby.send_encoded(encode({"copies": True}))
        self._waits_since = 0.0
        self._begun = self._sent
        self._acknowledged, self._complete = 0, self._sent + 1
        for change in self._contents.changes():
            self.send(change)
        self._complete = self._sent

    def send(self, change: Change) -> None:
        """Send a change to the standby, if there is one.

        Args:
            change: Dict, the change.
        """
        if self.standby is None:
            return
        self._sent += 1
        self._waits_since = self._waits_since or time.monotonic()
        message = {"change": change, "number": self._sent}
        self.standby.send_encoded(encode(message, is_added_to=True))

    def answer(self, member: Receiver, encoded: bytes) -> None:
        """Send an answer to a member, once the standby has all changes it depends on.

        Args:
            member: `Receiver` of the member.
            encoded: Bytes, the encoded answer.
        """
        if self.standby is None or self._may_answer(member, self.standby):
            member.send_encoded(encoded)
        else:
            self._waiting.append((self._sent, member, encoded))

    def _may_answer(self, member: Receiver, standby: Receiver) -> bool:
        """Return whether an answer can be sent now: the standby will have its changes.

        Args:
            member: `Receiver` of the answer.
            standby: `Receiver` of the copy, the present standby.
        """
        if self._acknowledged in (0, self._sent):
            return self._acknowledged > 0
        # The standby receives an answer to itself after the changes, on the same
        # connection. An answer to the host's own worker can be sent once the operating
        # system has all bytes for the standby, since it delivers them even if the
        # host's process ends.
        is_host = member.rank == self._host
        return member is standby or (is_host and not standby.has_output)

    def acknowledge(self, rank: int, number: int) -> None:
        """Record that a member has a change; send the answers that have waited for it.

        Once the standby has all of the contents, the members are notified of its rank.
        Without a standby, one is chosen.

        Args:
            rank: Int, rank of the member that has applied a change.
            number: Int, number of the change.
        """
        self._slow.discard(rank)
        if self.standby is None:
            self.begin()
        is_standby = self.standby is not None and self.standby.rank == rank
        if not is_standby or number <= self._begun:
            # The acknowledgement does not count: its member is not the standby, or its
            # change is older than the present copy.
            return
        self._waits_since = time.monotonic() if number < self._sent else 0.0
        if number < self._complete:
            return
        is_first = self._acknowledged == 0
        self._acknowledged = number
        if is_first:
            self._announce()
        self._release()

    def check(self) -> None:
        """Choose another standby if the present one acknowledges no changes for 2 s.

        `begin` sends the contents to the new standby. The slow member stays connected,
        and can be chosen again after its next acknowledgement.
        """
        waits = self._waits_since and time.monotonic() - self._waits_since
        if self.standby is not None and waits > _SLOW_SECONDS:
            self._slow.add(self.standby.rank)
            self.begin()

    def remove(self, member: Receiver) -> None:
        """Choose another standby if the standby has left.

        Args:
            member: `Receiver` of the member that has left, no longer in `members`.
        """
        if member is self.standby:
            self.begin()

    def _announce(self) -> None:
        """Notify all members which of them has a complete copy, if any.

        Without a standby, answers that have waited for one are also sent.
        """
        for member in self._members.values():
            member.send_encoded(self.announcement)
        if self.standby is None:
            self._release()

    def _release(self) -> None:
        """Send the answers that no longer have to wait for the standby.

        These are the ones whose changes it has, or all if there is no standby.
        """
        while self._waiting and (
            self.standby is None or self._waiting[0][0] <= self._acknowledged
        ):
            _, member, encoded = self._waiting.popleft()
            member.send_encoded(encoded)
