"""How a dense feed-forward is split into groups of its units, and merged again, bitwise.

Which units form a group: those with similar keys, by balanced k-means, or any. Keys are normalized
first, so that the distance is that of directions. Assignments are made by regret, and then members
of two groups change places as long as that lowers the sum of squared distances: within 0.1% of an
exact assignment, in seconds for thousands of keys.

Or those that text activates together, while the units that nearly all text activates are shared by
all tokens: `carve` and `by_activation`.

Sources: Qiu et al. 2023, "Emergent mixture-of-experts", section 3.2; Malinen and Fränti 2014,
"Balanced k-means for clustering", which assigns exactly; Pei et al. 2025, "CMoE: fast carving of
mixture-of-experts for efficient LLM inference"; 2026, "ExpertWeaver" (arXiv 2602.15521).

Shapes: U inner units, E experts or groups, F units of one expert, N tokens, A units that a token
activates most; in k-means F keys, D width.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

OF_UNITS = {
    "gate.weight": 0, "gate.bias": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1,
}  # fmt: skip
"""The axis of units of each tensor of a dense feed-forward; one that is not listed has none."""
SHARED = "shared."
"""Names of what every token goes through begin with it, and go on as the dense tensor's."""


def dense_names(*, gated: bool) -> dict[str, str]:
    """The tensor of a dense feed-forward that holds the numbers of each tensor of groups.

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


def unit_order(group_U: Tensor) -> Tensor:
    """The order of units in which those of a group stand together.

    Args:
        group_U: The group of each unit, from 0.

    Returns:
        [U], of each place the number of its unit; in a group they stay as they were.
    """
    return group_U.argsort(stable=True)


def split(name: str, dense: Tensor, unit_U: Tensor, num_experts: int) -> Tensor:
    """A tensor of groups of units.

    Args:
        name: The name of the dense tensor, as `up.weight`.
        dense: The dense tensor.
        unit_U: See `unit_order`; of the units that are in groups.
        num_experts: E.

    Returns:
        Keys or values [E, F, D], biases of units [E, F], or the output's bias [D].
    """
    if name not in OF_UNITS:
        return dense
    rows = dense.movedim(OF_UNITS[name], 0)[unit_U]
    return rows.reshape(num_experts, -1, *rows.shape[1:])


def shared_part(name: str, dense: Tensor, unit_S: Tensor) -> Tensor:
    """A tensor of what every token goes through; the output's bias, which is added once, is 0.

    Args:
        name: The name of the dense tensor, and of the tensor.
        dense: The dense tensor.
        unit_S: Its units.
    """
    if name not in OF_UNITS:
        return torch.zeros_like(dense)
    return dense.index_select(OF_UNITS[name], unit_S)


def merge(name: str, stacked: Tensor, unit_U: Tensor, shared: Tensor | None = None) -> Tensor:
    """A tensor of the dense feed-forward: what `split` and `shared_part` made theirs of.

    Args:
        name: The name of the dense tensor.
        stacked: The tensor of groups.
        unit_U: See `unit_order`; of all units, the shared ones first.
        shared: The tensor of what every token goes through; None: there is none.
    """
    if name not in OF_UNITS:
        return stacked if shared is None else stacked + shared
    rows = stacked.flatten(0, 1)
    if shared is not None:
        rows = torch.cat([shared.movedim(OF_UNITS[name], 0), rows])
    dense = torch.empty_like(rows)
    dense[unit_U] = rows
    return dense.movedim(0, OF_UNITS[name]).contiguous()


class Carved(NamedTuple):
    """The units of a feed-forward, shared and in groups."""

    unit_U: Tensor
    """[U], the number of each unit: the shared ones, then group by group."""
    member_E: Tensor
    """[E], the number of the unit that stands for each group."""


def carve(marked_NA: Tensor, num_units: int, shared: int, groups: int) -> Carved:
    """Groups units that the same tokens activate most (CMoE).

    A unit's column has a 1 for each token that marks it. The units with most ones are shared. Of
    the others those with most are the centers, and each gets as many units, at the least sum of
    absolute differences of columns. A group's unit with the column nearest to its mean one stands
    for it. The paper assigns exactly; see `assign`.

    Args:
        marked_NA: The units with the largest activation of each token.
        num_units: U.
        shared: How many units every token uses.
        groups: E, which divides the others.
    """
    tokens, most = marked_NA.shape
    column_UN = torch.zeros(num_units, tokens)
    column_UN[marked_NA.flatten(), torch.arange(tokens).repeat_interleave(most)] = 1
    count_U = column_UN.sum(1)
    order_U = count_U.argsort(descending=True, stable=True)
    shared_S, rest_R = order_U[:shared].sort().values, order_U[shared:].sort().values
    center_EN = column_UN[order_U[shared : shared + groups]]
    rest_RN = column_UN[rest_R]
    cost_RE = _differences(rest_RN, center_EN)
    size = len(rest_R) // groups
    group_R = torch.from_numpy(assign(cost_RE.double().numpy(), size))
    in_group_EF = group_R.argsort(stable=True).view(groups, size)
    mean_EN = torch.stack([rest_RN[member_F].mean(0) for member_F in in_group_EF])
    far_EF = _differences(rest_RN, mean_EN).T.gather(1, in_group_EF)
    nearest_E = in_group_EF.gather(1, far_EF.argmin(1, keepdim=True)).squeeze(1)
    return Carved(torch.cat([shared_S, rest_R[in_group_EF.flatten()]]), rest_R[nearest_E])


def _differences(column_UN: Tensor, center_EN: Tensor) -> Tensor:
    """Sums of absolute differences [U, E] of columns of 0 and 1, and centers between them."""
    return center_EN.sum(1) + column_UN.sum(1, keepdim=True) - 2 * column_UN @ center_EN.T


def by_activation(mean_SU: Tensor, shared: int, groups: int, seed: int) -> Tensor:
    """Groups units by what samples of text activate them, and shares the most active ones.

    Args:
        mean_SU: The mean activation of each unit in each sample.
        shared: How many units every token uses: those with the largest mean magnitude.
        groups: E, which divides the others.
        seed: The seed of the clustering.

    Returns:
        [U], the number of each unit: the shared ones, then group by group.
    """
    order_U = mean_SU.abs().mean(0).argsort(descending=True, stable=True)
    shared_S, rest_R = order_U[:shared].sort().values, order_U[shared:].sort().values
    group_R = balanced_kmeans(mean_SU[:, rest_R].T.double().numpy(), groups, seed)
    return torch.cat([shared_S, rest_R[unit_order(torch.from_numpy(group_R))]])


Numbers: TypeAlias = NDArray[np.float64]
Labels: TypeAlias = NDArray[np.int64]

MOST_ROUNDS, MOST_SWEEPS = 50, 30
"""At most so many rounds of k-means, and sweeps of exchanges within a round."""
SMALLEST_GAIN = 1e-7
"""Share of the objective: with less than this a round is the last one."""


def balanced_kmeans(keys_FD: Numbers, groups: int, seed: int) -> Labels:
    """Clusters keys into groups of equal size by their directions.

    Args:
        keys_FD: Finite.
        groups: E, which divides F.
        seed: The seed of the first centers (k-means++).

    Returns:
        The group of each key [F], from 0.
    """
    x_FD = normalized(keys_FD)
    size = len(x_FD) // groups
    centers_ED = _first_centers(x_FD, groups, np.random.default_rng(seed))
    best_F, least = np.zeros(len(x_FD), dtype=np.int64), np.inf
    for _ in range(MOST_ROUNDS):
        group_F = assign(squared_distances(x_FD, centers_ED), size)
        centers_ED = np.stack([x_FD[group_F == group].mean(0) for group in range(groups)])
        gain = least - (now := objective(x_FD, group_F))
        if gain > 0:  # an assignment that is not exact may also lose
            best_F, least = group_F, now
        if gain <= SMALLEST_GAIN * now:
            break
    return best_F


def random_groups(num_keys: int, groups: int, seed: int) -> Labels:
    """Groups of equal size by chance.

    Args:
        num_keys: F.
        groups: E, which divides F.
        seed: The seed of the grouping.

    Returns:
        The group of each key [F], from 0.
    """
    return np.random.default_rng(seed).permutation(np.arange(num_keys, dtype=np.int64) % groups)


def normalized(keys_FD: Numbers) -> Numbers:
    """Keys of length 1; those of length 0 stay."""
    keys_FD = keys_FD.astype(np.float64)
    lengths_F1: Numbers = np.linalg.norm(keys_FD, axis=1, keepdims=True)
    lengths_F1[lengths_F1 == 0] = 1
    return keys_FD / lengths_F1


def objective(x_FD: Numbers, group_F: Labels) -> float:
    """The sum of squared distances of keys to the means of their groups."""
    means_ED = np.stack([x_FD[group_F == group].mean(0) for group in range(group_F.max() + 1)])
    return float(((x_FD - means_ED[group_F]) ** 2).sum())


def squared_distances(x_FD: Numbers, centers_ED: Numbers) -> Numbers:
    """[F, E]."""
    squares_FE = (x_FD**2).sum(1)[:, None] + (centers_ED**2).sum(1)
    distances_FE: Numbers = np.maximum(squares_FE - 2 * x_FD @ centers_ED.T, 0)
    return distances_FE


def _first_centers(x_FD: Numbers, groups: int, generator: np.random.Generator) -> Numbers:
    """k-means++: each center is a key, likelier the farther it is from those before it."""
    chosen = [int(generator.integers(len(x_FD)))]
    nearest_F = squared_distances(x_FD, x_FD[chosen])[:, 0]
    while len(chosen) < groups:
        total = nearest_F.sum()
        chance_F = nearest_F / total if total > 0 else None  # None: all keys are alike
        chosen.append(int(generator.choice(len(x_FD), p=chance_F)))
        nearest_F = np.minimum(nearest_F, squared_distances(x_FD, x_FD[chosen[-1:]])[:, 0])
    return x_FD[chosen]


def assign(cost_FE: Numbers, size: int) -> Labels:
    """Gives each group as many keys, at a low total cost.

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
    for key in np.argsort(two_F2[:, 0] - two_F2[:, 1], kind="stable"):  # who has most to lose first
        group = next(group for group in preferred_FE[key] if room_E[group])
        group_F[key], room_E[group] = group, room_E[group] - 1
    for _ in range(MOST_SWEEPS):
        if not _exchange(cost_FE, group_F):
            break
    return group_F


def _exchange(cost_FE: Numbers, group_F: Labels) -> bool:
    """Has pairs of groups exchange the two keys that gain most, in place.

    Returns:
        Whether any did.
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
