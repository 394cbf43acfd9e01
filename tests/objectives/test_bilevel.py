"""The BRIDGE step on tiny real models: what moves, what must not, and that batching and compilation change nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_world import cut, jitted_logps, make_batch, make_encoder, make_policy, nudged

from bridge_jax.models import qwen2
from bridge_jax.objectives.bilevel import (
    Batch,
    Frozen,
    Modules,
    OptimizerConfig,
    StepConfig,
    guarded_update,
    init_state,
    make_optimizer,
    make_optimizers,
    make_step,
    policy_update,
    retriever_update,
)
from bridge_jax.objectives.grpo import GRPOConfig, displacement_guard, policy_loss
from bridge_jax.objectives.logprobs import token_logps
from bridge_jax.objectives.rag import RetrieverLossConfig

CONFIG = StepConfig(
    grpo=GRPOConfig(kl_coef=0.01),
    policy_optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.01, warmup=2),
    retriever=RetrieverLossConfig(gamma=0.1),
    retriever_optimizer=OptimizerConfig(lr=1e-2),
    turn_minibatch=4,
)


def world(config=CONFIG):
    """(modules, frozen, fresh-state function, batch); log-probs of the batch are those of the state's policy."""
    return _world(config)


@functools.cache
def _world(config):
    model, params, adapter = make_policy(lora=config.trainable == "lora")
    encoder, encoder_params, eta = make_encoder()
    policy = params if adapter is None else nudged(adapter, 7)
    modules = Modules(model, encoder, *make_optimizers(config))
    variables = {"params": params} if adapter is None else {"params": params, "lora": policy}
    batch = make_batch(model, variables)

    def fresh():
        # copies: a compiled step takes its state's buffers over
        return init_state(modules, *jax.tree.map(jnp.array, (policy, nudged(eta, 8))), jax.random.key(4))

    return modules, Frozen(params, encoder_params), fresh, batch


compiled = functools.cache(make_step)


def run(config=CONFIG, batch=None, state=None, **sizes):
    modules, frozen, fresh, default = world(config)
    batch = default if batch is None else batch
    step = compiled(config, modules)
    return step(frozen, fresh() if state is None else state, Batch(cut(batch.rollouts, **sizes), batch.turns))


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def replaced(batch, rollouts=None, turns=None):
    return Batch(batch.rollouts.replace(**rollouts or {}), batch.turns.replace(**turns or {}))


METRICS = {
    "policy/loss policy/kl policy/entropy policy/grad_norm policy/clip_fraction policy/dual_clip_fraction policy/skipped_updates "
    "policy/likelihood_displacement policy/likelihood_displacement_ref gap/logp_mean gap/logp_max retriever/loss retriever/rag_nll "
    "retriever/grad_norm retriever/drift retriever/skipped_updates credit/weight_max credit/p_entropy credit/zero_advantage_turns"
}


def test_a_step_moves_both_levels_and_says_so():
    _, _, fresh, _ = world()
    state, metrics = run()
    before = fresh()
    assert state.step == 1
    assert not same(state.policy, before.policy)
    assert not same(state.retriever, before.retriever)
    assert set(metrics) == set(" ".join(METRICS).split())
    assert all(np.isfinite(v) and v.shape == () for v in metrics.values())
    assert metrics["policy/grad_norm"] > 0
    assert metrics["retriever/grad_norm"] > 0
    assert metrics["retriever/drift"] > 0
    assert metrics["gap/logp_mean"] < 2e-6  # the trainer's log-probs are the sampler's
    assert metrics["gap/logp_max"] < 2e-5
    assert 0 < metrics["credit/weight_max"] <= 1
    # one program, whatever the numbers
    state, _ = run(state=state, batch=make_batch(*policy_and_variables(), seed=3))
    assert state.step == 2
    assert compiled(CONFIG, world()[0])._cache_size() == 1


def policy_and_variables():
    modules, frozen, fresh, _ = world()
    return modules.policy, {"params": frozen.policy, "lora": fresh().policy}


def test_the_step_is_deterministic():
    (a, m), (b, n) = run(), run()
    assert same((a.policy, a.retriever, m), (b.policy, b.retriever, n))


def test_vt_search_leaves_the_retriever_alone_and_the_policy_as_bridge_has_it():
    config = dataclasses.replace(CONFIG, retriever=None)
    modules, frozen, fresh, batch = world()
    state, metrics = compiled(config, modules)(frozen, fresh(), Batch(cut(batch.rollouts)))
    assert same(state.retriever, fresh().retriever)
    assert not any(name.startswith(("retriever/", "credit/")) for name in metrics)
    bridge, _ = run()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), state.policy, bridge.policy)


def test_zero_advantages_move_the_policy_by_the_kl_alone():
    _, _, fresh, batch = world()
    free = dataclasses.replace(CONFIG, grpo=GRPOConfig(kl_coef=0.0), policy_optimizer=OptimizerConfig(lr=1e-2))
    zero = replaced(batch, {"advantages": jnp.zeros(8)}, {"advantages": jnp.zeros(8)})
    modules, frozen, _, _ = world()
    modules = dataclasses.replace(modules, policy_optimizer=make_optimizer(free.policy_optimizer))
    start = init_state(modules, fresh().policy, fresh().retriever, jax.random.key(4))
    state, metrics = compiled(free, modules)(frozen, jax.tree.map(jnp.array, start), Batch(cut(zero.rollouts), zero.turns))
    assert metrics["policy/grad_norm"] == 0.0
    assert same(state.policy, fresh().policy)
    assert not same(state.retriever, fresh().retriever)  # the RAG term still trains the retriever
    assert metrics["credit/zero_advantage_turns"] == 1.0

    state, metrics = run(batch=zero)
    assert metrics["policy/grad_norm"] > 0  # the KL
    assert not same(state.policy, fresh().policy)


def gradient(config, batch, policy=None, microbatch=2):
    """The gradient of the policy loss, read off one plain gradient-descent step of size 1 on a whole-batch minibatch."""
    modules, frozen, fresh, _ = world(config)
    modules = dataclasses.replace(modules, policy_optimizer=optax.sgd(1.0))
    policy = fresh().policy if policy is None else policy
    update = jax.jit(lambda p, r: policy_update(config, modules, frozen.policy, p, modules.policy_optimizer.init(p), r))
    new, _, metrics = update(policy, cut(batch.rollouts, 8, microbatch))
    return jax.tree.map(jnp.subtract, policy, new), metrics


def test_observation_tokens_get_no_gradient():
    modules, frozen, fresh, batch = world()
    rows, model = batch.rollouts, modules.policy
    variables = {"params": frozen.policy, "lora": fresh().policy}

    @jax.jit
    def loss_gradient(labels):
        def loss(policy):
            hidden = model.apply(
                variables | {"lora": policy}, rows.tokens, positions=rows.positions, segment_ids=rows.segment_ids, output="hidden"
            )
            logp, entropy = token_logps(hidden[:, :-1], lambda x: qwen2.unembed(frozen.policy, x, model.config), labels[:, 1:])
            old, mask = rows.old_logps[:, 1:], rows.mask[:, 1:]
            return policy_loss(logp, old, old, rows.advantages, mask, CONFIG.grpo, entropy)[0]

        return jax.grad(loss)(variables["lora"])

    base = loss_gradient(rows.tokens)
    assert same(loss_gradient(jnp.where(rows.mask, rows.tokens, (rows.tokens + 17) % 64)), base)
    assert not same(loss_gradient(jnp.where(rows.mask, (rows.tokens + 17) % 64, rows.tokens)), base)


def test_a_last_observation_and_unmasked_junk_change_nothing():
    _, _, _, batch = world()
    rows = batch.rollouts
    tail = jnp.arange(20) >= 17  # the rollouts end in an observation nobody answers
    rows = rows.replace(mask=rows.mask & ~tail)
    base, _ = run(batch=Batch(rows, batch.turns))
    junk = rows.replace(
        tokens=jnp.where(tail, 1, rows.tokens),
        old_logps=jnp.where(rows.mask, rows.old_logps, jnp.nan),
    )
    got, _ = run(batch=Batch(junk, batch.turns))
    assert same(got.policy, base.policy)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean"])
def test_micro_batches_are_the_whole_batch(aggregation):
    config = dataclasses.replace(CONFIG, grpo=GRPOConfig(kl_coef=0.01, aggregation=aggregation))
    _, _, _, batch = world()
    whole, metrics = gradient(config, batch, microbatch=8)
    parts, metrics_parts = gradient(config, batch, microbatch=2)
    size = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(whole))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5 * size), whole, parts)
    for name in metrics:
        assert metrics[name] == pytest.approx(float(metrics_parts[name]), rel=1e-4, abs=2e-5)


def test_the_displacement_guard_in_micro_batches_is_that_of_the_whole_batch():
    """It divides by the tokens that fell in the whole minibatch: unequal parts must not be averaged."""
    config = dataclasses.replace(CONFIG, grpo=GRPOConfig(kl_coef=0.0, aggregation="seq_mean", llds=0.7))
    modules, frozen, fresh, batch = world(config)
    shift = 0.3 * jax.random.normal(jax.random.key(11), batch.rollouts.mask.shape)
    batch = replaced(batch, {"old_logps": jnp.where(batch.rollouts.mask, batch.rollouts.old_logps + shift, 0.0)})
    rows = batch.rollouts

    @jax.jit
    def expected(policy):
        logp, _ = jitted_logps(
            modules.policy,
            {"params": frozen.policy, "lora": policy},
            rows.tokens,
            positions=rows.positions,
            segment_ids=rows.segment_ids,
        )
        total, count, _ = policy_loss(logp, rows.old_logps, None, rows.advantages, rows.mask, config.grpo)
        fall, fallen = displacement_guard(logp, rows.old_logps, rows.advantages, rows.mask, config.grpo)
        return total / count + 0.7 * fall / fallen, fall / fallen

    (loss, fall), whole = jax.value_and_grad(expected, has_aux=True)(fresh().policy)
    size = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(whole))
    for microbatch in (8, 2):
        parts, metrics = gradient(config, batch, microbatch=microbatch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5 * size), whole, parts)
        assert metrics["policy/llds"] == pytest.approx(float(fall), rel=1e-4)
        assert metrics["policy/loss"] == pytest.approx(float(loss), rel=1e-4, abs=1e-5)
    plain, metrics = gradient(dataclasses.replace(config, grpo=dataclasses.replace(config.grpo, llds=0.0)), batch)
    assert "policy/llds" not in metrics and not same(plain, whole)


def test_minibatches_are_successive_optimiser_steps():
    """Two minibatches of 4 rows equal two updates of a loop written by hand with optax."""
    modules, frozen, fresh, batch = world()
    policy, opt_state = fresh().policy, fresh().policy_opt
    for half in (slice(0, 4), slice(4, 8)):
        rows = jax.tree.map(lambda x, half=half: x[half], batch.rollouts)

        def loss(policy, rows=rows):
            args = {"positions": rows.positions, "segment_ids": rows.segment_ids}
            logp, _ = jitted_logps(modules.policy, {"params": frozen.policy, "lora": policy}, rows.tokens, **args)
            ref, _ = jitted_logps(modules.policy, {"params": frozen.policy}, rows.tokens, **args)
            total, count, _ = policy_loss(logp, rows.old_logps, ref, rows.advantages, rows.mask, CONFIG.grpo)
            return total / count

        updates, opt_state = modules.policy_optimizer.update(jax.grad(loss)(policy), opt_state, policy)
        policy = optax.apply_updates(policy, updates)
    state, _ = run()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), state.policy, policy)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    _, _, fresh, batch = world()
    bad = replaced(batch, {"old_logps": batch.rollouts.old_logps.at[1, 6].set(jnp.nan)})
    assert bad.rollouts.mask[1, 6]
    state, metrics = run(batch=bad)
    assert metrics["policy/skipped_updates"] == 1  # the first minibatch; the second went through
    assert not same(state.policy, fresh().policy)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.policy, state.policy_opt)))
    assert metrics["retriever/skipped_updates"] == 0

    bad = replaced(batch, turns={"log_likelihood": batch.turns.log_likelihood.at[:, 2].set(jnp.nan)})
    state, metrics = run(batch=bad)
    assert metrics["retriever/skipped_updates"] == 2
    assert same(state.retriever, fresh().retriever)
    assert metrics["policy/skipped_updates"] == 0


def test_nothing_to_learn_from_moves_nothing():
    _, _, fresh, batch = world()
    empty = replaced(batch, {"mask": jnp.zeros_like(batch.rollouts.mask)}, {"mask": jnp.zeros(8, bool)})
    state, metrics = run(batch=empty)
    assert same((state.policy, state.retriever), (fresh().policy, fresh().retriever))
    assert all(np.isfinite(v) for v in metrics.values())
    assert metrics["policy/skipped_updates"] == metrics["retriever/skipped_updates"] == 0


def test_full_training_and_its_reference():
    config = dataclasses.replace(CONFIG, trainable="full")
    modules, frozen, fresh, batch = world(config)
    state, metrics = run(config, minibatch=8, microbatch=4)
    assert not same(state.policy, fresh().policy)
    assert metrics["policy/kl"] == pytest.approx(0.0, abs=1e-6)  # the policy starts as the reference
    logps, _ = jitted_logps(
        modules.policy,
        {"params": frozen.policy},
        batch.rollouts.tokens,
        positions=batch.rollouts.positions,
        segment_ids=batch.rollouts.segment_ids,
    )
    given, _ = run(config, replaced(batch, {"ref_logps": logps}), minibatch=8, microbatch=4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), given.policy, state.policy)


def test_a_fresh_adapter_is_its_own_reference():
    modules, frozen, _, _ = world()
    _, _, adapter = make_policy()
    batch = make_batch(modules.policy, {"params": frozen.policy})
    _, metrics = gradient(CONFIG, batch, adapter)
    assert metrics["policy/kl"] == pytest.approx(0.0, abs=1e-7)
    assert metrics["gap/logp_max"] < 1e-5
    assert metrics["policy/clip_fraction"] == 0.0


# --- the retriever's level


def retriever_gradient(turns, loss=CONFIG.retriever):
    modules, frozen, fresh, _ = world()
    modules = dataclasses.replace(modules, retriever_optimizer=optax.sgd(1.0))
    config = dataclasses.replace(CONFIG, retriever=loss, turn_minibatch=8)
    eta = fresh().retriever
    new, _, metrics = jax.jit(
        lambda e, t: retriever_update(config, modules, frozen.encoder, e, modules.retriever_optimizer.init(e), t, jax.random.key(0))
    )(eta, turns)
    return jax.tree.map(jnp.subtract, eta, new), metrics


def test_the_retriever_follows_the_closed_form_through_the_encoder():
    modules, frozen, fresh, batch = world()
    turns, eta = batch.turns, fresh().retriever
    got, _ = retriever_gradient(turns)
    queries, pull = jax.vjp(
        lambda e: modules.encoder.apply({"params": frozen.encoder, "lora": e}, turns.query_tokens, turns.query_mask), eta
    )
    p = jax.nn.softmax(jnp.einsum("ud,ucd->uc", queries, turns.doc_vectors))
    w = jax.nn.softmax(jnp.log(p) + turns.log_likelihood)
    ds = -(turns.advantages[:, None] + 0.1) * (w - p) / 8
    (expected,) = pull(jnp.einsum("uc,ucd->ud", ds, turns.doc_vectors))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-6), got, expected)


def test_a_zero_advantage_batch_gives_gamma_times_the_rag_gradient():
    turns = world()[3].turns.replace(advantages=jnp.zeros(8))
    bridge, _ = retriever_gradient(turns)
    rag, _ = retriever_gradient(turns, RetrieverLossConfig(gamma=1.0, use_outcome=False))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 0.1 * b, atol=1e-6), bridge, rag)
    outcome, metrics = retriever_gradient(turns, RetrieverLossConfig(use_rag=False))
    assert metrics["retriever/grad_norm"] == 0.0
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(outcome))


def test_padding_turns_are_put_last_and_do_not_count():
    turns = world()[3].turns
    padded = turns.replace(mask=jnp.arange(8) % 2 == 0, log_likelihood=turns.log_likelihood.at[1::2].set(jnp.nan))
    got, metrics = retriever_gradient(padded)
    real = jax.tree.map(lambda x: jnp.concatenate([x[::2], x[::2]]), turns)
    expected, real_metrics = retriever_gradient(real)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), got, expected)
    assert metrics["retriever/rag_nll"] == pytest.approx(float(real_metrics["retriever/rag_nll"]), rel=1e-5)


def test_the_retriever_learns_which_document_holds_the_answer():
    modules, frozen, fresh, batch = world()
    turns = batch.turns.replace(log_likelihood=jnp.full((8, 6), -8.0).at[:, 3].set(-1.0), advantages=jnp.zeros(8))
    config = dataclasses.replace(CONFIG, turn_epochs=10)
    update = jax.jit(lambda e, o, k: retriever_update(config, modules, frozen.encoder, e, o, turns, k))
    state = fresh()
    _, _, first = update(state.retriever, state.retriever_opt, jax.random.key(0))
    eta, opt_state = state.retriever, state.retriever_opt
    for i in range(5):
        eta, opt_state, metrics = update(eta, opt_state, jax.random.key(i))
    assert metrics["retriever/rag_nll"] < first["retriever/rag_nll"] - 0.1


# --- small parts


def test_warm_up_and_clip():
    optimizer = make_optimizer(OptimizerConfig(lr=1.0, clip=1.0, warmup=4))
    params, state, sizes = jnp.zeros(2), optimizer.init(jnp.zeros(2)), []
    for _ in range(6):
        update, state = optimizer.update(jnp.array([3e4, -4e4]), state, params)
        sizes.append(float(jnp.abs(update).max()))
    np.testing.assert_allclose(sizes, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0], rtol=1e-4)


@pytest.mark.parametrize("spike", [1e6, -1e18, 1e30])
def test_a_spike_costs_one_step_of_the_rates_size(spike):
    """Down a bowl; one gradient of another order in between. Beyond what float32 can square, it is skipped as not finite."""
    optimizer = make_optimizer(OptimizerConfig(lr=0.01))

    def descend(spiked):
        x, state, path = jnp.array([1.0, -1.0, 1.0]), optimizer.init(jnp.zeros(3)), []
        for step in range(200):
            gradient = 0.1 * x
            if spiked and step == 20:
                gradient = jnp.full(3, spike)
            x, state, _, skipped = guarded_update(optimizer, gradient, state, x, True)
            path.append(np.asarray(x))
            assert skipped == (spiked and step == 20 and abs(spike) > 1e19)
        return np.stack(path)

    calm, shaken = descend(False), descend(True)
    np.testing.assert_array_equal(calm[:20], shaken[:20])
    steps = np.abs(np.diff(shaken, axis=0))
    assert steps.max() < 0.04  # a few times the rate, as AdamW's first moment forgets
    assert np.abs(shaken[-1]).max() < 0.1


def test_guarded_update_keeps_the_optimiser_too():
    optimizer = make_optimizer(OptimizerConfig(lr=1.0))
    params = {"x": jnp.ones(3)}
    state = optimizer.init(params)
    for bad in (jnp.nan, jnp.inf):
        new, new_state, norm, skipped = guarded_update(optimizer, {"x": jnp.array([1.0, bad, 1.0])}, state, params, True)
        assert same((new, new_state), (params, state))
        assert (norm, skipped) == (0.0, 1.0)
    new, new_state, norm, skipped = guarded_update(optimizer, {"x": jnp.ones(3)}, state, params, True)
    assert not same(new, params)
    assert skipped == 0.0


def test_shapes_that_do_not_divide_are_refused():
    batch = world()[3]
    with pytest.raises(ValueError, match="6 turns: pad them to a multiple of turn_minibatch = 4"):
        run(batch=Batch(batch.rollouts, jax.tree.map(lambda x: x[:6], batch.turns)))
    with pytest.raises(ValueError, match="full, lora"):
        dataclasses.replace(CONFIG, trainable="head")
