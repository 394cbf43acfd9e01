"""Questions as a TensorFlow Datasets builder in ArrayRecord form, read by random access without TensorFlow.

A question file is parsed and checked once (`qa.read_file`), written by the builder into the cache under the hash of the file's
content, and from then on read through `tfds.data_source`: rows are decoded when asked for, so 170 k questions cost no memory and no
start-up time.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import tensorflow_datasets as tfds

from bridge_jax.data.cache import atomic_folder, cache_dir
from bridge_jax.data.formats import Question
from bridge_jax.errors import UserError

SPLIT = "rows"  # one file is one split; tfds reserves "all"


class BridgeQa(tfds.core.GeneratorBasedBuilder):
    """The builder `bridge_qa`: one internal row an example, in the order of the file."""

    VERSION = tfds.core.Version("1.0.0")
    # tfds looks beside the builder's source for checksums of downloads, through an undeclared dependency. There are no downloads.
    code_path = None

    def __init__(self, questions: Sequence[Question] = (), **kwargs):
        self._questions = questions  # empty when an existing folder is opened
        super().__init__(**kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text
        features = tfds.features.FeaturesDict(
            {
                "id": text(),
                "question": text(),
                "golds": tfds.features.Sequence(text()),
                "gold_passage_ids": tfds.features.Sequence(text()),
                "dataset": text(),
            }
        )
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {SPLIT: self._generate_examples()}

    def _generate_examples(self):
        for row, q in enumerate(self._questions):
            yield (
                row,
                {
                    "id": q.id,
                    "question": q.question,
                    "golds": list(q.golds),
                    "gold_passage_ids": list(q.gold_passage_ids),
                    "dataset": q.dataset,
                },
            )


class QuestionSet(Sequence):
    """A read-only sequence of `Question` over a tfds data source; an index decodes one row, a slice gives a list."""

    def __init__(self, source, size: int):
        self._source, self._size = source, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        row = range(self._size)[index]  # negative indices and IndexError as a list has them
        return _decode(self._source[row])


def _decode(example: dict) -> Question:
    def text(value) -> str:
        return bytes(value).decode("utf-8")

    return Question(
        id=text(example["id"]),
        question=text(example["question"]),
        golds=tuple(map(text, example["golds"])),
        gold_passage_ids=tuple(map(text, example["gold_passage_ids"])),
        dataset=text(example["dataset"]),
    )


def open_questions(path: Path, dataset: str, read: Callable[[Path, str], list[Question]]) -> QuestionSet:
    """Open the prepared form of `path`, preparing it first when the cache has none for this content. `read` may raise UserError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    # The dataset's name comes from the path and the parser from this code, so both belong to the key.
    digest.update(f"|{dataset}|{BridgeQa.VERSION}".encode())
    folder = cache_dir() / "questions" / digest.hexdigest()[:24]
    if not folder.exists():
        questions = read(path, dataset)
        with atomic_folder(folder) as fresh:
            tfds.disable_progress_bar()
            with contextlib.redirect_stdout(io.StringIO()):  # tfds announces a download; there is none
                BridgeQa(questions, data_dir=fresh, file_format="array_record").download_and_prepare()
    try:
        source = tfds.data_source(
            "bridge_qa", split=SPLIT, data_dir=folder, download=False, builder_kwargs={"file_format": "array_record"}
        )
        questions = QuestionSet(source, len(source))
        _ = questions[0]  # a damaged file shows here, not in the middle of a run
        return questions
    except Exception as error:  # entries are written whole: something outside damaged this one
        raise UserError(f"the prepared questions in {folder} are damaged; delete that folder and run again") from error
