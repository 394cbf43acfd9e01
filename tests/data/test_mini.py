"""The mini world: deterministic, closed (every question can be answered from its gold passages), its splits apart."""

import hashlib
import json

import pytest

from bridge_jax.data import mini
from bridge_jax.data.mini.language import ASPECTS, TYPES, VALUES, vocabulary
from bridge_jax.data.mini.questions import SETS, SIZES, chains, questions
from bridge_jax.data.mini.world import make_world
from bridge_jax.data.qa import load_questions
from bridge_jax.errors import UserError


@pytest.fixture(scope="module")
def world():
    return make_world(0)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BRIDGE_JAX_CACHE", str(tmp_path))
    return tmp_path


def every(world, split="test"):
    return {name: questions(world, name, split) for name in SETS if split in SIZES[name]}


def test_size(world):
    assert len(world.passages) == 12190 and len({p.id for p in world.passages}) == 12190
    assert all(len(world.of_kind(kind)) == 430 for kind in TYPES)
    names = [entity.name for entity in world.entities.values()]
    assert len(set(names)) == len(names)
    lengths = [len(p.text.split()) + len(p.title.split()) for p in world.passages]
    assert max(lengths) <= 14


def test_the_corpus_is_the_same_bytes_everywhere(cache):
    """A changed generator must get a new VERSION: indexes and results name the corpus by its hash."""
    assert hashlib.sha256(mini.corpus_path().read_bytes()).hexdigest()[:16] == "9de495b9fc4c7974"


def test_passages_tell_the_values(world):
    texts = {p.id: p for p in world.passages}
    for entity in list(world.entities.values())[::37]:
        for aspect in ASPECTS[entity.kind]:
            passage = texts[f"{entity.id}-{aspect.name}"]
            assert passage.title == entity.name and passage.text.endswith(f" {entity.values[aspect.name]} .")
            assert passage.text.removesuffix(f" {entity.values[aspect.name]} .") in aspect.tellings


def test_asking_and_telling_share_no_content_word():
    small = {"a", "as", "at", "by", "in", "is", "its", "of", "on", "the", "to", "with", "was", "has", "first"}
    for aspects in ASPECTS.values():
        for aspect in aspects:
            told = {word for telling in aspect.tellings for word in telling.split()} - small
            assert not told & set(aspect.nouns)
            assert len(set(aspect.nouns)) == 3
    nouns = [noun for aspects in ASPECTS.values() for aspect in aspects for noun in aspect.nouns]
    assert len(nouns) == len(set(nouns))
    values = [value for values in VALUES.values() for value in values]
    assert not set(nouns) & set(values) and all(len(set(v)) == len(v) == 24 for v in VALUES.values())


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_questions_follow_from_their_gold_passages(world, split):
    texts = {p.id: p for p in world.passages}
    for name, rows in every(world, split).items():
        assert len(rows) == SIZES[name][split] and len({q.question for q in rows}) >= 0.97 * len(rows)
        for q in rows:
            values = [world.entities[e].values[a] for e, a in q.hops]
            assert all(value in texts[p].text for value, p in zip(values, q.gold_passages, strict=True))
            if q.form in ("one_hop", "two_hop"):
                assert q.answer == values[-1]
            elif q.form == "same":
                assert q.answer == ("yes" if values[0] == values[1] else "no")
            else:
                assert q.answer == world.entities[q.hops[values.index(min(values, key=int))][0]].name
            if q.form == "two_hop":  # the bridge is what the first passage says
                assert values[0] == world.entities[q.hops[1][0]].name


def test_splits_share_nothing(world):
    for name in SETS:
        sides = {split: {q.hops for q in questions(world, name, split)} for split in SIZES[name]}
        order = sorted if name.startswith("comparison") else list  # a comparison is the same the other way round
        pairs = {split: {tuple(order(hops)) for hops in found} for split, found in sides.items()}
        for a in pairs:
            for b in pairs:
                assert a == b or not pairs[a] & pairs[b], (name, a, b)


def test_out_of_domain_sets_hold_what_training_does_not(world):
    def kinds(name, split):
        return {(q.form, *((e.split("-")[0], a) for e, a in q.hops)) for q in questions(world, name, split)}

    assert not kinds("two_hop_ood", "test") & (kinds("two_hop", "train") | kinds("two_hop", "test"))
    assert not kinds("comparison_ood", "test") & (kinds("comparison", "train") | kinds("comparison", "test"))
    assert not set(chains(ood=True)) & set(chains(ood=False))
    strange = {noun for aspects in ASPECTS.values() for aspect in aspects for noun in aspect.nouns[2:]}
    words = {
        word
        for name in ("one_hop", "two_hop", "comparison")
        for q in questions(world, name, "train")
        for word in q.question.split()
    }
    assert not strange & words
    assert all(strange & set(q.question.split()) for q in questions(world, "one_hop_ood", "test"))


def test_yes_and_no_are_balanced(world):
    for name in ("comparison", "comparison_ood"):
        answers = [q.answer for q in questions(world, name, "test") if q.form == "same"]
        assert 0.4 < answers.count("yes") / len(answers) < 0.6


def test_loading_by_name(cache):
    rows = load_questions("mini/two_hop", "validation")
    assert len(rows) == 400 and rows[0].dataset == "two_hop" and len(rows[0].gold_passage_ids) == 2
    assert len(load_questions("mini/one_hop")) == 600
    line = json.loads(mini.questions_path("two_hop", "test").read_text().splitlines()[0])
    assert line["metadata"]["form"] == "two_hop"


@pytest.mark.parametrize(
    ("spec", "split", "says"),
    [("mini/tow_hop", "test", "did you mean 'mini/two_hop'"), ("mini/one_hop_ood", "train", "its splits are validation, test")],
)
def test_unknown_sets_and_splits(cache, spec, split, says):
    with pytest.raises(UserError, match=says):
        load_questions(spec, split)


def test_a_damaged_file_is_refused_by_name(cache):
    path = mini.questions_path("one_hop", "test")
    path.write_text(path.read_text()[:-100])
    with pytest.raises(UserError, match="is damaged; delete the folder"):
        mini.questions_path("one_hop", "test")


def test_vocabulary_holds_every_word(world):
    known = set(vocabulary()) | set("?.,:")
    for rows in every(world).values():
        assert all(word in known for q in rows for word in q.question.split() + q.answer.split())
    assert all(word in known for p in world.passages for word in p.text.split() + p.title.split())
