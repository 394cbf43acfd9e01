from bridge_jax import config as configuration
from bridge_jax.training.methods import METHODS


def test_configuration_and_registry_name_the_same_methods():
    assert set(configuration.METHODS) == set(METHODS)
