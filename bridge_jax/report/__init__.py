"""A run as one HTML page: `python -m bridge_jax.report --workdir=runs/demo`."""
