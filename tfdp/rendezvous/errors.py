"""Errors of the rendezvous, each with one sentence for the user."""

from __future__ import annotations


class RendezvousError(Exception):
    """A node cannot take part; the text says why and what to do."""


class MalformedMessage(Exception):
    """Something was received that no node of the job sends; nothing of it is used."""


class Lost(Exception):
    """A connection to a node of the job has ended; the text says how."""
