"""Files that appear whole or not at all, and folders that are proved before work begins."""

import contextlib
import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quantlab.errors import InputError

MINIMUM_FREE_BYTES = 16 * 2**20


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to; flushed to disk and renamed on success, removed on
    failure.

    The name carries machine and process, so that :func:`remove_stale` can tell what a killed process left
    behind.  A link is followed, so its target is what changes.  Raises InputError for a device, pipe or folder:
    renaming would replace it, and for root even /dev/null can be replaced.
    """
    path = Path(os.path.realpath(path))
    if os.path.lexists(path) and not path.is_file():
        raise InputError("output", str(path), "a regular file or a free name; something else is in the way")
    prefix = f".{path.name}.{_machine()}.{os.getpid()}."
    handle, name = tempfile.mkstemp(prefix=prefix, suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        # mkstemp makes private files; results are as readable as any file that the user creates.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary folder beside ``path`` to write files to; renamed on success, removed with all it holds on failure.

    Named as :func:`atomic_path` names files.  Raises InputError, argument "output", unless ``path`` is free or an empty
    folder in a place that can be written to.
    """
    path = Path(os.path.realpath(path))
    if os.path.lexists(path) and (not path.is_dir() or any(path.iterdir())):
        raise InputError("output", str(path), "a free name or an empty folder; something else is in the way")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        name = tempfile.mkdtemp(
            prefix=f".{path.name}.{_machine()}.{os.getpid()}.", suffix=".tmp", dir=path.parent
        )
    except OSError as error:
        expected = f"a place that can be written to ({error.strerror})"
        raise InputError("output", str(path), expected) from error
    temporary = Path(name)
    try:
        yield temporary
        for file in temporary.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o777 & ~mask)
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` to ``path``, all or nothing."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def remove_stale(folder: str | os.PathLike[str]) -> int:
    """Delete the temporary files and folders of processes of this machine that are gone; returns how many."""
    removed = 0
    for path in Path(folder).glob(f".*.{_machine()}.*.tmp"):
        process = path.name.split(".")[-3]
        if process.isdigit() and not _alive(int(process)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            removed += 1
    return removed


def _machine() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def check_output_folder(path: str | os.PathLike[str]) -> Path:
    """Create the folder ``path`` if needed and prove that it takes files; returns it as a Path.

    A probe file is written and removed rather than permission bits read: those say nothing for root, on a
    read-only file system, or on a full disk.  Raises InputError, argument "output", if it cannot be used.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
        free = shutil.disk_usage(path).free
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError("output", str(path), "a folder, but a file is in the way") from error
    except OSError as error:
        raise InputError(
            "output", str(path), f"a folder that can be written to ({error.strerror})"
        ) from error
    if free < MINIMUM_FREE_BYTES:
        raise InputError(
            "output", str(path), f"at least {MINIMUM_FREE_BYTES >> 20} MiB of free space, not {free} bytes"
        )
    return path


def check_output_place(path: str | os.PathLike[str]) -> None:
    """As :func:`check_output_folder`, but makes nothing: the nearest folder above ``path`` that is there is proved."""
    place = Path(os.path.realpath(path))
    while not os.path.lexists(place):
        place = place.parent
    try:
        check_output_folder(place)
    except InputError as error:
        raise InputError("output", str(path), error.expected) from error
