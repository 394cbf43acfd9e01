"""A client for OpenAI-compatible chat endpoints: many requests at a time, retried, counted, and never paid for twice.

    endpoint = Endpoint("http://localhost:8000/v1", "some-model", key=os.environ.get("OPENAI_API_KEY"), cache=Path("said.jsonl"))
    [said] = endpoint.complete_many([{"messages": [{"role": "user", "content": "Who wrote ...?"}], "max_tokens": 64}])

Every answer is written to `cache` at once, under the hash of what was asked (model, messages, limits, vote): whoever is killed and
started again asks only what has no answer yet. The key is read from the environment by the caller and is in no file or message.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

import requests

from bridge_jax import bounded_http
from bridge_jax.addresses import checked_address
from bridge_jax.errors import UserError

log = logging.getLogger(__name__)

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
LONGEST_TIMEOUT = 86_400.0
LARGEST = 1 << 24  # bytes of an answer
TOO_LONG = ("context length", "context_length", "maximum context", "too long", "too many tokens", "max_model_len", "context window")


@dataclass(frozen=True)
class Reply:
    """What a model answered. finish: "stop" | "length" (cut off) | "too_long" (the message does not fit) | "refused" (by an
    endpoint); `problem` is the reason for the last two. seconds: under way, waits for its batch included."""

    text: str
    finish: str = "stop"
    prompt_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0
    problem: str = ""


class EndpointDown(UserError):
    """Every attempt failed. What was answered before is kept: the same command goes on there."""


class Endpoint:
    """One model at one address.

    url: up to /v1. retries: further attempts at a request that failed for a passing reason (no connection, time-out, 408, 429,
    5xx, an answer that is none), with waits that double and a server's own Retry-After. timeout: seconds for a whole answer.
    price: dollars for a million tokens (read, written).
    totals: requests, retries, cached, prompt_tokens, tokens; those of `cached` answers are not counted again.
    """

    def __init__(
        self, url: str, model: str, *, key: str | None = None, concurrency: int = 8, retries: int = 6, timeout: float = 300.0,
        temperature: float = 0.0, price: tuple[float, float] | None = None, cache: Path | None = None,
        first_wait: float = FIRST_WAIT,
    ):  # fmt: skip
        url = checked_address(url, "--endpoint", "http://localhost:8000/v1")
        if concurrency < 1:
            raise UserError(f"--concurrency={concurrency}: must be at least 1")
        if not 0 < timeout <= LONGEST_TIMEOUT:  # NaN is not, either
            raise UserError(f"--timeout={timeout:g}: give seconds, more than 0 and at most {LONGEST_TIMEOUT:g}")
        if key and not (key.isascii() and key.isprintable()):  # no header holds it, and an error of the header's would show it
            raise UserError(
                "the key holds a character that no key has, such as a line break; set the variable that --key-env names"
            )
        self.url, self.model, self.concurrency, self.retries = url, model, concurrency, retries
        self.timeout, self.temperature, self.price, self.first_wait = timeout, temperature, price, first_wait
        self.totals: Counter = Counter()
        self._key = key or None
        self._limit_field = "max_tokens"  # newer models of OpenAI's take max_completion_tokens alone
        self._lock = threading.Lock()
        self._local = threading.local()
        self._answered_once = False
        self._path = cache
        self._known = _read_cache(cache)

    def describe(self) -> dict:
        """What affects an answer."""
        return {"url": self.url, "model": self.model, "temperature": self.temperature}

    def spent(self) -> dict:
        """Counts of this session, and what they cost where a price is known."""
        totals = {name: self.totals[name] for name in ("requests", "retries", "cached", "prompt_tokens", "tokens")}
        if self.price:
            totals["dollars"] = (totals["prompt_tokens"] * self.price[0] + totals["tokens"] * self.price[1]) / 1e6
        return totals

    def complete_many(self, asked: Sequence[Mapping]) -> list[Reply]:
        """Answers in the order of `asked`: each {"messages", "max_tokens" [, "stop", "temperature", "vote"]}.

        vote: a number that tells repeated samples of one question apart; it is not sent.

        Raises:
          EndpointDown: one of them failed for good; those that were answered are in the cache.
          UserError: the endpoint refuses the key, the address or the model.
        """
        left = threading.Event()
        futures: list[Future] = [Future() for _ in asked]
        waiting = deque(zip(asked, futures, strict=True))

        def work() -> None:
            while True:
                try:
                    request, future = waiting.popleft()
                except IndexError:
                    return
                try:
                    future.set_result(self._complete(request, left))
                except BaseException as error:  # for whoever waits
                    future.set_exception(error)

        # Not ThreadPoolExecutor's: the interpreter waits for those when it ends, and Ctrl-C would take as long as a server hangs.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self.concurrency, len(asked)))]
        try:
            for thread in threads:
                thread.start()
            for future in futures:
                if future.exception():
                    break
            waiting.clear()
            for thread in threads:
                thread.join()  # what was asked besides is kept, too
        except BaseException:
            waiting.clear()
            left.set()
            raise
        return [future.result() for future in futures]

    # ---- one request -------------------------------------------------------------------------------------------------------------

    def _complete(self, request: Mapping, left: threading.Event) -> Reply:
        name = self._hash(request)
        with self._lock:
            known = self._known.get(name)
            if known is not None:
                self.totals["cached"] += 1
                return known
        said = self._ask(request, left)
        with self._lock:
            self._known[name] = said
            self.totals["prompt_tokens"] += said.prompt_tokens
            self.totals["tokens"] += said.tokens
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"request": name, **asdict(said)}, ensure_ascii=False) + "\n")
        return said

    def _hash(self, request: Mapping) -> str:
        what = (
            self.describe()
            | {name: value for name, value in request.items() if name != "stop"}
            | {"stop": [*request.get("stop", ())]}
        )
        return hashlib.sha256(json.dumps(what, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()

    def _ask(self, request: Mapping, left: threading.Event) -> Reply:
        """left: set when nobody waits for the answer any more."""
        why = ""
        attempt = 0
        while attempt <= self.retries and not left.is_set():
            if attempt:
                self._count("retries")
            began = time.monotonic()
            try:
                answer = self._post(request)
            except bounded_http.BadAnswer as error:
                why, asked_for = self._hidden(str(error)), None
            except requests.RequestException as error:
                why, asked_for = f"{type(error).__name__}", None
            else:
                if answer.status_code == 200:
                    said = _parse(answer, time.monotonic() - began)
                    if said is not None:
                        self._answered_once = True
                        return said
                    why, asked_for = f"an answer that is no chat completion: {self._hidden(answer.text)[:120]!r}", None
                elif answer.status_code in RETRIED:
                    why, asked_for = f"status {answer.status_code}", answer.headers.get("Retry-After")
                elif self._other_limit(answer):
                    continue  # the same request with the other name of its limit: no failure
                else:
                    return self._refused(answer)
            attempt += 1
            if attempt <= self.retries and not left.is_set():
                wait = self._wait(attempt, asked_for)
                log.warning("%s: %s; attempt %d of %d in %.1f s", self.url, why, attempt + 1, self.retries + 1, wait)
                left.wait(wait)
        raise EndpointDown(
            f"{self.url} failed {self.retries + 1} times, at last with {why}; see to it and run the same command again: it goes on"
        )

    def _post(self, request: Mapping) -> requests.Response:
        body = {"model": self.model, "messages": request["messages"], self._limit_field: request["max_tokens"]}
        body["temperature"] = request.get("temperature", self.temperature)
        if request.get("stop"):
            body["stop"] = list(request["stop"])
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        if not hasattr(self._local, "session"):
            self._local.session = bounded_http.open_session()  # sessions keep connections and are not for two threads
        self._count("requests")
        address, limits = f"{self.url}/chat/completions", {"timeout": self.timeout, "largest": LARGEST}
        return bounded_http.send(self._local.session, "POST", address, json=body, headers=headers, **limits)

    def _count(self, name: str) -> None:
        with self._lock:
            self.totals[name] += 1

    def _other_limit(self, answer: requests.Response) -> bool:
        if answer.status_code == 400 and self._limit_field == "max_tokens" and "max_completion_tokens" in answer.text:
            self._limit_field = "max_completion_tokens"
            return True
        return False

    def _refused(self, answer: requests.Response) -> Reply:
        """A question that the endpoint cannot take is that question's outcome; a refusal of everything is the user's to mend."""
        status, said = answer.status_code, self._hidden(_message(answer))
        if status in (401, 403):
            raise UserError(f"{self.url} refuses the key ({status}: {said}); set the variable that --key-env names")
        if any(sign in said.lower() for sign in TOO_LONG):
            return Reply("", "too_long", problem=said)
        if not self._answered_once or status in (404, 405):
            raise UserError(
                f"{self.url} refuses model '{self.model}' or the request ({status}: {said}); check --endpoint and --model"
            )
        return Reply("", "refused", problem=said)

    def _hidden(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    def _wait(self, attempt: int, asked_for: str | None) -> float:
        with contextlib.suppress(TypeError, ValueError):
            return min(max(0.0, float(asked_for)), LONGEST_WAIT)  # in this order NaN is 0, too
        return min(self.first_wait * 2 ** (attempt - 1), LONGEST_WAIT) * random.uniform(0.75, 1.25)


def _parse(answer: requests.Response, seconds: float) -> Reply | None:
    try:
        content = answer.json()
        [choice, *_] = content["choices"]
        text = choice["message"].get("content") or ""
        usage = content.get("usage") or {}
        finish = "length" if choice.get("finish_reason") == "length" else "stop"
        return Reply(
            bounded_http.whole(str(text)),
            finish,
            int(usage.get("prompt_tokens", 0)),
            int(usage.get("completion_tokens", 0)),
            seconds,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None


def _message(answer: requests.Response) -> str:
    """The server's words, whatever shape it gives its errors."""
    try:
        content = answer.json()
        inner = content.get("error", content.get("detail", content))
        text = inner.get("message", inner) if isinstance(inner, dict) else inner
    except (ValueError, AttributeError, RecursionError):
        text = answer.text
    return bounded_http.whole(" ".join(str(text).split())[:300])


def _read_cache(path: Path | None) -> dict[str, Reply]:
    """Answers by request. A last line that a kill cut short is cut off, so that the next one begins a line."""
    if path is None or not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    known = {}
    for number, line in enumerate(whole.decode("utf-8").split("\n")[:-1], start=1):
        try:
            row = json.loads(line)
            request = row.pop("request")
            known[request] = Reply(**row)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{path}, line {number}: is no answer of an endpoint ({error}); delete the line") from error
    return known


def from_flags(args, cache: Path | None) -> Endpoint:
    """An endpoint of the flags that `add_flags` added.

    Raises:
      UserError: one of them is missing or wrong.
    """
    if not args.model:
        raise UserError("--model is missing: name the model that the endpoint serves")
    price = None
    if args.price:
        try:
            read, written = (float(part) for part in args.price.split(","))
        except ValueError:
            raise UserError(
                f"--price={args.price}: give two numbers, dollars a million tokens read and written: --price=2.5,10"
            ) from None
        price = read, written
    key = os.environ.get(args.key_env)
    return Endpoint(
        args.endpoint, args.model, key=key, concurrency=args.concurrency, retries=args.retries, timeout=args.timeout, price=price,
        cache=cache,
    )  # fmt: skip


def add_flags(parser, required: bool = False) -> None:
    group = parser.add_argument_group("endpoint", "an OpenAI-compatible server, such as https://api.openai.com/v1")
    group.add_argument("--endpoint", metavar="URL", required=required, help="its address, up to /v1")
    group.add_argument("--model", metavar="NAME", help="the model it serves")
    group.add_argument("--key-env", default="OPENAI_API_KEY", metavar="VARIABLE", help="holds the key (default: OPENAI_API_KEY)")
    group.add_argument("--concurrency", type=int, default=8, metavar="N", help="requests at a time (default: 8)")
    group.add_argument("--retries", type=int, default=6, metavar="N", help="of a request that failed in passing (default: 6)")
    group.add_argument("--timeout", type=float, default=300.0, metavar="S", help="of one request, seconds (default: 300)")
    group.add_argument("--price", metavar="READ,WRITTEN", help="dollars a million tokens, to add up the cost")
