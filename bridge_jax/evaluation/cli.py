"""What `evaluate` and `ask` share: flags for a run's workdir, whose own config.json serves when --config is left out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from bridge_jax import config as configuration
from bridge_jax.errors import UserError
from bridge_jax.files import AnyPath, as_path
from bridge_jax.overrides import split_overrides

CHECKPOINTS = ("best", "latest", "start")

get_config = configuration.default  # this file is the config file that a workdir's config.json overrides


def add_flags(parser: argparse.ArgumentParser, folder: Callable[[str], AnyPath] = as_path) -> None:
    """folder: makes the path of --workdir, or refuses it."""
    parser.add_argument("--workdir", required=True, type=folder, metavar="FOLDER", help="the run's folder")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a config file, such as configs/pocket.py (default: what the run wrote into its workdir); single fields are "
        "overridden with --config.group.field=value",
    )
    parser.add_argument(
        "--checkpoint",
        choices=CHECKPOINTS,
        default="best",
        help="best: by the run's own evaluations; latest; start: before the first step of RL (default: best)",
    )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, ConfigDict]:
    """As `config.parse_args`, with --config optional.

    Raises:
      UserError: as there; also when neither --config nor a readable <workdir>/config.json is there.
    """
    overrides, rest = split_overrides(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(rest)
    if args.config is None:
        overrides = [*(f"{name}={text}" for name, text in workdir_fields(args.workdir).items()), *overrides]
    return args, configuration.load(args.config or __file__, overrides, training=False)


def workdir_fields(workdir: Path) -> dict[str, str]:
    """The configuration that a run wrote into its folder, as {"group.field": text of an override}."""
    path = as_path(workdir) / "config.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist: give a run's --workdir, or a --config")
    try:
        fields = json.loads(path.read_text(encoding="utf-8")).items()
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} is not a run's configuration ({error}): give a --config") from error
    return {name: value if isinstance(value, str) else repr(_tuple(value)) for name, value in fields}


def _tuple(value):
    return tuple(value) if isinstance(value, list) else value
