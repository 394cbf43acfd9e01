"""The two ways of scoring documents that `credit.py` compares, and how it counts FLOPs."""

import credit
import jax
import numpy as np
import peer_models
import pytest

from bridge_jax.models import qwen2


def test_rows_leave_no_padding_between_history_and_document():
    arrays = {
        "history": np.array([[1, 2, 0], [3, 4, 5]]),
        "history_valid": np.array([[True, True, False], [True] * 3]),
        "continuation": np.array([[[6, 7, 0], [8, 0, 0]], [[9, 0, 0], [6, 0, 0]]]),
        "continuation_valid": np.array([[[1, 1, 0], [1, 0, 0]], [[1, 0, 0], [1, 0, 0]]], bool),
        "answer_mask": np.array([[[0, 1, 0], [0, 0, 0]], [[1, 0, 0], [1, 0, 0]]], bool),
    }
    rows = credit.whole_rows(arrays)
    np.testing.assert_array_equal(rows["tokens"] * rows["valid"], [[1, 2, 6, 7], [1, 2, 8, 0], [3, 4, 5, 9], [3, 4, 5, 6]])
    np.testing.assert_array_equal(rows["answer_mask"], [[0, 0, 0, 1], [0] * 4, [0, 0, 0, 1], [0, 0, 0, 1]])


def test_all_give_the_same_likelihoods_and_the_count_is_that_of_the_products():
    config = peer_models.random_config(512)
    arrays, answer = credit.random_turn(config, 0, history=40, document=10, answer=3, documents=6)
    found = credit.run(qwen2.Qwen2(config), peer_models.random_params(config, 0), arrays, answer, rounds=1)
    assert found["max_abs_diff"] < 1e-4 < 1 < -found["smallest_l"]

    def products(rows, length, columns):  # two a multiplication; attention over all columns, causal or not
        kernels = sum(x.size for x in jax.tree.leaves(qwen2.abstract_params(config)["layers"]) if x.ndim == 3)
        return 2 * rows * length * kernels + config.num_layers * 4 * rows * length * columns * config.num_heads * config.head_dim

    head = 2 * 6 * 3 * config.hidden_size * config.vocab_size
    assert found["flops"]["independent"] == pytest.approx(products(6, 53, 53) + head, rel=0.05)
    assert found["flops"]["shared"] == pytest.approx(products(1, 40, 40) + products(6, 13, 53) + head, rel=0.05)
    assert found["flops"]["in_place"] == pytest.approx(products(6, 13, 53) + head, rel=0.05)
