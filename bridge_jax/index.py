"""`python -m bridge_jax.index`: a corpus and an encoder -> an index folder."""

from __future__ import annotations

import argparse
import sys

from bridge_jax.errors import main_guard

EXAMPLES = """
examples:
  python -m bridge_jax.index --corpus wiki.jsonl --encoder intfloat/e5-base-v2 --out indexes/wiki
  python -m bridge_jax.index --corpus embedded --encoder minilm-l6-v2 --out indexes/embedded --limit 2000

The corpus is JSON lines, one passage a line: {"id": "7", "contents": "\\"Title\\"\\ntext"}.
A run that was stopped goes on when the same command is run again.
A finished index is reused, and only --force replaces it.
"""


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    p = argparse.ArgumentParser(
        "python -m bridge_jax.index",
        description="Encode a corpus of passages and build a search index over it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--corpus", required=True, help='JSON-lines file of passages, or "embedded" or "mini" for those that come with the package'
    )
    p.add_argument("--encoder", required=True, help="BERT/E5 encoder: a folder, a Hugging Face id, or a pocket model's name")
    p.add_argument("--out", required=True, help="index folder to write")
    p.add_argument(
        "--kind", default="auto", choices=("auto", "scann", "exact"), help="auto: ScaNN where installed, else exact on the device"
    )
    p.add_argument("--limit", type=int, help="index the first so many passages only")
    p.add_argument("--max-length", type=int, default=256, help="tokens a text is cut to (default 256)")
    p.add_argument("--batch-size", type=int, default=64, help="passages encoded at a time (default 64)")
    p.add_argument("--query-prefix", help='put before every query (default: "query: " for E5 encoders, nothing for others)')
    p.add_argument("--passage-prefix", help='put before every passage (default: "passage: " for E5 encoders, nothing for others)')
    p.add_argument("--force", action="store_true", help="replace the index in the folder, whatever it was built from")
    return p


@main_guard
def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    # Imported late: --help and a mistyped option should answer at once.
    from bridge_jax.data.corpora import corpus_path
    from bridge_jax.errors import UserError
    from bridge_jax.models import e5
    from bridge_jax.retrieval.corpus import Corpus
    from bridge_jax.retrieval.index import build_index

    for name in ("batch_size", "max_length"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    corpus = corpus_path(args.corpus)
    Corpus.open(corpus, args.limit)  # a bad corpus is refused before an encoder is fetched
    encoder = e5.load(args.encoder, query_prefix=args.query_prefix, passage_prefix=args.passage_prefix, max_length=args.max_length)
    index = build_index(corpus, encoder, args.out, args.kind, args.limit, batch_size=args.batch_size, force=args.force)
    print(f"{args.out}: {len(index):,} passages x {index.dim}, kind {index.kind}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
