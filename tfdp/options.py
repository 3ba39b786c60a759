"""Links of a cluster: what `CommunicationOptions(links=...)` is given."""

from tfdp.ground.links import Link, Links

__all__ = ["Link", "Links"]
