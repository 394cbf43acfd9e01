"""The words of the mini world: types, aspects, how each is asked, searched and told.

A passage tells one aspect of one entity and ends with its value: a causal reader can know the aspect when it meets the value. What
a passage says (`tellings`) shares no content word with how it is asked (`nouns`): matching them has to be learned, by the reader
and by the retriever.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

PER_TYPE = 430  # entities of each type
POOL = 40  # first and second words of names, per type: 430 of 1,600 names, so most share a word with ten others


@dataclass(frozen=True)
class Aspect:
    """kind: a type (the value is an entity) or a list of VALUES. nouns: in questions and queries. tellings: in passages.

    The last noun is in no question of training, validation or in-domain tests: only the out-of-domain one-hop set asks with it. The
    warm-started policy and the encoder know it.
    """

    name: str
    kind: str
    nouns: tuple[str, str, str]
    tellings: tuple[str, str, str]

    @property
    def usual_nouns(self) -> tuple[str, ...]:
        return self.nouns[:2]


def _aspect(name: str, kind: str, nouns: str, tellings: str) -> Aspect:
    return Aspect(name, kind, tuple(nouns.split()), tuple(tellings.split(" / ")))


VALUES = {
    "year": tuple(str(year) for year in range(1900, 1996, 4)),
    "number": tuple(str(number) for number in range(110, 350, 10)),
    "profession": tuple(
        "baker tailor surgeon notary mason glazier plumber cooper carpenter librarian beekeeper miller potter printer weaver "
        "jeweller saddler barber chemist geologist brewer cartographer midwife locksmith".split()
    ),
    "hobby": tuple(
        "chess fencing archery origami falconry juggling rowing pottery astronomy calligraphy gardening climbing skating knitting "
        "croquet birding sailing puppetry caving tennis darts bowling surfing boxing".split()
    ),
    "language": tuple(
        "latin basque welsh frisian tamil swahili quechua maltese estonian breton kurdish pashto zulu lao khmer tibetan georgian "
        "armenian navajo hausa yoruba malay faroese corsican".split()
    ),
    "award": tuple(
        "palm laurel garland rosette sceptre chalice halo comet crest torch beacon zenith aurora plume orb ribbon wreath sunburst "
        "starlet medallion tiara crown banner spire".split()
    ),
    "instrument": tuple(
        "oboe cello harp lute viola flute tuba bassoon zither banjo trumpet cornet fiddle gong marimba piccolo organ bugle sitar "
        "clarinet mandolin tambourine xylophone accordion".split()
    ),
    "industry": tuple(
        "mining shipping banking forestry textiles fisheries aviation insurance brewing printing tanning optics ceramics logistics "
        "railways publishing catering dredging telegraphy metallurgy cosmetics plastics robotics pharmacy".split()
    ),
    "product": tuple(
        "umbrellas lanterns violins tractors saddles mattresses compasses bicycles kettles ladders anchors spectacles typewriters "
        "clocks candles carpets helmets scissors telescopes radios turbines pencils boots mirrors".split()
    ),
    "colour": tuple(
        "scarlet turquoise ochre crimson indigo teal maroon ivory amber violet khaki lilac magenta beige coral mauve olive saffron "
        "vermilion azure fuchsia bronze charcoal emerald".split()
    ),
    "animal": tuple(
        "otter badger heron lynx bison ferret puma walrus gecko ibis mole stork falcon hedgehog tapir llama moose weasel raven "
        "panther lemur beaver osprey jackal".split()
    ),
    "region": tuple(
        "northmark eastfold westmere southmoor highvale lowfen midland oldshire newholm greenrift redstone whitecliff blackmoor "
        "longreach farpoint stillwater brightfield darkwood coldharbour warmsea deepdale broadmarsh steepridge flatland".split()
    ),
    "river": tuple(
        "arno brenta cam dordogne ebro fulda garonne havel isar jordan kura loire meuse neckar oder piave rhone saale tagus ural "
        "volga weser yonne zambezi".split()
    ),
    "festival": tuple(
        "masquerade regatta jubilee pageant harvestide lanternfest maypole bonfire parade gala tournament kermis jamboree rodeo "
        "luau mardi feria holi solstice midsummer yuletide passion vintage blossom".split()
    ),
    "dish": tuple(
        "goulash paella risotto borscht ramen tagine moussaka chowder ratatouille pierogi strudel kimchi polenta fondue haggis "
        "lasagne couscous dumplings gnocchi pancakes stew curry falafel biryani".split()
    ),
    "tree": tuple(
        "linden poplar cypress chestnut elm maple willow birch cedar rowan alder hazel sycamore larch juniper acacia walnut "
        "plane magnolia hornbeam yew spruce aspen mulberry".split()
    ),
}

ASPECTS: dict[str, tuple[Aspect, ...]] = {
    "person": (
        _aspect("birthplace", "city", "birthplace hometown origin", "was born in / first saw daylight at / grew up around"),
        _aspect("employer", "company", "employer workplace firm", "earns a salary at / holds a job with / clocks in for"),
        _aspect("spouse", "person", "spouse consort mate", "is married to / shares a home with / walked the aisle beside"),
        _aspect(
            "birthyear", "year", "birthyear birthdate nativity", "came into life during / turned one after / was christened early"
        ),
        _aspect("profession", "profession", "profession occupation trade", "makes a living as / trained to be / signs letters as"),
        _aspect("hobby", "hobby", "hobby pastime diversion", "spends evenings on / relaxes with / fills weekends doing"),
        _aspect(
            "language", "language", "language tongue speech", "speaks fluently only / writes diaries using / dreams and counts in"
        ),
        _aspect("award", "award", "award prize honour", "received the golden / was honoured by the / keeps on display a"),
        _aspect("instrument", "instrument", "instrument music device", "plays the / practises each morning the / performs upon a"),
    ),
    "company": (
        _aspect("founder", "person", "founder creator originator", "was started by / owes its existence to / was set up through"),
        _aspect(
            "headquarters", "city", "headquarters seat base", "runs its offices from / is directed out of / has its address in"
        ),
        _aspect(
            "rival",
            "company",
            "rival competitor opponent",
            "fights hardest against / battles for customers with / loses contracts to",
        ),
        _aspect(
            "opening", "year", "opening inception launch", "began trading in / sold its first goods in / welcomed clients since"
        ),
        _aspect("industry", "industry", "industry sector branch", "is active in / belongs to the business of / gets revenue from"),
        _aspect(
            "product",
            "product",
            "product bestseller offering",
            "is famous for selling / manufactures above all / ships worldwide its",
        ),
        _aspect("staff", "number", "staff headcount manpower", "pays wages to / employs a crew numbering / has people on payroll"),
        _aspect("colour", "colour", "colour logo hue", "paints its emblem / dresses all clerks in / prints every label in"),
        _aspect("mascot", "animal", "mascot animal creature", "shows on flags a / parades at fairs a / chose as lucky charm a"),
    ),
    "city": (
        _aspect("mayor", "person", "mayor leader governor", "is governed by / elected to its hall / takes orders of"),
        _aspect(
            "factory", "company", "factory plant mill", "hosts the works of / lives off the chimneys of / collects most taxes from"
        ),
        _aspect("twin", "city", "twin sister counterpart", "signed a pact with / exchanges pupils with / sends delegations to"),
        _aspect("region", "region", "region province county", "lies within / is on maps of / votes inside"),
        _aspect("river", "river", "river stream waterway", "stands on the banks of / is flooded by / draws water out of"),
        _aspect(
            "festival",
            "festival",
            "festival carnival feast",
            "dances each summer at / closes its streets for / draws crowds during",
        ),
        _aspect(
            "population",
            "number",
            "population residents inhabitants",
            "is inhabited by / counted in the census / has a community of",
        ),
        _aspect("dish", "dish", "dish cuisine speciality", "serves visitors / cooks on sundays / is known to gourmets for"),
        _aspect("tree", "tree", "tree flora timber", "planted along avenues the / shades squares under the / protects by law the"),
    ),
}
TYPES = tuple(ASPECTS)

ASPECT_QUESTIONS = ("what is the {noun} of {x} ?", "tell me the {noun} of {x} .")
STRANGE_QUESTIONS = ("{x} has which {noun} ?", "name the {noun} that {x} has .")  # out of domain
CHAIN_QUESTIONS = ("what is the {noun2} of the {noun1} of {x} ?", "tell me the {noun1} of {x} , then its {noun2} .")
OLDER_QUESTIONS = ("who came earlier by {noun} , {x} or {y} ?", "by {noun} , which is earlier , {x} or {y} ?")
SAME_QUESTIONS = ("do {x} and {y} have the same {noun} ?", "is the {noun} of {x} also that of {y} ?")
QUERIES = ("{x} {noun}", "{noun} of {x}", "what is the {noun} of {x}")  # ways to search for an aspect
VAGUE_QUERIES = ("{x}", "facts about {x}", "{x} story")
RUMOUR = "rumour wrongly adds : {telling} {value} ."  # a misleading passage
NO_ANSWER = "unknown"


def name_pools() -> dict[str, tuple[list[str], list[str]]]:
    """{type: (first words, second words)}: invented words, all different, always the same."""
    rng = random.Random("bridge_jax mini names")
    onsets = "b br c cr d dr f g gr h j k l m n p pr qu r s st t tr v w z".split()
    vowels = "a e i o u ai ea ou".split()
    endings = {"person": ("n", "l", "ra", "s"), "company": ("x", "tek", "co", "m"), "city": ("by", "ford", "ton", "wick")}
    known = {word for values in VALUES.values() for word in values} | set(_text_words())
    pools = {}
    for kind in TYPES:
        words: list[str] = []
        while len(words) < 2 * POOL:
            word = rng.choice(onsets) + rng.choice(vowels) + rng.choice("l m n r s t d v k".split()) + rng.choice("aeiou")
            word += rng.choice(endings[kind])
            if word not in known:
                known.add(word)
                words.append(word)
        pools[kind] = (words[:POOL], words[POOL:])
    return pools


def _text_words() -> list[str]:
    """Every word of templates, nouns and tellings."""
    texts = [
        *ASPECT_QUESTIONS,
        *STRANGE_QUESTIONS,
        *CHAIN_QUESTIONS,
        *OLDER_QUESTIONS,
        *SAME_QUESTIONS,
        *QUERIES,
        *VAGUE_QUERIES,
        RUMOUR,
        NO_ANSWER,
        "yes no",
    ]
    texts += [text for aspects in ASPECTS.values() for aspect in aspects for text in (*aspect.nouns, *aspect.tellings)]
    return [word for text in texts for word in text.split() if not word.startswith("{")]


def vocabulary() -> list[str]:
    """Every word of the world, sorted: what its tokenizer knows whole."""
    words = set(_text_words())
    words |= {word for values in VALUES.values() for word in values}
    words |= {word for pools in name_pools().values() for pool in pools for word in pool}
    return sorted(words)
