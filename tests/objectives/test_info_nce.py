"""InfoNCE against torch's cross entropy, its parts against one piece, and four devices against one."""

import functools
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from virtual_devices import run_on_devices

from bridge_jax.models import e5
from bridge_jax.objectives.info_nce import PairBatch, info_nce, info_nce_gradient

B, M, D, K = 8, 3, 5, 2
CONFIG = e5.BertConfig(20, 16, 24, 1, 2, 16)


def unit(rng, *shape):
    x = rng.normal(size=shape)
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def rows_of(rng, count=B):
    """Passages of a corpus of 12 rows: some stand several times in the batch. -> (passage_rows, known)"""
    rows = rng.permuted(np.tile(np.arange(12), (count, 1)), axis=1)[:, :M].astype(np.int32)
    known = np.stack([rows[:, 0], rng.integers(-1, 12, count)], 1).astype(np.int32)
    return rows, known


def by_torch(queries, passages, rows, known, mask, temperature):
    """Row by row, the candidates picked one by one."""
    queries, passages = torch.tensor(queries, requires_grad=True), torch.tensor(passages, requires_grad=True)
    total = torch.zeros(())
    for b in np.flatnonzero(mask):
        candidates = [passages[b, 0]]
        for c in np.flatnonzero(mask):
            for m in range(M):
                if (c, m) != (b, 0) and rows[c, m] >= 0 and rows[c, m] not in known[b]:
                    candidates.append(passages[c, m])
        scores = torch.stack(candidates) @ queries[b] / temperature
        total = total + torch.nn.functional.cross_entropy(scores[None], torch.tensor([0]), reduction="sum")
    total.backward()
    return total.item(), queries.grad.numpy(), passages.grad.numpy()


def test_loss_and_gradients_are_torch_s_cross_entropy():
    rng = np.random.default_rng(0)
    queries, passages = unit(rng, B, D), unit(rng, B, M, D)
    rows, known = rows_of(rng)
    rows[2, 2], mask = -1, np.arange(B) != 5
    others = rows, known, mask

    def loss(queries, passages):
        return info_nce(queries, passages, *others, 0.1)[0]

    value, gradients = jax.value_and_grad(loss, (0, 1))(queries, passages)
    expected, *theirs = by_torch(queries, passages, *others, 0.1)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for ours, reference in zip(gradients, theirs, strict=True):
        np.testing.assert_allclose(ours, reference, atol=1e-5)
    assert not gradients[1][5].any() and not gradients[1][2, 2].any()  # rows and passages that are not there teach nothing
    assert info_nce(queries, passages, *others, 0.1)[1] == B - 1


def test_closed_form_of_equal_scores_and_a_hit():
    """All passages alike: log of the number of candidates. A query that is its passage, at a low temperature: nothing."""
    rows, known = np.arange(B * M, dtype=np.int32).reshape(B, M), np.arange(0, B * M, M, dtype=np.int32)[:, None]
    queries, same = np.tile(unit(np.random.default_rng(1), 1, D), (B, 1)), np.ones(B, bool)
    total, count, _ = info_nce(queries, np.tile(queries[:, None], (1, M, 1)), rows, known, same, 0.01)
    np.testing.assert_allclose(total / count, np.log(B * M), rtol=1e-5)
    queries = np.eye(B, dtype=np.float32)
    passages = np.concatenate([queries[:, None], np.tile(-queries[:, None], (1, M - 1, 1))], 1)
    total, _, hits = info_nce(queries, passages, rows, known, same, 0.01)
    assert total < 1e-6 and hits == B


def pair_batch(parts, seed=0):
    rng = np.random.default_rng(seed)
    rows, known = rows_of(rng)
    texts = {name: rng.integers(1, CONFIG.vocab_size, shape) for name, shape in (("query", (B, 6)), ("passage", (B, M, 8)))}
    lengths = {name: rng.integers(2, x.shape[-1] + 1, x.shape[:-1]) for name, x in texts.items()}
    fields = {}
    for name, tokens in texts.items():
        mask = np.arange(tokens.shape[-1]) < lengths[name][..., None]
        fields |= {f"{name}_tokens": np.where(mask, tokens, 0).astype(np.int32), f"{name}_mask": mask.astype(np.int32)}
    fields |= {"passage_rows": rows, "known": known, "mask": np.arange(B) != 3}
    return PairBatch(**{name: x.reshape(parts, B // parts, *x.shape[1:]) for name, x in fields.items()})


def encoder(mesh=None):
    module = e5.Bert(CONFIG, mesh=mesh)
    tokens = jnp.ones((1, 2), jnp.int32)
    return module, module.init(jax.random.key(0), tokens, tokens)["params"]


@functools.cache
def on_one_device():
    """-> (params, gradient, sums) of the batch in two parts."""
    module, params = encoder()
    return params, *jax.device_get(jax.jit(lambda p, b: info_nce_gradient(module, p, b, 0.05))(params, pair_batch(2)))


def test_parts_give_the_gradient_of_the_whole():
    """Against autodiff straight through one forward pass of all texts."""
    module, _ = encoder()
    whole = jax.tree.map(lambda x: x[0], pair_batch(1))

    def loss(params):
        queries = module.apply({"params": params}, whole.query_tokens, whole.query_mask)
        flat = (x.reshape(B * M, -1) for x in (whole.passage_tokens, whole.passage_mask))
        passages = module.apply({"params": params}, *flat).reshape(B, M, -1)
        total, count, _ = info_nce(queries, passages, whole.passage_rows, whole.known, whole.mask, 0.05)
        return total / count

    params, gradient, (total, count, _) = on_one_device()
    expected_loss, expected = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(total / count, expected_loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), gradient, expected)


SCRIPT = """
import pickle
import jax, numpy as np
from test_info_nce import encoder, pair_batch
from bridge_jax.mesh import make_mesh, shard_tree
from bridge_jax.objectives.info_nce import info_nce_gradient
from bridge_jax.training.encoder_training import place

assert jax.device_count() == 4
params, expected, sums = pickle.load(open(PATH, "rb"))
mesh = make_mesh(2, 2, 1)
module, _ = encoder(mesh)
params, batch = shard_tree(mesh, params, module.config.units), place(pair_batch(2), mesh)
assert batch.query_tokens.sharding.shard_shape((2, 4, 6)) == (2, 1, 6)
program = jax.jit(lambda p, b: info_nce_gradient(module, p, b, 0.05)).lower(params, batch).compile()
assert "all-gather" in program.as_text()
gradient, found = jax.device_get(program(params, batch))
np.testing.assert_allclose(found, sums, rtol=1e-5)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), gradient, expected)
print("same")
"""


def test_four_devices_have_each_other_s_negatives(tmp_path):
    (tmp_path / "one.pkl").write_bytes(pickle.dumps(jax.device_get(on_one_device())))
    done = run_on_devices(4, SCRIPT.replace("PATH", repr(str(tmp_path / "one.pkl"))), Path(__file__).parent)
    assert done.returncode == 0 and done.stdout.strip() == "same", done.stderr[-2000:]
