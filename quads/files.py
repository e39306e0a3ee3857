"""Result files: written atomically, read with a clear error that says how to rebuild them.

    write_*   temporary file beside the target, fsync, os.replace: a reader sees the old file or the whole new one.
    read_*    ResultFileError(path, what is wrong, how to rebuild it); never a half-parsed value.
    *.jsonl   one JSON object per line, appended and flushed; a writer killed by SIGKILL can leave one torn last line,
              which `read_jsonl` drops and `append_jsonl` cuts off before it continues. Damage elsewhere is an error.

Differs from json.load in the caller: a stage that reads another stage's file names that file and the rule behind it.
No torch, no third-party import.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

log = logging.getLogger(__name__)


class ResultFileError(ValueError):
    """A result file is missing, truncated or incomplete; the message names it and the command that rebuilds it."""


def rebuild_command(path: Path) -> str:
    """Shell command that makes Snakemake rebuild `path` and what depends on it, and nothing else.

    Rules only make files below results/ of the working folder; for any other path, such as one that a stage was given
    by hand, it is words.
    """
    here = os.path.relpath(path)
    if Path(here).parts[:1] == ("results",):
        return f"snakemake --forcerun {here} -- {here}"
    return "the stage that writes it, or give another folder (it is not below results/ here, so no rule makes it)"


def require_writable(path: Path) -> None:
    """ResultFileError, before the work begins, where an output file could not be written after it. Makes nothing."""
    try:
        folder = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
        with tempfile.TemporaryFile(dir=folder):
            pass
        exists, usual = path.exists(), path.is_file()  # may raise too: a name that is too long
    except OSError as error:
        raise ResultFileError(f"{path} cannot be written: {error}; give another place") from None
    if exists and not usual:
        what = "a folder" if path.is_dir() else "a device, pipe or socket"
        raise ResultFileError(f"{path} cannot be written: it is {what}; give the name of a file")


def _error(
    path: Path, kind: str, problem: str, target: Path | None = None, advice: str | None = None
) -> ResultFileError:
    return ResultFileError(
        f"{kind} {path}: {problem}. {advice or f'Rebuild it with: {rebuild_command(target or path)}'}"
    )


@contextmanager
def _atomic(path: Path) -> Iterator[TextIO]:
    """A text file that appears under `path` only when the block ends without an exception."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files private (0600); results on a shared file system should follow the umask instead.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def held(lock_file: Path, in_use: Exception, wait_s: float = 0.0) -> Iterator[int]:
    """Hold `lock_file` (made with its folder) exclusively; raises `in_use` when another process does, `wait_s` long.

    Yields the descriptor: a child process that inherits it shares the lock. The lock is the kernel's: it ends with the
    last process that has it, and a stale file means nothing. NFS needs a server with locks.
    """
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait_s
    with lock_file.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise in_use from None
            time.sleep(0.1)
        yield lock.fileno()


def write_text_atomic(path: str | Path, text: str) -> Path:
    """Write `text` (UTF-8) so that `path` is either untouched or complete. Parent folders are made."""
    with _atomic(Path(path)) as file:
        file.write(text)
    return Path(path)


def write_json_atomic(path: str | Path, obj: Any) -> Path:
    """Write `obj` as indented JSON, atomically. NaN and infinity are errors: they are not JSON."""
    try:
        text = json.dumps(obj, indent=2, allow_nan=False) + "\n"
    except ValueError as error:
        raise ValueError(f"{path}: cannot be written as JSON: {error}; store null and count it instead") from error
    return write_text_atomic(path, text)


def read_result(
    path: str | Path,
    kind: str,
    required: Sequence[str] = (),
    *,
    target: str | Path | None = None,
    advice: str | None = None,
) -> dict[str, Any]:
    """The JSON object in `path`, which must hold the `required` keys.

    `kind` names the file in messages ("training result"). `target` is the rule output to rebuild when it is not
    `path` itself (a side file), `advice` what to do about a file that no stage writes. Raises ResultFileError.
    """
    path = Path(path)
    goal = Path(target) if target is not None else None

    def wrong(problem: str) -> ResultFileError:
        return _error(path, kind, problem, goal, advice)

    if not path.is_file():
        raise wrong("missing")
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.strip():
        raise wrong("empty (0 bytes of JSON), probably cut off while it was written")
    try:
        loaded = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno} of {len(text)} characters"
        raise wrong(f"truncated or damaged, not valid JSON at {where} ({error.msg})") from None
    if not isinstance(loaded, dict):
        raise wrong(f"expected a JSON object, got {type(loaded).__name__}")
    absent = [key for key in required if key not in loaded]
    if absent:
        has = ", ".join(sorted(loaded)) or "none"
        raise wrong(f"lacks the key(s) {', '.join(absent)}; it has: {has}")
    return loaded


def read_checkpoint_config(model: Path, sizes: Sequence[str]) -> dict[str, Any]:
    """config.json of the Hugging Face checkpoint that a stage was given, with whole numbers from 1 under `sizes`.

    Raises ResultFileError. No rule makes such a folder again, so the message asks for another one.
    """
    advice = f"Give the folder of a Hugging Face checkpoint instead of {model}"
    path = model / "config.json"
    config = read_result(path, "checkpoint configuration", sizes, advice=advice)
    for key in sizes:
        if type(config[key]) is not int or config[key] < 1:
            raise ResultFileError(f"{path}: {key} is {config[key]!r}, expected a whole number from 1. {advice}")
    return config


SHARD_INDEX = "model.safetensors.index.json"


def indexed_shards(folder: Path) -> list[str]:
    """Names of the shards in the index of a Hugging Face checkpoint, sorted. Raises OSError, ValueError, KeyError."""
    return sorted(set(json.loads((folder / SHARD_INDEX).read_text())["weight_map"].values()))


def append_jsonl(path: str | Path, *objects: dict[str, Any]) -> None:
    """Append each object as one line and flush to the disk, once; first cut off a torn last line of a killed writer.

    NaN and infinity are errors: they are not JSON. One writer at a time.
    """
    path = Path(path)
    text = "".join(json.dumps(obj, separators=(",", ":"), allow_nan=False) + "\n" for obj in objects)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        _cut_torn_tail(file.fileno(), path)
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def _cut_torn_tail(descriptor: int, path: Path) -> None:
    """Truncate after the last newline, so that the next object does not join a half-written one."""
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return
    keep = os.pread(descriptor, size, 0).rfind(b"\n") + 1
    log.warning("%s: dropped a torn last line of %d bytes left by a killed writer", path, size - keep)
    os.ftruncate(descriptor, keep)


def read_jsonl(
    path: str | Path,
    required: Sequence[str] = (),
    *,
    kind: str = "records file",
    target: str | Path | None = None,
) -> list[dict[str, Any]]:
    """All objects of a JSONL file, each holding the `required` keys.

    A last line without its newline is what a killed writer leaves: it is dropped with a warning. Any other line that
    is not a JSON object with the keys raises ResultFileError naming the line.
    """
    path = Path(path)
    goal = Path(target) if target is not None else None
    if not path.is_file():
        raise _error(path, kind, "missing", goal)
    *lines, tail = path.read_text(encoding="utf-8", errors="replace").split("\n")
    if tail:
        log.warning("%s: ignored a torn last line of %d characters left by a killed writer", path, len(tail))
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise _error(path, kind, f"line {number} is damaged, not valid JSON ({error.msg})", goal) from None
        if not isinstance(row, dict):
            raise _error(path, kind, f"line {number}: expected an object, got {type(row).__name__}", goal)
        absent = [key for key in required if key not in row]
        if absent:
            raise _error(path, kind, f"line {number} lacks the key(s) {', '.join(absent)}", goal)
        rows.append(row)
    return rows
