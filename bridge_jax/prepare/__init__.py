"""Your own documents and questions into what `train` reads: `python -m bridge_jax.prepare`."""
