"""Tests the choice of cases: pairs of values, and those of the everyday suite."""

import itertools

import pytest

from tests.helpers.everyday import everyday
from tests.helpers.pairwise import pairwise

FACTORS = (["a", "b", "c"], [1, 2, 4], [False, True], ["x", "y"])


def pairs(cases):
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


def test_every_pair_of_values_stands_in_a_case_and_named_cases_come_first():
    every = [case for case in itertools.product(*FACTORS) if case[0] != "c" or case[1] < 4]
    first = [("b", 4, True, "y"), ("c", 1, False, "y")]
    chosen = pairwise(every, first)
    assert pairs(chosen) == pairs(every)
    assert chosen[:2] == first
    assert set(chosen) <= set(every)
    assert 8 <= len(chosen) == len(set(chosen)) < 12  # 8 pairs of letters and numbers, 32 cases
    with pytest.raises(ValueError, match="no cases"):
        pairwise(every, [("c", 4, True, "y")])


def everyday_cases(mark):
    return [case.values[0] for case in mark.args[1] if not case.marks]


def test_cases_that_are_not_named_are_slow():
    assert everyday_cases(everyday("average", [None, 0.9], keep=[None])) == [None]
    assert everyday_cases(everyday("average", [None, 0.9], keep=[0.9])) == [0.9]
    assert everyday_cases(everyday("size", [1, 2, 3], keep=["two"], ids=["one", "two", "3"])) == [2]
    with pytest.raises(ValueError, match="no cases"):
        everyday("size", [1, 2], keep=[3])
