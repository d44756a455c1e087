"""Keeps the user's files as they are while ``npurun verify`` runs a script: what is written goes to a folder of its
own, which reads consult first.

Covered are Python's own files and directories (``open``, ``os``, ``pathlib``, ``shutil``) and what Keras and numpy
write through them, HDF5 files, TensorFlow's summaries, checkpoints, SavedModels and ``tf.io``. Not covered are other
programs, and libraries that write by themselves.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import glob
import inspect
import io
import itertools
import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

COVERED = (
    "files written by Python, Keras, numpy and HDF5, "
    "and TensorFlow's summaries, checkpoints, SavedModels and tf.io"
)

_SYSTEM = ("/dev/", "/proc/", "/sys/")
_REMOVERS = ("remove", "unlink", "rmdir", "DeleteFile", "DeleteRecursively")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# Functions and methods, by what they do to the path that they are given. "change" begins with a copy of the user's
# file, "open" if the mode allows to write, "manage" with a part of it. "write second" has the path as second argument.
_CALLS = {
    "open": "builtins.open io.open os.open h5py.File.__init__ gfile.WritableFile",
    "read": "os.stat os.lstat os.access os.readlink os.link os.symlink os.listxattr os.getxattr os.statvfs "
    "gfile.BufferedInputStream gfile.FileExists gfile.IsDirectory gfile.Stat gfile.CopyFile tf.io.read_file "
    "tf.train.Checkpoint.restore tf.train.Checkpoint.read tf.train.latest_checkpoint tf.train.load_checkpoint "
    "tf.train.list_variables tf.compat.v1.train.Saver.restore tf.saved_model.load tf.data.Dataset.load "
    "tf.data.experimental.make_csv_dataset tf.data.TextLineDataset.__init__ tf.data.TFRecordDataset.__init__",
    "match": "tf.data.Dataset.list_files",
    "change": "os.truncate os.chmod os.chown os.setxattr os.removexattr os.utime os.rename os.replace "
    "gfile.RenameFile",
    "manage": "tf.train.CheckpointManager.__init__",
    "write": "os.mkdir os.remove os.unlink os.rmdir gfile.CreateDir gfile.RecursivelyCreateDir gfile.DeleteFile "
    "gfile.DeleteRecursively tf.train.Checkpoint.save tf.train.Checkpoint.write tf.compat.v1.train.Saver.save "
    "tf.summary.create_file_writer summary.create_file_writer_v2 tf.compat.v2.summary.create_file_writer "
    "events.EventsWriter tf.saved_model.save tf.io.write_file tf.io.TFRecordWriter.__init__ tf.data.Dataset.save "
    "tf.data.Dataset.cache",
    "write second": "os.rename os.replace os.link os.symlink gfile.RenameFile gfile.CopyFile",
}
_PATH_PARAMETERS = re.compile(
    "path|file|filenames?|file_prefix|save_path|logdir|export_dir|directory|src|name|checkpoint_dir|file_pattern|ckpt_dir_or_file"
)
_MOST_FILES = 20_000  # files whose changes are looked for


class Redirection:
    """The redirection of this process.

    Args:
        directory: of all runs, where nothing is redirected.

    What ``tempfile`` makes is not redirected: sockets and other programs must find it where it is.
    """

    def __init__(self, directory: str) -> None:
        self._folder = ""
        # Both are real paths, as links may lead to one folder by two ways.
        self._runs_folder = os.path.realpath(directory) + os.sep
        self._temporary_folder = os.path.realpath(tempfile.gettempdir()) + os.sep
        # What was there before may be the user's.
        self._user_names = set(os.listdir(self._temporary_folder))
        self._lstat = os.lstat  # before it is redirected

    def copy(self, folder: Path) -> None:
        """Let another folder begin with what has been written."""
        # The folder is made only when something is written.
        if os.path.exists(self._folder):
            shutil.copytree(self._folder, folder)

    def move(self, folder: Path) -> None:
        """Write to another folder from now on; all ranks of a run write to the same."""
        self._folder = str(folder)

    def _redirected(self, path: Any) -> str | None:
        """Return the path in the folder that stands for a path; None where nothing is redirected."""
        if not isinstance(path, (str, bytes, os.PathLike)) or not path:
            return None
        text = os.fsdecode(os.fspath(path))
        full_path = os.path.abspath(text)
        folder = full_path + os.sep
        is_direct = folder.startswith((*_SYSTEM, self._runs_folder)) or "://" in text
        if is_direct or self._is_of_tempfile(folder):
            return None
        return self._folder + full_path

    def _is_of_tempfile(self, folder: str) -> bool:
        """Return True for the temporary folder itself, and for what ``tempfile`` makes in it, in any process."""
        if not folder.startswith(self._temporary_folder):
            return False
        name = folder[len(self._temporary_folder) :].partition(os.sep)[0]
        if not name:
            return True
        if name in self._user_names:
            return False
        # What the script itself makes in that folder is redirected, so that a name found there is a file of others.
        with contextlib.suppress(OSError):
            self._lstat(self._temporary_folder + name)
            return True
        return _is_called_by_tempfile()

    def _to_read(self, path: Any) -> Any:
        """Return the path of what was written before; else the path itself."""
        if isinstance(path, (list, tuple)):
            return list(map(self._to_read, path))
        redirected = self._redirected(path)
        if redirected is not None and self._is_readable(redirected):
            return redirected
        # A manager gives out paths of checkpoints whose tensors are the user's.
        is_own = isinstance(path, str) and path.startswith(self._folder + os.sep)
        if is_own and not self._is_readable(path):
            user_path = path.removeprefix(self._folder)
            # A directory that is missing here has still to be made.
            if not os.path.isdir(user_path):
                return user_path
        return path

    def _is_readable(self, path: str) -> bool:
        """Return True for a file, a directory or a checkpoint in the folder."""
        is_checkpoint = self._is_there(f"{path}.index") and glob.glob(f"{glob.escape(path)}.data-*")
        return bool(is_checkpoint) or self._is_there(path)

    def _is_there(self, path: str) -> bool:
        try:
            self._lstat(path)
        except (OSError, ValueError):
            return False
        return True

    def _to_match(self, pattern: Any) -> Any:
        """Return the paths of files that match one or more patterns; the patterns if none was written before."""
        patterns = [pattern]
        if isinstance(pattern, (list, tuple)):
            patterns = list(pattern)
        if any(self._redirected(text) is None for text in patterns):
            return pattern
        paths = [path for text in patterns for path in sorted(glob.glob(os.fsdecode(text)))]
        to_read = self._to_read(paths)
        if to_read == paths:
            return pattern
        return to_read

    def _to_write(self, path: Any) -> Any:
        """Return the path to write to instead; the path itself where nothing is redirected."""
        redirected = self._redirected(path)
        if redirected is None:
            return path
        os.makedirs(os.path.dirname(redirected), exist_ok=True)
        return redirected

    def _to_open(self, path: Any, mode: str | bytes | int | None) -> Any:
        """Return the path to open with a mode, or with flags of ``os.open``."""
        if isinstance(mode, bytes):
            mode = mode.decode()
        if isinstance(mode, int):
            writes = bool(mode & _WRITES)
            empties = bool(mode & os.O_TRUNC)
        else:
            writes = not set(mode or "r").isdisjoint("wax+")
            empties = "w" in (mode or "r")
        if not writes:
            return self._to_read(path)
        # What is lost at once needs no copy. What is opened may be no path, but a number or a file.
        if empties and self._redirected(path) is not None and not os.path.isdir(path):
            return self._to_write(path)
        return self._to_change(path)

    def _to_manage(self, path: Any) -> Any:
        """Return the directory for a manager of checkpoints: it gets copies of their names, not of their tensors."""
        return self._to_change(path, _without_tensors)

    def _to_change(self, path: Any, ignore: Any = None) -> Any:
        """Return the path to write to instead, where a copy of the user's file or directory is."""
        target = self._to_write(path)
        # Only the user's own file needs a copy, and only once.
        if target is path or self._is_there(target) or not os.path.exists(path):
            return target
        # All ranks may come here at once: each must find a whole copy, and replace none that is being written to.
        folder = tempfile.mkdtemp(dir=self._runs_folder)
        copy = os.path.join(folder, "copy")
        if os.path.isdir(path):
            shutil.copytree(path, copy, ignore=ignore)
            place = os.rename
        else:
            shutil.copyfile(path, copy)
            place = os.link
        try:
            place(copy, target)
        except OSError:
            # Another rank was faster, or the file system has no links.
            if not self._is_there(target):
                os.rename(copy, target)
        shutil.rmtree(folder)
        return target

    def install(self) -> None:
        """Redirect Python's own calls."""
        modules = (builtins, io, os)
        originals = [dict(vars(module)) for module in modules]
        self._wrap_calls(builtins=builtins, io=io, os=os)
        scandir = os.scandir

        def merged(path: Any = ".") -> Any:
            redirected = self._redirected(path)
            if isinstance(path, bytes) or redirected is None or not self._is_there(redirected):
                return scandir(path)
            files: dict[str, Any] = {}
            # The user may have no such directory.
            with contextlib.suppress(OSError):
                files.update((file.name, file) for file in scandir(path))
            files.update((file.name, file) for file in scandir(redirected))
            return _DirectoryListing(iter(files.values()))

        os.scandir = merged
        os.listdir = lambda path=".": [file.name for file in merged(path)]
        replaced = {}
        for module, functions in zip(modules, originals):
            for name, original in functions.items():
                if getattr(module, name) is not original:
                    replaced[id(original)] = getattr(module, name)
        _replace_copies(replaced)

    def install_tensorflow(self, tf: Any) -> None:
        """Redirect what TensorFlow writes and reads by itself, and HDF5."""
        from npu_device._src import compat

        functions = compat.file_functions()
        self._wrap_calls(tf=tf, h5py=sys.modules.get("h5py"), **functions)
        gfile = functions["gfile"]
        children = gfile.GetChildren
        matching = gfile.GetMatchingFiles

        def listed(path: Any) -> Any:
            if self._redirected(path) is None:
                return children(path)
            return os.listdir(os.fsdecode(path))

        def matched(pattern: Any) -> Any:
            if self._redirected(pattern) is None:
                return matching(pattern)
            text = os.fsdecode(pattern)
            start = "./" * (not os.path.dirname(text))  # as TensorFlow's listings begin
            return sorted(start + path for path in glob.glob(text))

        gfile.GetChildren = listed
        gfile.GetMatchingFiles = matched

    def _wrap_calls(self, **owners: Any) -> None:
        for access, names in _CALLS.items():
            for path in names.split():
                root, *attributes, name = path.split(".")
                if owners.get(root):
                    owner = functools.reduce(getattr, attributes, owners[root])
                    self._wrap(owner, name, access)

    def _wrap(self, owner: Any, name: str, access: str) -> None:
        """Change a path among the arguments of a function, and in its result."""
        original = getattr(owner, name)
        position, keyword = _path_parameter(original)
        changes = {
            "manage": self._to_manage,
            "read": self._to_read,
            "match": self._to_match,
            "change": self._to_change,
        }
        if access == "write second":
            position += 1
            keyword = "dst"

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            arguments: dict = {**dict(enumerate(args)), **kwargs}
            key: Any = keyword
            if position < len(args):
                key = position
            if key in arguments:
                path = arguments[key]
                directory = arguments.pop("dir_fd", None)
                # A path may be relative to an open directory.
                if directory is not None:
                    folder = os.readlink(f"/proc/self/fd/{directory}")
                    path = os.path.join(folder, os.fsdecode(path))
                if access == "open":
                    mode = arguments.get("mode", arguments.get("flags"))
                    redirected = self._to_open(path, arguments.get(position + 1, mode))
                else:
                    redirected = changes.get(access, self._to_write)(path)
                arguments[key] = redirected
                # The user's file is left, as if it were removed.
                if name in _REMOVERS and os.path.lexists(path) and not self._is_there(redirected):
                    return None
            by_position = [arguments.pop(position) for position in range(len(args))]
            returned = original(*by_position, **arguments)
            if isinstance(returned, str) and returned.startswith(self._folder + os.sep):
                return returned.removeprefix(self._folder)
            return returned

        setattr(owner, name, wrapped)


def _replace_copies(functions: dict[int, Any]) -> None:
    """Let modules that are imported already use other functions, by the ids of those that they may have copied."""
    loaded = list(sys.modules.values())
    owners: list[Any] = [each for each in loaded if "__file__" in getattr(each, "__dict__", ())]
    # pathlib keeps them in a class until Python 3.10, and glob from Python 3.13 on.
    for module in (pathlib, glob):
        owners += filter(inspect.isclass, vars(module).values())
    for owner in owners:
        for name, copy in list(vars(owner).items()):
            original = copy
            if isinstance(copy, staticmethod):
                original = copy.__func__
            function = functions.get(id(original))
            if function is None:
                continue
            if inspect.isclass(owner):
                function = staticmethod(function)
            setattr(owner, name, function)


def _is_called_by_tempfile() -> bool:
    frame = inspect.currentframe()
    # The functions of this file come first, and then at most an opener of ``tempfile``.
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == "tempfile":
            return True
        frame = frame.f_back
    return False


def _path_parameter(function: Any) -> tuple[int, str]:
    """Return position and name of the path among the parameters of a function; the first if it doesn't tell them."""
    with contextlib.suppress(TypeError, ValueError):
        for position, name in enumerate(inspect.signature(function).parameters):
            if _PATH_PARAMETERS.fullmatch(name):
                return position, name
    return 0, ""


def _without_tensors(folder: str, names: list[str]) -> list[str]:
    """Return the names that aren't copied for a manager, which reads the list of checkpoints and looks for indices."""
    return [name for name in names if name != "checkpoint" and not name.endswith(".index")]


class _DirectoryListing(contextlib.ExitStack, Iterator):
    """The files of a directory as ``os.scandir`` gives them."""

    def __init__(self, files: Iterator) -> None:
        super().__init__()
        self._files = files

    def __next__(self) -> Any:
        return next(self._files)


def changed_since(
    begin: float, folders: Iterable[Path], runs_folder: Path, limit: int = _MOST_FILES
) -> list[str]:
    """Return which of the first files below some folders have changed; none of the directory of all runs. ``limit``:
    how many files and folders are looked at.
    """
    changed = set()
    visited = set()
    file_count = 0
    for root, directories, names in itertools.chain.from_iterable(map(os.walk, folders)):
        # A folder of data may hold millions of files. One folder may lie in the other.
        if file_count >= limit:
            break
        if root in visited:
            directories.clear()
            continue
        visited.add(root)
        directories[:] = sorted(
            name
            for name in directories
            if not name.startswith((".", "__pycache__")) and Path(root, name) != runs_folder
        )
        for name in names[: limit - file_count]:
            path = os.path.join(root, name)
            # A file of another program may vanish at any time, and a link may lead nowhere.
            with contextlib.suppress(OSError):
                if os.stat(path).st_ctime > begin:
                    changed.add(path)
        # A folder without files takes time, too.
        file_count += 1 + len(names)
    return sorted(changed)
