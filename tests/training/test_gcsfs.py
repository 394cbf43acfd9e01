"""The bucket tests again with what serves real buckets, gcsfs and tensorstore, against an emulator; skipped without them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

for library in ("gcsfs", "gcp_storage_emulator"):
    pytest.importorskip(library, reason="pip install gcsfs gcp-storage-emulator")


def test_a_run_and_its_checkpoints_in_a_bucket():
    script = Path(__file__).with_name("gcsfs_life.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["second"].startswith("another process is at work in gs://bucket/runs/a")
    assert found["no such bucket"].startswith("gs://no-such-bucket/a cannot be written")
    assert not found["lock left"]
    assert found["steps"] == [1, 2, 3, 4]
    assert found["rollouts"] == [f"step_{step:06d}.jsonl" for step in (1, 2, 3)]
    assert found["copied"] == ["config.json", "metrics.jsonl", "report.html", *(f"rollouts/{name}" for name in found["rollouts"])]
    assert found["note"] == "much longer"
    assert found["checkpoints"] == [2, 3] and found["restored"]
