"""sentence-transformers' `encode` of the same passages, on the CPU, with its default batch size and with ours."""

import json

from serve import Memory, serve, versions


def setup(job: dict, memory: Memory):
    """job: folder (the encoder), corpus, rows, max_length, batch_size."""
    from sentence_transformers import SentenceTransformer

    memory.imported()
    model = SentenceTransformer(job["folder"], device="cpu")
    model.max_seq_length = job["max_length"]
    with open(job["corpus"], "rb") as file:
        texts = [json.loads(line)["contents"] for line, _ in zip(file, range(job["rows"]))]

    def run() -> None:
        model.encode(texts, batch_size=job["batch_size"], normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False)

    run()
    return run, {"versions": versions(["sentence-transformers", "torch", "transformers"])}


serve(setup)
