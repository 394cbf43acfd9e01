"""The exact bilevel toy of METHOD 6: which estimator is close to which gradient, in closed form and by autograd.

lower level  g(x, y) = (y - a x)^2 / 2 + phi(x)        upper level  f(x, y) = (y - b)^2 / 2 + c x^2 / 2
"""

import jax
import jax.numpy as jnp
import optax
import pytest

from bridge_jax.objectives.bilevel import guarded_update

A, B, C = 1.7, 0.6, 0.9


def phi(x):
    return jnp.sin(3 * x) + x**2


def lower(x, y):
    return (y - A * x) ** 2 / 2 + phi(x)


def upper(x, y):
    return (y - B) ** 2 / 2 + C * x**2 / 2


def minimise(loss):
    """argmin over y with the project's own optimiser step."""
    optimizer = optax.sgd(0.2)

    def body(_, carry):
        y, state = carry
        y, state, _, _ = guarded_update(optimizer, jax.grad(loss)(y), state, y, jnp.bool_(True))
        return y, state

    return jax.lax.fori_loop(0, 400, body, (jnp.float32(0.0), optimizer.init(jnp.float32(0.0))))[0]


@pytest.mark.parametrize("x", [-1.3, 0.2, 2.0])
@pytest.mark.parametrize("gamma", [0.02, 0.3, 2.0])
def test_toy(x, gamma):
    x = jnp.float32(x)
    star = minimise(lambda y: lower(x, y))
    penalised = minimise(lambda y: upper(x, y) + gamma * lower(x, y))
    assert float(penalised) == pytest.approx(float((B + gamma * A * x) / (1 + gamma)), abs=1e-4)

    one_state = jax.grad(upper)(x, penalised)
    keep = gamma * jax.grad(lower)(x, penalised)
    two_state = one_state + keep - gamma * jax.grad(lower)(x, star)
    drop = one_state + keep  # only the eta* term dropped
    true = jax.grad(lambda x: upper(x, A * x))(x)

    assert float(true) == pytest.approx(float(C * x + A * (A * x - B)), abs=1e-4)
    assert float(two_state) == pytest.approx(float(C * x + gamma / (1 + gamma) * A * (A * x - B)), abs=1e-4)
    assert float(one_state) == pytest.approx(float(C * x), abs=1e-5)
    assert float(drop) == pytest.approx(float(two_state + gamma * jax.grad(phi)(x)), abs=1e-4)


def test_a_stiff_penalty_recovers_the_true_gradient_and_a_weak_one_the_one_state_gradient():
    x = jnp.float32(0.8)

    def two_state(gamma):
        y = (B + gamma * A * x) / (1 + gamma)
        return jax.grad(upper)(x, y) + gamma * (jax.grad(lower)(x, y) - jax.grad(lower)(x, A * x))

    true = C * x + A * (A * x - B)
    errors = [abs(float(two_state(gamma) - true)) for gamma in (0.02, 0.3, 3.0, 100.0)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02
    assert float(two_state(1e-4)) == pytest.approx(float(C * x), abs=1e-3)
