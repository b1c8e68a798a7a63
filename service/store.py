"""The model store: finds, verifies, describes and writes a version.

The only module that knows the layout: `<store>/<name>/<version>/` with manifest.json, README.md,
tokenizer.json and the model files (`service.manifest` knows what a manifest holds).
Knows nothing of engines, tokenizing or HTTP.
"""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from service.errors import StartupError
from service.manifest import (
    MANIFEST,
    MODEL_NAME,
    README,
    FileRecord,
    GoldenText,
    Manifest,
    ManifestError,
    Metric,
    ModelFile,
    Source,
    check,
    dump,
    form,
    parse,
)

__all__ = [
    "FileRecord",
    "GoldenText",
    "Listing",
    "Manifest",
    "Metric",
    "ModelFile",
    "Source",
    "Version",
    "form",
    "list_models",
    "open_version",
    "versions",
    "write_card",
    "write_version",
]

_VERSION = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class Version:
    """A version whose manifest and files were verified when it was opened."""

    path: Path
    manifest: Manifest

    def read(self, record: FileRecord | ModelFile) -> bytes:
        """The bytes of a file, hashed once more as read: what is used is what the manifest names.

        Raises:
            StartupError: the file is gone or has changed since the version was opened.
        """
        path = _inside(self.path, record.path)
        with _readable(path):
            content = path.read_bytes()
        _compare(path, record, len(content), hashlib.sha256(content).hexdigest())
        return content


@dataclass(frozen=True, slots=True)
class Listing:
    """A version as a list shows it: its manifest, or the `problem` with it. Its files are not read."""

    name: str
    version: int
    manifest: Manifest | None
    problem: str | None


def versions(store: Path, name: str) -> list[int]:
    """The version numbers of a model, lowest first (10 comes after 9). A folder with another name is none.

    Raises:
        StartupError: the folder cannot be read.
    """
    folder = store / name
    if not MODEL_NAME.fullmatch(name):
        return []
    with _readable(folder):
        return sorted(int(entry.name) for entry in _folders(folder) if _VERSION.fullmatch(entry.name))


def list_models(store: Path) -> list[Listing]:
    """Every version in the store, by name, then number; a damaged manifest is a `problem`, not an error.

    A store or a model whose folder cannot be read has none; a version whose folder cannot has a `problem`.
    """
    listings = []
    for name in _names(store):
        for version in _readable_versions(store, name):
            try:
                manifest = _read_manifest(store / name / str(version), name, version)
                listings.append(Listing(name, version, manifest, None))
            except StartupError as error:
                listings.append(Listing(name, version, None, str(error)))
    return listings


def open_version(store: Path, name: str, version: int | None = None) -> Version:
    """Find a version and verify all of it: the manifest, and the size and SHA-256 of every file.

    Args:
        version: a number, or None for the highest one.

    Raises:
        StartupError: with the file and the reason; something is missing, damaged, unknown or leads outside.
    """
    if not MODEL_NAME.fullmatch(name):
        raise StartupError(f"{name!r} is not the name of a model: letters, digits, '.', '_' and '-' only")
    there = versions(store, name)
    if not there:
        raise StartupError(f"{store / name}: no version of the model is there")
    if version is not None and version not in there:
        raise StartupError(f"{store / name}: version {version} is not there; there are {_join(there)}")
    number = there[-1] if version is None else version
    folder = store / name / str(number)
    manifest = _read_manifest(folder, name, number)
    records: list[FileRecord | ModelFile] = [manifest.tokenizer, *manifest.models]
    for record in records:
        _verify_file(folder, record)
    return Version(folder, manifest)


def write_version(store: Path, draft: Manifest, files: Mapping[str, bytes | Path]) -> Path:
    """Write a version in one step: it is there whole, or not at all.

    Args:
        draft: the manifest; the `bytes` and `sha256` in it are not read, they are computed from the files.
        files: content, or a file to copy, for each name in the manifest and for README.md.

    Returns:
        The folder of the version.

    Raises:
        FileExistsError: the version is there already; a version is never changed.
        StartupError: the manifest is one that `open_version` would refuse, or does not agree with `files`.
    """
    target = store / draft.name / str(draft.version)
    try:
        check(draft)
    except ManifestError as error:
        raise StartupError(f"{target}: {error}") from error
    named = {draft.tokenizer.path, README, *(model.path for model in draft.models)}
    if named != set(files):
        raise StartupError(f"{target}: only named or only given: {_join(sorted(named ^ set(files)))}")
    if target.exists():
        raise FileExistsError(f"{target} is there already; a version is never changed")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{draft.version}-", suffix=".tmp", dir=target.parent))
    try:
        for name, content in files.items():
            _write_durably(work / name, content if isinstance(content, bytes) else content.read_bytes())
        manifest = replace(
            draft,
            tokenizer=_measured(work, draft.tokenizer),
            models=[_measured(work, model) for model in draft.models],
        )
        _write_durably(work / MANIFEST, dump(manifest))
        work.chmod(0o755)
        _sync_folder(work)
        work.rename(target)
        _sync_folder(target.parent)
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:  # another writer was faster
            raise FileExistsError(f"{target} is there already; a version is never changed") from error
        raise
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return target


def write_card(version: Version, card: bytes) -> None:
    """Replace the README.md of a version, in one step.

    The one file that may change, for much is measured after a version was made. The manifest has no digest
    of it.
    """
    work = version.path / f".{README}.tmp"
    work.unlink(missing_ok=True)
    _write_durably(work, card)
    work.rename(version.path / README)
    _sync_folder(version.path)


_Record = TypeVar("_Record", FileRecord, ModelFile)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """What the system has against reading it, as a StartupError."""
    try:
        yield
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from error


def _folders(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []


def _names(store: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(entry.name for entry in _folders(store))
    return []


def _readable_versions(store: Path, name: str) -> list[int]:
    with contextlib.suppress(StartupError):
        return versions(store, name)
    return []


def _read_manifest(folder: Path, name: str, version: int) -> Manifest:
    path = _inside(folder, MANIFEST)
    try:
        with _readable(path):
            manifest = parse(path.read_bytes())
    except ManifestError as error:
        raise StartupError(f"{path}: {error}") from error
    if (manifest.name, manifest.version) != (name, version):
        raise StartupError(
            f"{path}: it is the manifest of {manifest.name} {manifest.version}, not of its folder"
        )
    return manifest


def _inside(folder: Path, name: str) -> Path:
    """The path of a file of a version; a symbolic link that leads out of the folder is refused."""
    path = folder / name
    with _readable(path):
        if not path.is_file():  # first: a link to itself cannot be resolved
            raise StartupError(f"{path}: missing, or not a regular file")
        if not path.resolve().is_relative_to(folder.resolve()):
            raise StartupError(f"{path}: leads out of the folder of the version")
    return path


def _verify_file(folder: Path, record: FileRecord | ModelFile) -> None:
    path = _inside(folder, record.path)
    with _readable(path), path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = file.tell()
    _compare(path, record, size, digest)


def _compare(path: Path, record: FileRecord | ModelFile, size: int, digest: str) -> None:
    if size != record.bytes:
        raise StartupError(f"{path}: {size} bytes, but the manifest says {record.bytes}")
    if digest != record.sha256:
        raise StartupError(f"{path}: its SHA-256 is {digest}, but the manifest says {record.sha256}")


def _measured(folder: Path, record: _Record) -> _Record:
    content = (folder / record.path).read_bytes()
    return replace(record, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _join(names: list[int] | list[str]) -> str:
    return ", ".join(map(str, names))
