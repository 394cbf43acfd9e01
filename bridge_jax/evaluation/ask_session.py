"""Questions one after another to one opened run: typed in a terminal, or one a line from a pipe."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator

import jax
from ml_collections import ConfigDict
from rich.console import Console
from rich.text import Text

from bridge_jax.data.cache import cache_dir
from bridge_jax.data.prompts import build_prompt
from bridge_jax.data.qa import Question
from bridge_jax.errors import UserError, one_line
from bridge_jax.evaluation import ask_view
from bridge_jax.rollout.rows import Episode
from bridge_jax.training.session import Session

HELP = """Type a question. Ctrl-C stops an answer under way.
  :docs [N]         the passages that search N of the last answer found (default: its last search)
  :temperature T    sample with T from now on; 0 is greedy
  :json             the last answer as one JSON object, with every candidate
  :help             this
  :quit             the end (Ctrl-D, too)"""


def checked_question(text: str) -> str:
    """Raises UserError: nothing, or what is no text."""
    if not text.isprintable() or text.encode("utf-8", "replace").decode() != text:
        raise UserError("the question holds characters that are no text (control characters or broken UTF-8): write it again")
    if not text.strip():
        raise UserError("the question is empty: write it in quotes behind the flags")
    return text


def checked_temperature(value: float, name: str = "--temperature") -> float:
    if not 0 <= value < float("inf"):
        raise UserError(f"{name}={value}: must be at least 0")
    return value


class Asking:
    """An opened run that answers; `last` is the episode of the last answer."""

    def __init__(self, session: Session, config: ConfigDict, console: Console, temperature: float, seed: int):
        self.session, self.config, self.console = session, config, console
        self.temperature, self.key, self.asked = temperature, jax.random.key(seed), 0
        self.last: Episode | None = None

    def answer(self, text: str, show: bool = True, repeat: bool = True) -> Episode:
        """Roll out one answer. The first one of a session draws as `ask` with one question does.

        Args:
          show: print it as it comes; repeat: the question before it.

        Raises:
          UserError: the question is none, or longer than a prompt may be.
        """
        assets, config = self.session.assets, self.config
        question = checked_question(text)
        prompt = build_prompt(question, assets.tokenizer, config.rollout.prompt, max_tokens=config.rollout.max_prompt_tokens)
        stream = ask_view.Stream(self.console, assets.corpus, config.credit.tau, assets.engine.decode)
        if show and repeat:
            self.console.print(Text("question  ", style="bold") + ask_view.plain(question))
        key = self.key if not self.asked else jax.random.fold_in(self.key, self.asked)
        self.asked += 1
        [self.last], _ = assets.engine.run(
            self.session.policy_variables,
            [Question(id="ask", question=question, golds=(), gold_passage_ids=(), dataset="ask")],
            prompts=[prompt],
            group_size=1,
            key=key,
            temperature=self.temperature,
            retriever_lora=self.session.retriever_lora,
            watch=stream if show else None,
        )
        if show:
            stream.end(self.last)
        return self.last

    def json(self, indent: int | None = None) -> str:
        """The last answer."""
        found = ask_view.as_json(self.last, self.session.assets.corpus, self.config.credit.tau)
        return json.dumps(found, ensure_ascii=False, indent=indent)

    def command(self, line: str) -> None:
        """Do what a line that begins with a colon says. Raises UserError: it says nothing known."""
        name, _, rest = line[1:].strip().partition(" ")
        if name == "help":
            self.console.print(HELP, markup=False, highlight=False)
        elif name == "temperature":
            self.temperature = checked_temperature(_number(rest, float, ":temperature 0.7"), ":temperature ")
        elif name not in ("docs", "json"):
            raise UserError(f":{name} is no command: :help lists them")
        elif self.last is None:
            raise UserError(f":{name} tells of the last answer: ask something first")
        elif name == "json":
            self.console.print(self.json(indent=1), markup=False, highlight=False, soft_wrap=True)
        else:
            turns = self.last.turns
            number = _number(rest, int, ":docs 1") if rest else len(turns)
            if not 1 <= number <= len(turns):
                raise UserError(f":docs {number}: the last answer has {len(turns)} searches")
            ask_view.show_documents(self.console, turns[number - 1], self.session.assets.corpus, self.config.credit.tau)


def converse(asking: Asking, as_json: bool) -> int:
    """Questions from stdin until it ends, or :quit; returns the exit code: 2 where a line of a pipe could not be answered."""
    typed = sys.stdin.isatty()
    refused = 0
    for line in _typed(asking.console) if typed else map(str.strip, sys.stdin):
        if not line:
            continue
        if line in (":quit", ":q", ":exit"):
            break
        try:
            if line.startswith(":"):
                asking.command(line)
            else:
                asking.answer(line, show=not as_json, repeat=not typed)
                if as_json:
                    print(asking.json(), flush=True)
        except UserError as error:
            refused += 1
            print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            if not typed:
                raise
            asking.console.print("\nstopped", style="yellow")
    return 0 if typed or not refused else 2


def _typed(console: Console) -> Iterator[str]:
    """Lines with editing and a history that is kept, where Python has readline. Ctrl-C gives up a line, Ctrl-D ends."""
    hint = "Ask a question (the first answer takes longest: programs are compiled). :help for commands, :quit or Ctrl-D to end."
    console.print(hint, style="dim", highlight=False)
    with open_history():
        while True:
            try:
                yield input("\nask> ").strip()
            except EOFError:
                console.print()
                return
            except KeyboardInterrupt:
                console.print()


@contextlib.contextmanager
def open_history() -> Iterator[None]:
    try:
        import readline
    except ImportError:  # Windows
        yield
        return
    path = cache_dir() / "ask_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)


def _number(text: str, kind: Callable, example: str):
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{text!r} is no number: write {example}") from None
