"""Errors of the rendezvous, each with one sentence for the user."""

from __future__ import annotations


class RendezvousError(Exception):
    """A node cannot take part; the text says why and what to do."""


class Stranger(Exception):
    """Who is connected is not of this job; nothing of it is believed.

    Args:
        reason: String. Defaults to that it does not speak as a node does.
    """

    def __init__(self, reason: str = "it sends what is no message") -> None:
        super().__init__(reason)


class Lost(Exception):
    """A connection to a node of the job has ended; the text says how."""
