import subprocess

import checkout
import pytest
from fake_machines import Cloud


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """Fakes on PATH, and a repository of one commit in the place of this one."""
    found = Cloud(tmp_path / "cloud")
    repository = tmp_path / "repository"
    (repository / "configs").mkdir(parents=True)
    (repository / "configs/mini.py").write_text("from bridge_jax import config\n\nget_config = config.default\n")
    (repository / "setup.py").write_text("")

    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=repository, check=True, capture_output=True
        )

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    monkeypatch.setattr(checkout, "ROOT", repository)
    monkeypatch.setenv("PATH", f"{found.root}/bin:/usr/bin:/bin")
    monkeypatch.setenv("BRIDGE_JAX_CACHE", str(tmp_path / "cache"))
    for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS", "CLOUDSDK_CORE_PROJECT", "CLOUDSDK_COMPUTE_ZONE"):
        monkeypatch.delenv(name, raising=False)
    found.repository = repository
    yield found
    found.play(train="exit 1", dead="")
    subprocess.run(
        [
            "/bin/bash",
            "-c",
            f"PATH=/usr/bin:/bin; for f in {found.root}/worker-*/bridge_jax_jobs/*/job.sh; do bash $f stop 3; done",
        ],
        capture_output=True,
    )
