"""Descriptions of a cluster's links, for `CommunicationOptions(links=...)`."""

from tfdp.ground.links import Link, Links

__all__ = ["Link", "Links"]
