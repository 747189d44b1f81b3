"""Splits a dense feed-forward into groups of its units, and merges it again, bit for bit.

Groups consist of units with similar keys, found by balanced k-means, or are random. Keys are
normalized first, so that distances compare directions. Keys are assigned by regret; then pairs of
groups swap members as long as that lowers the sum of squared distances. The result is within 0.1%
of an exact assignment, and takes seconds for thousands of keys.

Sources: Qiu et al. 2023, "Emergent mixture-of-experts", section 3.2; Malinen and Fränti 2014,
"Balanced k-means for clustering", which assigns exactly.

Shapes: U inner units, E experts or groups, F units of one expert; in k-means F keys, D width.
"""

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

OF_UNITS = {
    "gate.weight": 0, "gate.bias": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1,
}  # fmt: skip
"""The unit axis of each tensor of a dense feed-forward; tensors not listed have none."""


def dense_names(*, gated: bool) -> dict[str, str]:
    """Maps the tensors of groups to the dense tensors that hold the same values.

    Args:
        gated: Whether it has a gate.
    """
    keys, others = ("gate", {"experts.linear": "up.weight", "experts.linear_bias": "up.bias"})
    if not gated:
        keys, others = "up", {}
    return others | {
        "experts.keys": f"{keys}.weight",
        "experts.bias": f"{keys}.bias",
        "experts.values": "down.weight",
        "output_bias": "down.bias",
    }


def split(name: str, dense: Tensor, unit_U: Tensor, num_experts: int) -> Tensor:
    """Makes a tensor of unit groups.

    Args:
        name: The name of the dense tensor, such as `up.weight`.
        dense: The dense tensor.
        unit_U: The unit at each position, group by group: a stable argsort of the group of each.
        num_experts: E.

    Returns:
        Keys or values [E, F, D], unit biases [E, F], or the output bias [D].
    """
    if name not in OF_UNITS:
        return dense
    rows = dense.movedim(OF_UNITS[name], 0)[unit_U]
    return rows.reshape(num_experts, -1, *rows.shape[1:])


def merge(name: str, stacked: Tensor, unit_U: Tensor) -> Tensor:
    """Makes a tensor of the dense feed-forward; the inverse of `split`.

    Args:
        name: The name of the dense tensor.
        stacked: The tensor of groups.
        unit_U: See `split`.
    """
    if name not in OF_UNITS:
        return stacked
    rows = stacked.flatten(0, 1)
    dense = torch.empty_like(rows)
    dense[unit_U] = rows
    return dense.movedim(0, OF_UNITS[name]).contiguous()


Numbers: TypeAlias = NDArray[np.float64]
Labels: TypeAlias = NDArray[np.int64]

MOST_ROUNDS, MOST_SWEEPS = 50, 30
"""Maximum number of k-means rounds, and of swap sweeps within a round."""
SMALLEST_GAIN = 1e-7
"""Relative improvement of the objective below which the rounds stop."""


def balanced_kmeans(keys_FD: Numbers, groups: int, seed: int) -> Labels:
    """Clusters keys into groups of equal size by their directions.

    Args:
        keys_FD: Finite keys.
        groups: E, which divides F.
        seed: The seed of the initial centers (k-means++).

    Returns:
        The group of each key [F], from 0.
    """
    from scipy.spatial.distance import cdist
    from sklearn.cluster import kmeans_plusplus
    from sklearn.preprocessing import normalize

    x_FD: Numbers = normalize(keys_FD.astype(np.float64))
    size = len(x_FD) // groups
    centers_ED, _ = kmeans_plusplus(x_FD, groups, random_state=seed)
    best_F, least = np.zeros(len(x_FD), dtype=np.int64), np.inf
    for _ in range(MOST_ROUNDS):
        group_F = assign(cdist(x_FD, centers_ED, "sqeuclidean"), size)
        centers_ED = np.stack([x_FD[group_F == group].mean(0) for group in range(groups)])
        gain = least - (now := objective(x_FD, group_F))
        if gain > 0:  # an inexact assignment may also be worse
            best_F, least = group_F, now
        if gain <= SMALLEST_GAIN * now:
            break
    return best_F


def random_groups(num_keys: int, groups: int, seed: int) -> Labels:
    """Divides keys into random groups of equal size.

    Args:
        num_keys: F.
        groups: E, which divides F.
        seed: The seed of the grouping.

    Returns:
        The group of each key [F], from 0.
    """
    return np.random.default_rng(seed).permutation(np.arange(num_keys, dtype=np.int64) % groups)


def objective(x_FD: Numbers, group_F: Labels) -> float:
    """Returns the sum of squared distances of keys to the means of their groups."""
    means_ED = np.stack([x_FD[group_F == group].mean(0) for group in range(group_F.max() + 1)])
    return float(((x_FD - means_ED[group_F]) ** 2).sum())


def assign(cost_FE: Numbers, size: int) -> Labels:
    """Assigns equally many keys to each group, at a low total cost.

    Args:
        cost_FE: The cost of each key in each group.
        size: Keys of a group, F / E.

    Returns:
        The group of each key [F].
    """
    keys, groups = cost_FE.shape
    room_E = np.full(groups, size)
    group_F = np.zeros(keys, dtype=np.int64)
    if groups == 1:
        return group_F
    preferred_FE = np.argsort(cost_FE, axis=1, kind="stable")
    two_F2 = np.partition(cost_FE, 1, axis=1)[:, :2]
    for key in np.argsort(two_F2[:, 0] - two_F2[:, 1], kind="stable"):  # largest regret first
        group = next(group for group in preferred_FE[key] if room_E[group])
        group_F[key], room_E[group] = group, room_E[group] - 1
    for _ in range(MOST_SWEEPS):
        if not _exchange(cost_FE, group_F):
            break
    return group_F


def _exchange(cost_FE: Numbers, group_F: Labels) -> bool:
    """Swaps keys between pairs of groups where that gains most, in place.

    Returns:
        Whether any were swapped.
    """
    keys, groups = cost_FE.shape
    gain_FE = cost_FE[np.arange(keys), group_F][:, None] - cost_FE
    best_EE = np.full((groups, groups), -np.inf)  # from row to column
    who_EE = np.zeros((groups, groups), dtype=np.int64)
    for group in range(groups):
        members = np.flatnonzero(group_F == group)
        first_E = gain_FE[members].argmax(0)
        best_EE[group] = gain_FE[members][first_E, np.arange(groups)]
        who_EE[group] = members[first_E]
    both_EE = np.triu(best_EE + best_EE.T, 1)
    busy: set[int] = set()
    for place in np.argsort(-both_EE, axis=None):
        one, other = divmod(int(place), groups)
        if both_EE[one, other] <= 1e-9:
            break
        if one not in busy and other not in busy:
            busy |= {one, other}
            group_F[who_EE[one, other]], group_F[who_EE[other, one]] = other, one
    return bool(busy)
