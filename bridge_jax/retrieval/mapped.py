"""Files that stay memory-mapped while a process runs, and must stay what they were when it opened them."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import BinaryIO

import numpy as np

from bridge_jax.errors import UserError


class FileChanged(UserError):
    """A mapped file is no longer what it was. What has been read of it may not fit what comes: the process has to end."""


class Watch:
    """Tells whether an open file still is what it was."""

    def __init__(self, stream: BinaryIO, file: Path):
        self._file, self._descriptor = file, os.dup(stream.fileno())
        # Not at the interpreter's end: threads may still read then.
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        self.stamp = self._now()

    def _now(self) -> tuple[int, int]:
        # Not ctime, which a link or a rename changes. What is put in the file's place under its name is another file: this one,
        # and the mapping, stay.
        stat = os.fstat(self._descriptor)
        return stat.st_size, stat.st_mtime_ns

    def check(self) -> None:
        """Before every read: to touch a page that is cut off ends the process (SIGBUS), which cannot be caught, and what is cut off
        between this look and the read still does.

        Raises:
          FileChanged: the file has another size or time than when it was opened, or is gone (a network's).
        """
        try:
            same = self._now() == self.stamp
        except OSError:
            same = False
        if not same:
            raise FileChanged(f"{self._file}: was changed while it was read; put the old file back and run the same command again")


class MappedArray(np.memmap):
    """An array in a file, read-only, that looks at the file before it is indexed. Use `open_array`."""

    watch: Watch | None

    def __array_finalize__(self, parent):
        super().__array_finalize__(parent)
        self.watch = getattr(parent, "watch", None) if self._mmap is not None else None  # None: a copy, in memory

    def __getitem__(self, rows):
        if self.watch is not None:
            self.watch.check()
        return np.asarray(super().__getitem__(rows))  # a plain array: what is made of it looks at nothing


def open_array(file: Path, dtype: np.dtype | str, offset: int, shape: tuple[int, int]) -> MappedArray:
    with open(str(file), "rb") as stream:
        watch = Watch(stream, file)  # before the file is mapped: nothing may happen in between
        array = MappedArray(stream, dtype, "r", offset, shape)
    array.watch = watch
    return array
