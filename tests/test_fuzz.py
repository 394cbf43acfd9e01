"""Every input that once broke something, and some thousand new ones (benchmarks/fuzz.py makes millions)."""

import json
import logging
import warnings

import fuzz
import fuzz_targets
import pytest

from bridge_jax.rollout import protocol

INPUTS = {"parse": 3000, "inert": 3000, "em": 3000, "value": 1000, "wire": 2000, "questions": 1500, "passages": 800}


@pytest.fixture(scope="module", autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    fuzz_targets.close()


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_no_input_breaks_a_promise(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        done = fuzz.run(name, INPUTS.get(name, 30 if name == "config" else 150), seed=1, longest=2.0)
    assert not done["failed"], json.dumps(done["failed"])
    assert done["inputs"] > 0 and fuzz.corpus(name)


def test_a_broken_promise_is_found_and_made_short(monkeypatch):
    monkeypatch.setattr(protocol, "inert", lambda text: text)
    done = fuzz.run("inert", 3000, seed=2)
    assert len(done["failed"]) >= fuzz.FAILURES
    assert all(case["why"].startswith("AssertionError") for case in done["failed"])
    assert min(len(case["input"]) for case in done["failed"]) <= len("</information>")
