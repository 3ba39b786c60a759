"""Numbers with nouns in the singular or plural, for messages."""

from __future__ import annotations


def pluralize(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with a noun in the singular or the plural.

    Args:
        number: Int.
        noun: String, the noun in the singular.
        plural: String, the noun in the plural, or `None`. Defaults to `None`: the
            singular and an s.

    Returns:
        String.

    Example:

    >>> pluralize(1, "worker"), pluralize(0, "worker"), pluralize(1024, "replica")
    ('1 worker', '0 workers', '1,024 replicas')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
