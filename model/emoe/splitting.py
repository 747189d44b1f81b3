"""Splits a dense feed-forward into groups of its units, and merges it again, bit for bit.

Groups consist of units with similar keys, found by balanced k-means, or are random. Keys are
normalized first, so that distances compare directions. Each round assigns the keys exactly, in a
time that grows with the cube of their number: about a second for 3,072.

Sources: Qiu et al. 2023, "Emergent mixture-of-experts", section 3.2; Malinen and Fränti 2014,
"Balanced k-means for clustering".

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

MOST_ROUNDS = 50
"""Maximum number of k-means rounds."""


def balanced_kmeans(keys_FD: Numbers, groups: int, seed: int) -> Labels:
    """Clusters keys into groups of equal size by their directions.

    Args:
        keys_FD: Finite keys.
        groups: E, which divides F.
        seed: The seed of the initial centers (k-means++).

    Returns:
        The group of each key [F], from 0.
    """
    from scipy.optimize import linear_sum_assignment
    from scipy.spatial.distance import cdist
    from sklearn.cluster import kmeans_plusplus
    from sklearn.preprocessing import normalize

    x_FD: Numbers = normalize(keys_FD.astype(np.float64))
    size = len(x_FD) // groups
    centers_ED, _ = kmeans_plusplus(x_FD, groups, random_state=seed)
    group_F = np.full(len(x_FD), -1)
    for _ in range(MOST_ROUNDS):
        cost_FF = np.repeat(cdist(x_FD, centers_ED, "sqeuclidean"), size, axis=1)
        before_F, group_F = group_F, linear_sum_assignment(cost_FF)[1] // size
        if np.array_equal(before_F, group_F):
            break
        centers_ED = np.stack([x_FD[group_F == group].mean(0) for group in range(groups)])
    return group_F


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
