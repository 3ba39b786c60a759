"""Contents of a store, as a sequence of changes that its host sends to the standby."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

# Change of the contents, which the host sends to the standby: a dict that JSON
# supports. Each field may be missing:
#     values: dict from a key to its new text, or to `None` if it is deleted
#     lost: list of the ranks whose connection has ended
#     answer: dict, the answer of the requests that the change completes
#     to: list of these requests: of each the rank of the member, its id, and the
#         smallest id that the member then waited for
Change: TypeAlias = dict[str, Any]


class Contents:
    """Values of a store, its lost workers, and answers that members may not have yet.

    A member that does not know whether the host has received a request sends it again
    to the next host. The kept answers prevent that a request has its effect twice.

    Attributes:
        values: Dict from a key to its text.
        lost: Set of ints, the ranks whose connection has ended.

    Example:

    >>> contents = Contents()
    >>> contents.apply({"values": {"key": "text"}, "answer": {}, "to": [[1, 7, 7]]})
    >>> contents.answer(1, 7)
    {}
    >>> copy = Contents()
    >>> for change in contents.changes():
    ...     copy.apply(change)
    >>> copy.values, copy.answer(1, 7)
    ({'key': 'text'}, {})
    """

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.lost: set[int] = set()
        # Answers by the rank of a member and the id of its request, so that a request
        # that is sent again receives the same answer and has no second effect.
        self._answers: dict[int, dict[int, dict[str, Any]]] = {}

    def apply(self, change: Change) -> None:
        """Apply a change to the values, the lost workers and the kept answers.

        Args:
            change: Dict with any of: `"values"`, from a key to its text, or to `None`
                to delete it; `"lost"`, ranks; and `"answer"` with `"to"`, a list of
                the rank, the id and the smallest awaited id of each answered request.
        """
        for key, text in change.get("values", {}).items():
            if text is None:
                self.values.pop(key, None)
            else:
                self.values[key] = text
        self.lost.update(change.get("lost", ()))
        for rank, number, oldest in change.get("to", ()):
            kept = self._answers.get(rank, {}).items()
            self._answers[rank] = {n: answer for n, answer in kept if n >= oldest}
            self._answers[rank][number] = change["answer"]

    def answer(self, rank: int, number: int) -> dict[str, Any] | None:
        """Return the answer of a request that was already served, or `None`.

        Args:
            rank: Int, rank of the member.
            number: Int, id of the request.
        """
        return self._answers.get(rank, {}).get(number)

    def changes(self) -> Iterator[Change]:
        """Yield the changes that make empty contents equal to these contents."""
        yield {"lost": sorted(self.lost)}
        for key, text in self.values.items():
            yield {"values": {key: text}}
        # All members of an all-gather have the same answer object, which is sent once,
        # in one change that lists them.
        shared: dict[int, Change] = {}
        for rank, answers in self._answers.items():
            for number, answer in answers.items():
                change = shared.setdefault(id(answer), {"answer": answer, "to": []})
                change["to"].append([rank, number, 0])
        yield from shared.values()
