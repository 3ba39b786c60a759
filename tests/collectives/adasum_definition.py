"""Adasum as the paper defines it, in NumPy and float64.

Source: Maleki et al. 2021, https://arxiv.org/abs/2006.02924, equation 4 and figure 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Combines two gradients."""
    dot, aa, bb = np.vdot(a, b), np.vdot(a, a), np.vdot(b, b)
    of_a = 1 - dot / (2 * aa) if aa else 1.0
    of_b = 1 - dot / (2 * bb) if bb else 1.0
    return of_a * a + of_b * b


def combined(gradients: Sequence[np.ndarray]) -> np.ndarray:
    """Combines one gradient of each member, those beyond a power of two first."""
    wide = [np.asarray(gradient, np.float64) for gradient in gradients]
    core = 1 << (len(wide).bit_length() - 1)
    level = wide[:core]
    for index, extra in enumerate(wide[core:]):
        level[index] = pair(level[index], extra)
    while len(level) > 1:
        level = [pair(*level[i : i + 2]) for i in range(0, len(level), 2)]
    return level[0]


def combined_each(
    members: Sequence[Sequence[np.ndarray]],
) -> list[np.ndarray]:
    """Combines gradients of several variables, each by itself.

    Args:
        members: Sequence over the members of a sequence over the variables.
    """
    return [combined(of_variable) for of_variable in zip(*members, strict=True)]
