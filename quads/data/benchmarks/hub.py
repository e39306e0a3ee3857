"""Files of a pinned set: from the hub at the pinned revision, or from a local copy; checked before they are parsed.

    locate(spec, local=None)  ->  [(pin, path), ...]    one entry per file, shards in the order of their names

Local copy: a folder that holds the files under their path in the repository or directly; a .jsonl of the same rows may
stand for a .parquet (the hash over normalised rows does not depend on the format). A set of one file takes that file.
Contract: huggingface_hub is imported only when the hub is asked, so HF_HUB_OFFLINE and its cache work as its users know
them. Differs from load_dataset: nothing in the repository is ever run, and no other subset of a warm cache is served.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from quads.data.benchmarks.errors import ChangedHashError, NotAvailableError, PinError
from quads.data.benchmarks.spec import FilePin, Spec

log = logging.getLogger(__name__)
CHUNK = 1 << 22


def fetch_command(name: str) -> str:
    """How a person gets a set ahead of a run without network, both ways."""
    command = f"python -m quads.fetch --set {name} --out results/data"
    return (
        f"on a machine with network run `snakemake fetch_data` or `{command}` and copy results/data/{name} here; or "
        f"give a copy of its files: `{command} --local PATH`"
    )


def locate(spec: Spec, local: Path | None = None) -> list[tuple[FilePin, Path]]:
    """Every file of the set. Raises NotAvailableError, PinError, ChangedHashError."""
    found: list[tuple[FilePin, Path]] = []
    for pin in spec.files:
        paths = _local(spec, pin, local) if local is not None else _download(spec, pin)
        for path in paths:
            _verify(spec, pin, path)
            found.append((pin, path))
    return found


def file_sha256(path: Path) -> str:
    """sha256 hex digest of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _verify(spec: Spec, pin: FilePin, path: Path) -> None:
    # A local file in another format than the pinned one is judged by its rows alone.
    if pin.is_pattern or path.suffix != Path(pin.path).suffix:
        return
    size = path.stat().st_size
    where = f"{spec.name}: {path} (pinned as {pin.path} of {spec.hub_id} at {spec.revision[:10]})"
    if pin.bytes is not None and size != pin.bytes:
        raise ChangedHashError(
            f"{where} has {size} bytes, expected {pin.bytes}: truncated or another version; fetch it again"
        )
    if pin.sha256 is not None and (got := file_sha256(path)) != pin.sha256:
        raise ChangedHashError(f"{where} has sha256 {got}, expected {pin.sha256}: another version; fetch it again")


def _local(spec: Spec, pin: FilePin, local: Path) -> list[Path]:
    if local.is_file() and len(spec.files) == 1:
        return [local]
    stem = pin.path.rsplit(".", 1)[0]
    for folder in (local / spec.name, local):
        for pattern in (pin.path, Path(pin.path).name, f"{stem}.jsonl", f"{Path(stem).name}.jsonl"):
            if found := sorted(p for p in folder.glob(pattern) if p.is_file()):
                return found
    raise NotAvailableError(
        f"{spec.name}: no {pin.path} (nor {Path(stem).name}.jsonl) in the local copy {local} or in "
        f"{local / spec.name}; give the folder that holds the files of {spec.hub_id} at revision {spec.revision}"
    )


def _download(spec: Spec, pin: FilePin) -> list[Path]:
    import huggingface_hub
    from huggingface_hub import errors

    log.info("%s: %s of %s at %s", spec.name, pin.path, spec.hub_id, spec.revision[:10])
    try:
        if not pin.is_pattern:
            return [
                Path(
                    huggingface_hub.hf_hub_download(
                        repo_id=spec.hub_id, filename=pin.path, revision=spec.revision, repo_type="dataset"
                    )
                )
            ]
        snapshot = huggingface_hub.snapshot_download(
            repo_id=spec.hub_id, allow_patterns=[pin.path], revision=spec.revision, repo_type="dataset"
        )
    except errors.LocalEntryNotFoundError as error:
        raise _offline(spec, error) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        raise PinError(
            f"{spec.name}: the hub has no {pin.path} in {spec.hub_id} at revision {spec.revision}, or it is closed "
            f"to you ({type(error).__name__}); check the pin in {spec.name}.yaml and your access"
        ) from error
    except Exception as error:  # network boundary: whatever the client raises means that the hub cannot be read now
        raise _offline(spec, error) from error
    if found := sorted(Path(snapshot).glob(pin.path)):
        return found
    raise PinError(
        f"{spec.name}: no file matches {pin.path} in {spec.hub_id} at revision {spec.revision}; correct the pin"
    )


def _offline(spec: Spec, error: Exception) -> NotAvailableError:
    return NotAvailableError(
        f"{spec.name}: {spec.hub_id} at revision {spec.revision[:10]} is neither in the local hub cache nor reachable "
        f"({type(error).__name__}). What to do: {fetch_command(spec.name)}"
    )
