"""sentence-transformers reads folders, encodes texts, and writes folders of its own. Called with one JSON object, answers with one.

{"folders": {name: folder}, "queries": [...], "passages": [...], "max_length": n, "out": folder} -> {"versions": ...};
<out>/<name>.npz has its vectors of both, <out>/<name>/ what it wrote.
"""

import importlib.metadata
import json
import sys

import numpy as np
from sentence_transformers import SentenceTransformer

job = json.loads(sys.argv[1])
for name, folder in job["folders"].items():
    model = SentenceTransformer(folder, device="cpu")
    model.max_seq_length = job["max_length"]
    vectors = {"query": model.encode_query(job["queries"]), "passage": model.encode_document(job["passages"])}
    np.savez(f"{job['out']}/{name}.npz", **vectors)
    model.save(f"{job['out']}/{name}")
print(json.dumps({name: importlib.metadata.version(name) for name in ("sentence-transformers", "torch", "transformers")}))
