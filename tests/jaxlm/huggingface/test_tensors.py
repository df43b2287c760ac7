"""Copies between layouts: the same numbers, whichever way they lie and however they are cut."""

import ml_dtypes
import numpy as np
import pytest

from jaxlm.huggingface.tensors import ROWS, copy, copy_all


@pytest.mark.parametrize("dtype, into", [("float32", "float32"), ("float64", "float32"), (ml_dtypes.bfloat16, "float32"),
                                         ("float32", ml_dtypes.bfloat16)])
@pytest.mark.parametrize("cuts", [(0, 300), (0, 100, 200, 300), (0, 7, 290, 300), (100, 200)])
def test_blocks_of_a_transpose_that_lie_side_by_side_are_copied_together(cuts, dtype, into):
    file = np.random.default_rng(0).standard_normal((333, 300)).astype(dtype)
    before = file.copy()
    blocks = [np.zeros((b - a, 333), into) for a, b in zip(cuts, cuts[1:])]
    copy_all([(block, file[:, a:b].T) for block, a, b in zip(blocks, cuts, cuts[1:])][::-1])
    assert np.array_equal(np.concatenate(blocks), file.T[cuts[0]:cuts[-1]].astype(into)) and np.array_equal(file, before)


def test_blocks_that_are_cut_both_ways_or_lie_apart_or_are_of_several_kinds():
    file = np.random.default_rng(0).standard_normal((64, 8, 40)).astype(np.float32)         # heads head_dim, embed
    view = file.transpose(2, 0, 1)
    for place in ((slice(0, 20), slice(0, 32)), (slice(5, 9), slice(60, 64))):
        both = (slice(20, 40), place[1])
        pairs = [(np.zeros_like(view[index], order="C"), view[index]) for index in (place, both, (slice(30, 35),))]
        plain = np.zeros((64, 8, 40), np.float32)
        copy_all([*pairs, (plain, file)])
        assert all(np.array_equal(target, source) for target, source in pairs) and np.array_equal(plain, file)


def test_a_transpose_with_more_rows_than_fit_the_cache():
    file = np.random.default_rng(0).standard_normal((140, 2 * ROWS + 3)).astype(np.float32)
    whole, back = np.zeros(file.shape[::-1], np.float32), np.zeros_like(file)
    copy(whole, file.T)
    copy(back.T, whole)
    assert np.array_equal(whole, file.T) and np.array_equal(back, file)
