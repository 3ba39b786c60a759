"""Options by which the gradients of a model's variables are reduced, once tuned."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

from tfdp.ground.options import CommunicationOptions
from tfdp.training.reduction.algorithm_selector import AlgorithmSelector


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Options in place of the strategy's, and the selector that goes with them.

    Args:
        options: `CommunicationOptions`.
        algorithm_selector: `AlgorithmSelector` of these.
        gain: String, what they have gained, or `""` where that is not known (yet).
    """

    options: CommunicationOptions
    algorithm_selector: AlgorithmSelector
    gain: str = ""


class TunedOptions:
    """Tuned options by the variables that they are for.

    A strategy may train several models, each with a plan of its own.
    """

    def __init__(self) -> None:
        self._entries: dict[frozenset[int], tuple[list[weakref.ref], Tuned]] = {}

    def set(self, variables: Sequence[Any], tuned: Tuned | None) -> None:
        """Set the options of variables, or with `None` take the strategy's again.

        Args:
            variables: Sequence of Keras variables, those of a model.
            tuned: `Tuned` or `None`.
        """
        key = frozenset(map(id, variables))
        self._entries.pop(key, None)
        if tuned is not None:
            refs = [weakref.ref(variable) for variable in variables]
            self._entries[key] = refs, tuned

    def of(self, variables: Sequence[Any]) -> Tuned | None:
        """The options of variables, all of which are of one tuned model, or `None`."""
        wanted = set(map(id, variables))
        for key, (refs, tuned) in reversed(self._entries.items()):
            if wanted <= key and all(ref() is not None for ref in refs):
                return tuned
        return None
