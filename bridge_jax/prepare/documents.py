"""Documents as people keep them (text, Markdown, HTML, PDF, JSON lines of passages) -> title, sections, paragraphs."""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge_jax.errors import UserError
from bridge_jax.retrieval.passages import SUFFIXES as PASSAGES
from bridge_jax.retrieval.passages import passage_of, read_records

KINDS = {
    ".txt": "text", ".text": "text", ".md": "markdown", ".markdown": "markdown", ".html": "html", ".htm": "html", ".xhtml": "html",
    ".pdf": "pdf",
}  # fmt: skip
NOT_TEXT = ("script", "style", "nav", "footer", "aside", "form", "noscript", "template", "svg", "iframe", "button")
BLOCKS = (
    "p", "div", "section", "article", "main", "header", "ul", "ol", "li", "dl", "dt", "dd", "table", "tr", "pre", "blockquote",
    "figure", "figcaption",
)  # fmt: skip


@dataclass(frozen=True)
class Section:
    """heading: "" before the first one. paragraphs: without line breaks, none empty."""

    heading: str
    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class Document:
    """name: of the file below the corpus folder, or the id of a JSON line. kind: one of `KINDS`' values or "passage". remarks: what
    the library that read the file found wrong with it and got over."""

    name: str
    title: str
    sections: tuple[Section, ...]
    kind: str
    remarks: tuple[str, ...] = ()


class MissingLibrary(UserError):
    """Not the file's fault."""


def read_documents(corpus: Path, files: Sequence[Path], faults: list[str]) -> Iterator[Document]:
    """Every document of the corpus, in the order of its files (`files_of`).

    faults: gets a line for each file that cannot be read, which is passed over.

    Raises:
      UserError: a library that is missing, with the command that installs it.
    """
    for path in files:
        name = path.relative_to(corpus).as_posix() if corpus.is_dir() else path.name
        try:
            if path.name.endswith(PASSAGES):
                for _, record in read_records(path):
                    passage = passage_of(record)
                    yield Document(passage.id, passage.title, (Section("", _paragraphs(passage.text)),), "passage")
            else:
                yield read_document(path, name)
        except MissingLibrary:
            raise
        except UserError as error:
            faults.append(str(error))
        except OSError as error:
            faults.append(f"{path}: cannot be read ({error.strerror}); make it readable, or take it out of the folder")


def files_of(corpus: Path, but: Sequence[Path] = ()) -> tuple[list[Path], list[Path]]:
    """The documents among a file or the files of a folder (and the folders in it), and its other files, by name; hidden ones aside.

    but: files or folders that are no part of the corpus, such as the questions and what an earlier run wrote.

    Raises:
      UserError: nothing there.
    """
    known = (*KINDS, *PASSAGES)
    if not corpus.exists():
        raise UserError(f"--corpus={corpus}: no such file or folder; give a folder of documents or a JSON-lines file of passages")
    if corpus.is_file():
        if not corpus.name.lower().endswith(known):
            raise UserError(f"--corpus={corpus}: not one of {', '.join(known)}; convert the file, or give the folder it lies in")
        return [corpus], []
    apart = {path.resolve() for path in but}
    files, others = [], []
    for path in sorted(corpus.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(corpus).parts)
        if path.is_file() and not hidden and apart.isdisjoint((path.resolve(), *path.resolve().parents)):
            (files if path.name.lower().endswith(known) else others).append(path)
    if not files:
        raise UserError(f"--corpus={corpus}: holds no document; it needs files that end with {', '.join(known)}")
    return files, others


def read_document(path: Path, name: str) -> Document:
    """One file by its ending. A file without text (a scanned PDF) is a document without sections."""
    kind, remarks = KINDS[path.suffix.lower()], []
    if kind == "pdf":
        title, sections, remarks = _pdf(path)
    elif kind == "html":
        title, sections = _html(path.read_bytes(), path)
    else:
        title, sections = (_markdown if kind == "markdown" else _text)(_decoded(path))
    found = tuple(section for section in sections if section.paragraphs)
    return Document(name, title or path.stem.replace("_", " "), found, kind, tuple(remarks))


def _decoded(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None


def _paragraphs(text: str) -> tuple[str, ...]:
    """Split at empty lines; white space collapsed."""
    return tuple(filter(None, (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))))


def _text(text: str) -> tuple[str, list[Section]]:
    """A short first line that is no sentence, with an empty line behind it, is the title."""
    paragraphs = _paragraphs(text)
    titled = len(paragraphs) > 1 and len(paragraphs[0].split()) <= 12 and not paragraphs[0].endswith((".", "!", "?", ":", ";", ","))
    return (paragraphs[0], [Section("", paragraphs[1:])]) if titled else ("", [Section("", paragraphs)])


def _markdown(text: str) -> tuple[str, list[Section]]:
    """Headings make sections, the first one of level 1 is the title. Links and emphasis keep their words alone."""
    parser = _library("markdown_it", "markdown-it-py").MarkdownIt("commonmark").enable("table")
    text = re.sub(r"\A---\n.*?\n---\n", "", text.replace("\r\n", "\n"), flags=re.DOTALL)  # front matter
    blocks, level = [], 0
    for token in parser.parse(text):
        if token.type == "heading_open":
            level = int(token.tag[1])
        elif token.type == "inline":
            words = " ".join("".join(_inline(child) for child in token.children or ()).split())
            blocks.append((level, words))
            level = 0
        elif token.type in ("fence", "code_block"):
            blocks.append((0, " ".join(token.content.split())))
    return _sections(blocks)


def _inline(token) -> str:
    if token.type in ("softbreak", "hardbreak"):
        return " "
    return "" if token.type == "html_inline" else token.content


def _html(raw: bytes, path: Path) -> tuple[str, list[Section]]:
    """The text of <main>, <article> or <body> without navigation; <title> or the first <h1> is the title."""
    soup = _library("bs4", "beautifulsoup4").BeautifulSoup(raw, "html.parser")
    title = " ".join(soup.title.get_text().split()) if soup.title else ""
    body = soup.find("main") or soup.find("article") or soup.body or soup
    for tag in body.find_all(NOT_TEXT):
        tag.decompose()
    # Private-use characters as marks: line breaks in the source mean nothing, tags do.
    for tag in body.find_all(re.compile(r"^h[1-6]$")):
        heading = " ".join(tag.get_text(" ").split())
        tag.replace_with(f"\ue000\ue001{tag.name[1]}{heading}\ue000")
    for tag in body.find_all(BLOCKS):
        tag.insert_before("\ue000")
        tag.insert_after("\ue000")
    for tag in body.find_all(("br", "td", "th")):
        tag.insert_after(" ")
    blocks = []
    for part in body.get_text().split("\ue000"):
        words = " ".join(part.split())
        marked = re.match("\ue001([1-6])(.*)", words)
        blocks.append((int(marked[1]), marked[2].strip()) if marked else (0, words))
    first, sections = _sections(blocks)
    return title or first, sections


def _pdf(path: Path) -> tuple[str, list[Section], list[str]]:
    pypdf = _library("pypdf", "pypdf")
    with _heard("pypdf") as remarks:
        try:
            reader = pypdf.PdfReader(path)
            if reader.is_encrypted and not reader.decrypt(""):
                raise UserError(f"{path}: needs a password; save it without one")
            pages = [page.extract_text() for page in reader.pages]
            title = (reader.metadata.title if reader.metadata else None) or ""
        except UserError:
            raise
        except Exception as error:  # damage shows as an error of any kind
            said = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{path}: not a readable PDF ({said}); save it again, or take it out of the folder") from error
    text = re.sub(r"(?<=[a-z])-\n(?=[a-z])", "", "\n".join(pages))  # words broken at the end of a line
    return " ".join(title.split()), [Section("", _paragraphs(text))], remarks


@contextlib.contextmanager
def _heard(name: str) -> Iterator[list[str]]:
    """What a library logs, as a list and nowhere else."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, handler = logging.getLogger(name), Listener()
    passed_on, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.propagate = passed_on


def _sections(blocks: list[tuple[int, str]]) -> tuple[str, list[Section]]:
    """(level of a heading or 0, words) in order -> (the first heading of level 1, sections)."""
    title, heading, paragraphs, sections = "", "", [], []
    for level, words in blocks:
        if level == 1 and not title:
            title = words
        elif level:
            sections.append(Section(heading, tuple(paragraphs)))
            heading, paragraphs = words, []
        elif words:
            paragraphs.append(words)
    return title, [*sections, Section(heading, tuple(paragraphs))]


def _library(module: str, package: str):
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise MissingLibrary(f"{package} is not installed, which reads such documents; pip install 'bridge-jax[prepare]'") from None
