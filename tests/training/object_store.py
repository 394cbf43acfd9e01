"""A bucket in memory, behind `etils.epath`, as strict as a real one: no folders, no appending, no half-written objects."""

import fnmatch
import io

from etils.epath import backend, gpath, stat_utils


class ObjectStore(backend.Backend):
    """objects: {"gs://bucket/name": bytes}. times: of the last change, 0 where none is given. writes: names, in order."""

    def __init__(self):
        self.objects: dict[str, bytes] = {}
        self.times: dict[str, int] = {}
        self.writes: list[str] = []

    def install(self, monkeypatch) -> None:
        monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "gs", self)
        monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)

    def open(self, path, mode):
        if "a" in mode or "+" in mode:
            raise NotImplementedError("objects cannot be appended to")
        if "w" in mode:
            return _Upload(self, path, text="b" not in mode)
        if path not in self.objects:
            raise FileNotFoundError(path)
        data = io.BytesIO(self.objects[path])
        return data if "b" in mode else io.TextIOWrapper(data, encoding="utf-8")

    def _below(self, path):
        prefix = path.rstrip("/") + "/"
        return [name.removeprefix(prefix) for name in self.objects if name.startswith(prefix)]

    def exists(self, path):
        return path in self.objects or bool(self._below(path))

    def isdir(self, path):
        return bool(self._below(path))

    def listdir(self, path):
        return sorted({name.split("/")[0] for name in self._below(path)})

    def glob(self, path):
        return [name for name in self.objects if fnmatch.fnmatch(name, path) and name.count("/") == path.count("/")]

    def remove(self, path):
        if path not in self.objects:
            raise FileNotFoundError(path)
        del self.objects[path]

    def rmtree(self, path):
        for name in self._below(path):
            del self.objects[f"{path.rstrip('/')}/{name}"]

    def stat(self, path):
        if path not in self.objects:
            raise FileNotFoundError(path)
        return stat_utils.StatResult(False, len(self.objects[path]), self.times.get(path, 0))

    def _refuse(self, *args, **kwargs):
        raise NotImplementedError("an object store has neither folders nor renames")

    walk = makedirs = mkdir = rename = replace = copy = _refuse


class _Upload(io.BytesIO):
    """Appears in the store, whole, when it is closed."""

    def __init__(self, store, path, text):
        super().__init__()
        self._store, self._path, self._text = store, path, text

    def write(self, data):
        return super().write(data.encode() if self._text else data)

    def close(self):
        if not self.closed:
            self._store.objects[self._path] = self.getvalue()
            self._store.writes.append(self._path)
        super().close()
