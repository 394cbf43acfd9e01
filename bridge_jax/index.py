"""`python -m bridge_jax.index`: a corpus and an encoder -> an index folder. `python -m bridge_jax.index eval`: what it finds."""

from __future__ import annotations

import argparse
import re
import sys

from bridge_jax import distributed
from bridge_jax.errors import UserError, main_guard
from bridge_jax.files import as_path, is_remote, writing

EXAMPLES = """
examples:
  python -m bridge_jax.index --corpus wiki.jsonl --encoder intfloat/e5-base-v2 --out indexes/wiki
  python -m bridge_jax.index --corpus pubmed/chunk --encoder intfloat/e5-base-v2 --out indexes/pubmed --shard 3/16
  python -m bridge_jax.index --corpus wiki-18.jsonl.gz --encoder intfloat/e5-base-v2 --faiss e5_Flat.index --out indexes/wiki
  python -m bridge_jax.index --corpus embedded --encoder minilm-l6-v2 --out indexes/embedded --limit 2000
  python -m bridge_jax.index eval --index indexes/wiki --questions hotpotqa --adapter runs/mine/retriever

The corpus: wiki-18's JSON lines {"id": "7", "contents": "\\"Title\\"\\ntext"}, MedRAG's chunks {"id", "title", "content"} or DPR's
table, plain or gzip-compressed; a file, several, a folder or a pattern.
A run that was stopped goes on when the same command is run again. With --shard i/n, on as many machines as you like with a common
folder, the part that is done last finishes the index. A finished index is reused, and only --force replaces it.
"""


def parser() -> argparse.ArgumentParser:
    """The arguments of building."""
    p = argparse.ArgumentParser(
        "python -m bridge_jax.index",
        description="Encode a corpus of passages and build a search index over it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--corpus",
        required=True,
        nargs="+",
        help='files of passages, or "embedded" or "mini" for those that come with the package',
    )
    p.add_argument(
        "--encoder",
        help="E5, BGE, Qwen3-Embedding, ...: a folder, a Hugging Face id, or a pocket model's name (needed but for bm25)",
    )
    p.add_argument("--out", required=True, help="index folder to write")
    p.add_argument(
        "--kind",
        default="auto",
        choices=("auto", "scann", "exact", "bm25"),
        help="auto: ScaNN where installed, else exact on the device; bm25: by words, without an encoder",
    )
    p.add_argument("--limit", type=int, help="index the first so many passages only")
    p.add_argument(
        "--shard", metavar="I/N", help="encode every N-th shard only, from the I-th (0 to N-1); on a pod each process takes its own"
    )
    p.add_argument("--store", default="bfloat16", choices=("bfloat16", "int8"), help="how vectors are kept (int8: half the bytes)")
    p.add_argument("--faiss", metavar="FILE", help="take the vectors from a FAISS Flat index of the same passages, encode nothing")
    p.add_argument("--recall", type=float, default=0.98, help="recall@40 of exact search that ScaNN is tuned for (default 0.98)")
    p.add_argument("--queries", metavar="QUESTIONS", help="a question file or set to tune on (default: phrases of the passages)")
    p.add_argument("--max-length", type=int, default=256, help="tokens a text is cut to (default 256)")
    p.add_argument("--batch-tokens", type=int, help="tokens encoded at a time on a device (default 1536 on a CPU, 32768 elsewhere)")
    p.add_argument(
        "--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="of encoding; auto: bfloat16 on TPU and GPU"
    )
    p.add_argument(
        "--pooling", choices=("mean", "cls", "last"), help="of token states (default: as the encoder's files or name say)"
    )
    p.add_argument("--query-prefix", help='put before every query (default: as the encoder\'s files or name say, "query: " for E5)')
    p.add_argument("--passage-prefix", help='put before every passage (default: likewise, "passage: " for E5)')
    p.add_argument("--force", action="store_true", help="replace the index in the folder, whatever it was built from")
    distributed.add_flags(p)
    return p


@main_guard
def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["eval"]:
        from bridge_jax.evaluation.retrieval import main as evaluate

        return evaluate(arguments[1:])
    args = parser().parse_args(arguments)
    for name in ("batch_tokens", "max_length"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    if not 0 <= args.recall <= 1:
        raise UserError(f"--recall is {args.recall}; it must be 0 (no tuning) to 1")
    if is_remote(as_path(args.out)):
        raise UserError(f"--out={args.out}: an index is made on this machine; copy its folder to the bucket when it is done")
    part = _part(args.shard)
    if args.encoder is None and args.kind != "bm25":
        raise UserError("--encoder is missing; name the encoder of the passages, such as intfloat/e5-base-v2")
    # Imported late: --help and a mistyped option should answer at once.
    from bridge_jax.data.corpora import SHIPPED, corpus_path
    from bridge_jax.retrieval.corpus import Corpus

    corpus = Corpus.open([corpus_path(name) if name in SHIPPED else name for name in args.corpus], args.limit)
    if args.kind == "bm25":
        from bridge_jax.retrieval.bm25 import build_bm25

        build_bm25(corpus, args.out, args.force)
        print(f"{args.out}: {len(corpus):,} passages, kind bm25")
        return 0
    queries = None
    if args.queries is not None:
        from bridge_jax.data.qa import load_questions

        queries = [question.question for question in load_questions(args.queries, limit=1000)]
    with distributed.processes(args.distributed, args.heartbeat), writing(args.out):
        index = _build(args, corpus, part, queries)
        if index is not None and distributed.is_main():
            print(f"{args.out}: {len(index):,} passages x {index.dim}, kind {index.kind}")
    return 0


def _part(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not int(found[1]) < int(found[2]):
        raise UserError(f"--shard is {text!r}; it must be I/N with I from 0 to N-1, such as 0/4")
    return int(found[1]), int(found[2])


def _build(args, corpus, part: tuple[int, int] | None, queries):
    import jax
    import jax.numpy as jnp

    from bridge_jax.mesh import make_mesh
    from bridge_jax.models import e5
    from bridge_jax.retrieval.embed import BATCH_TOKENS
    from bridge_jax.retrieval.index import build_index

    devices = jax.local_devices()
    dtype = {"auto": jnp.float32 if devices[0].platform == "cpu" else jnp.bfloat16}.get(args.dtype) or jnp.dtype(args.dtype)
    encoder = e5.load(
        args.encoder,
        dtype,
        make_mesh(data=-1, fsdp=1, devices=devices) if len(devices) > 1 else None,
        query_prefix=args.query_prefix,
        passage_prefix=args.passage_prefix,
        max_length=args.max_length,
        pooling=args.pooling,
    )
    wait = part is None and jax.process_count() > 1  # on a pod, all processes end with the index
    return build_index(
        corpus,
        encoder,
        args.out,
        args.kind,
        batch_tokens=(args.batch_tokens or (BATCH_TOKENS if devices[0].platform == "cpu" else 32_768)) * len(devices),
        force=args.force,
        part=part or (jax.process_index(), jax.process_count()),
        wait=wait,
        store=args.store,
        faiss_file=args.faiss,
        queries=queries,
        recall=args.recall,
    )


if __name__ == "__main__":
    sys.exit(main())
