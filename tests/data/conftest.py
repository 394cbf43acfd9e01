import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """No test reads or writes the user's cache or data folder."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("BRIDGE_JAX_CACHE", str(folder))
    monkeypatch.delenv("BRIDGE_JAX_DATA", raising=False)
    return folder
