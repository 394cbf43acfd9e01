"""A run's life in a bucket through the real gcsfs, against an emulator of the storage service: prints one JSON object.

pip install gcsfs gcp-storage-emulator;  python tests/training/gcsfs_life.py
"""

import json
import os
import socket
import tempfile
from pathlib import Path

os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # asks over gRPC what kind of bucket it is, which the emulator lacks

import fsspec
import gcsfs
from gcp_storage_emulator.server import create_server


def main() -> dict:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = create_server("localhost", port, in_memory=True, default_bucket="bucket")
    server.start()
    # The first is gcsfs's, the second tensorstore's, which Orbax writes arrays with.
    os.environ["STORAGE_EMULATOR_HOST"] = os.environ["TENSORSTORE_GCS_HTTP_URL"] = f"http://localhost:{port}"
    fsspec.config.conf["gcs"] = {"token": "anon"}
    try:
        return {**life(), **checkpoints()}
    finally:
        server.stop()


def life() -> dict:
    from bridge_jax import config, files
    from bridge_jax.errors import UserError
    from bridge_jax.report import page
    from bridge_jax.training import bucket_lock
    from bridge_jax.training.metrics import RunLog, read_metrics
    from bridge_jax.training.workdir import claim_workdir, exclusive

    bucket_lock.BEAT, bucket_lock.SILENT, bucket_lock.SETTLE = 0.2, 1.0, 0.2
    run = files.as_path("gs://bucket/runs/a")
    settings = config.load(Path(__file__).parents[2] / "configs/mini.py")
    found = {}

    def refused(workdir) -> str:
        try:
            with exclusive(workdir):
                return "held"
        except UserError as error:
            return str(error)

    with exclusive(run):
        claim_workdir(settings, run)
        log = RunLog(run, 0)
        for step in range(1, 6):
            log.write({"step": step})
            log.write_rollouts(step, [{"step": step}])
        found["second"] = refused(run)
    found["lock left"] = (run / ".lock").exists()
    found["no such bucket"] = refused("gs://no-such-bucket/a")
    log = RunLog(run, 3)
    log.write({"step": 4})
    found["steps"] = [row["step"] for row in read_metrics(log.path)]
    found["rollouts"] = sorted(path.name for path in (run / "rollouts").glob("step_*.jsonl"))
    page.write_report(run)
    with tempfile.TemporaryDirectory() as cache:
        copy = files.local_copy(run, Path(cache))
        found["copied"] = sorted(path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file())
    # Another process makes an object longer whose listing this one has seen.
    other = gcsfs.GCSFileSystem(token="anon", skip_instance_cache=True)
    other.pipe_file("bucket/runs/a/note", b"short")
    list(run.iterdir())
    other.pipe_file("bucket/runs/a/note", b"much longer")
    found["note"] = (run / "note").read_bytes().decode()
    return found


def checkpoints() -> dict:
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    from bridge_jax import files

    tree = {"w": jnp.arange(1000.0).reshape(10, 100)}
    folder = files.as_path("gs://bucket/runs/a/checkpoints")
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        for step in (1, 2, 3):
            manager.save(step, args=ocp.args.StandardSave(tree))
    with ocp.CheckpointManager(folder) as manager:
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
        same = manager.restore(3, args=ocp.args.StandardRestore(like))["w"] == tree["w"]
        return {"checkpoints": list(manager.all_steps()), "restored": bool(same.all())}


if __name__ == "__main__":
    print(json.dumps(main()))
