"""`python -m bridge_jax.serve`: an index folder -> a retrieval server that speaks Search-R1's POST /retrieve."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from bridge_jax.errors import UserError, main_guard

log = logging.getLogger(__name__)

TOKEN = "BRIDGE_JAX_SERVE_TOKEN"
STOP_SECONDS = 30  # given to requests under way when the server is told to stop
IDLE_SECONDS = 75  # a connection is kept open for the next request: longer than most clients and balancers keep theirs
EXAMPLES = """
examples:
  python -m bridge_jax.serve --index indexes/wiki --port 8000
  python -m bridge_jax.serve --index indexes/wiki indexes/pubmed --merge rank --adapter runs/mine/retriever
  curl -s localhost:8000/retrieve -d '{"queries": ["who founded it"], "topk": 3, "return_scores": true}'

Ctrl-C or SIGTERM: requests under way are answered first.
"""


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    p = argparse.ArgumentParser(
        "python -m bridge_jax.serve",
        description="Serve the passages of an index over HTTP (Search-R1's POST /retrieve).",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--index", required=True, nargs="+", help="index folder; several, built with one encoder, are merged")
    p.add_argument("--corpus", nargs="+", help="passages of each index (default: where the index was built from)")
    p.add_argument("--encoder", help="the encoder (default: the one the index was built with)")
    p.add_argument("--adapter", help="query LoRA, a folder in PEFT's format such as runs/mine/retriever")
    p.add_argument("--kind", default=None, choices=("auto", "scann", "exact", "approx"), help="default: as the index was built")
    p.add_argument("--merge", default="score", choices=("score", "rank"), help="several indexes: by score (default) or by rank")
    p.add_argument("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1: this machine only)")
    p.add_argument("--port", type=int, default=8000, help="default 8000; 0 picks a free one")
    p.add_argument("--topk", type=int, default=3, help="passages a query where a request names no number (default 3)")
    p.add_argument("--max-topk", type=int, default=200, help="the most passages that a request may ask for (default 200)")
    p.add_argument("--max-queries", type=int, default=2048, help="queries a request (default 2048)")
    p.add_argument("--max-rows", type=int, default=8192, help="rows of a request for vectors (default 8192, what a run asks for)")
    p.add_argument("--max-query-length", type=int, default=8192, help="characters (default 8192)")
    p.add_argument("--max-body", type=int, default=16 << 20, help="bytes of a request (default 16 MiB)")
    p.add_argument("--batch", type=int, default=256, help="queries searched together (default 256)")
    p.add_argument(
        "--token-file",
        help=f"file with the token that POST /adapter asks for (or ${TOKEN}); without one the adapter cannot be swapped",
    )
    return p


@main_guard
def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    for name in ("topk", "max_topk", "max_queries", "max_rows", "max_query_length", "max_body", "batch"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    if args.topk > args.max_topk:
        raise UserError(f"--topk is {args.topk}; it must be at most --max-topk, which is {args.max_topk}")
    token = _token(args.token_file)
    try:
        import uvicorn

        from bridge_jax.retrieval.server import Service, make_app
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed; pip install 'bridge-jax[serve]'") from None
    from bridge_jax.retrieval.mapped import FileChanged
    from bridge_jax.retrieval.serving import open_parts
    from bridge_jax.retrieval.wire import Limits

    with _listen(args.host, args.port) as listener:  # first: a port that is taken is said before an index is loaded
        parts = open_parts(args.index, args.corpus, args.encoder, args.kind, args.merge)
        service = Service(*parts, adapter=args.adapter)
        limits = Limits(args.max_body, args.max_queries, args.max_query_length, args.max_topk, args.max_rows)
        changes: list[FileChanged] = []

        def stop(error: FileChanged) -> None:
            changes.append(error)
            server.should_exit = True

        app = make_app(service, limits, args.topk, token, args.batch, changed=stop)
        listener.listen(2048)
        host, port = listener.getsockname()[:2]
        print(f"serving {len(service.corpus):,} passages at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):  # the server stops at them by itself, and raises them again when it has
            signal.signal(number, lambda *_: None)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, backlog=2048, timeout_graceful_shutdown=STOP_SECONDS,
            timeout_keep_alive=IDLE_SECONDS,
        )  # fmt: skip
        server = uvicorn.Server(config)
        server.run(sockets=[listener])
    if changes:
        raise changes[0]
    return 0


def _token(file: str | None) -> str | None:
    if file is None:
        return os.environ.get(TOKEN) or None
    try:
        token = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--token-file {file}: cannot be read ({error}); give a file with one line") from None
    if not token:
        raise UserError(f"--token-file {file}: is empty; put a secret into it")
    return token


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port < 65536:
        raise UserError(f"--port is {port}; it must be 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:  # the latter: no name of a host
        why = getattr(error, "strerror", None) or error
        raise UserError(f"--host {host} --port {port}: cannot listen there ({why}); give another one") from None
    if not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
        log.warning("listening at %s: every machine that reaches it can search; it has no authentication of its own", host)
    return listener


if __name__ == "__main__":
    sys.exit(main())
