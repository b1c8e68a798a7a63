"""API keys: which are valid now, and the layer that asks for one.

Keeps the SHA-256 digests of keys and never a key. Knows nothing of what lies behind the layer.
"""

import hashlib
import hmac
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import StartupError, Unauthorized
from service.exchange import header_of
from service.logs import log_event
from service.settings import Settings

MIN_KEY_CHARS = 16
MAX_KEY_CHARS = 256
MAX_KEYS = 100
"""Every key is compared with every request, so their number is bounded."""

MAX_FILE_BYTES = 65_536
LOOK_AGAIN_S = 1.0
"""How often the file of keys is looked at, at most."""

ALWAYS_OPEN = frozenset({"/health/live", "/health/ready"})
"""A kubelet brings no key, and these two tell nothing but their status."""
OPEN_WITH_METRICS = frozenset({"/health", "/metrics"})

_KEY = re.compile(rf"[!-+\--~]{{{MIN_KEY_CHARS},{MAX_KEY_CHARS}}}")  # visible ASCII without the comma
_YOUNG_NS = 2_000_000_000

logger = logging.getLogger(__name__)


def digests_of(keys: Iterable[str], source: str) -> tuple[bytes, ...]:
    """The SHA-256 digest of each key, once.

    Args:
        source: where the keys are from, for the message.

    Raises:
        StartupError: one has not the form of a key, or there are none or too many. Tells the place of a
            wrong one and no part of it.
    """
    found: dict[bytes, None] = {}
    for place, key in enumerate(keys, 1):
        if not _KEY.fullmatch(key):
            raise StartupError(
                f"{source}: key {place} must be {MIN_KEY_CHARS} to {MAX_KEY_CHARS} visible ASCII characters "
                "without a comma"
            )
        found[hashlib.sha256(key.encode()).digest()] = None
    if not 0 < len(found) <= MAX_KEYS:
        raise StartupError(f"{source} holds {len(found)} keys; it must hold 1 to {MAX_KEYS}")
    return tuple(found)


class KeyFile:
    """The keys of a file, one a line, which may be replaced while the service runs.

    Lines that are blank or begin with `#` are none. There is no polling: whoever asks for the digests looks
    at the file, at most once in `LOOK_AGAIN_S`. It is opened anew each time, since Kubernetes replaces a
    secret by swapping links. A file that cannot be used later changes nothing, and is told once.

    Args:
        clock: seconds that never go back.

    Raises:
        StartupError: the file cannot be used now.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._seen: tuple[int, ...] | None = None
        self._problem: str | None = None
        self._digests: tuple[bytes, ...] = ()
        self._look()
        self._looked_s = clock()

    def digests(self) -> tuple[bytes, ...]:
        """Those of the file as it was in the last second."""
        now_s = self._clock()
        if now_s - self._looked_s >= LOOK_AGAIN_S:
            self._looked_s = now_s
            before = self._digests
            try:
                self._look()
            except StartupError as error:
                self._tell(str(error))
            else:
                self._problem = None
                if self._digests != before:
                    log_event(logger, logging.INFO, "API keys replaced", keys=len(self._digests))
        return self._digests

    def _tell(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            log_event(logger, logging.ERROR, "API keys not replaced", reason=problem)

    def _look(self) -> None:
        """Read the file if it is another than before, by its place, its times and its size."""
        try:
            with open(self._path, "rb", opener=_without_waiting) as file:
                facts = os.fstat(file.fileno())
                seen = (facts.st_dev, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_size)
                if seen == self._seen:
                    return
                if not stat.S_ISREG(facts.st_mode):
                    raise StartupError(f"VALENCE_API_KEYS_FILE: {self._path} is no regular file")
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise StartupError(f"VALENCE_API_KEYS_FILE: cannot read {self._path}: {error.strerror}") from None
        self._digests = digests_of(self._lines(content), "VALENCE_API_KEYS_FILE")
        # Another write in the same tick of the file's clock would not be seen: look at a young file again.
        self._seen = seen if time.time_ns() - facts.st_mtime_ns > _YOUNG_NS else None

    def _lines(self, content: bytes) -> list[str]:
        if len(content) > MAX_FILE_BYTES:
            raise StartupError(f"VALENCE_API_KEYS_FILE: {self._path} is over {MAX_FILE_BYTES} bytes")
        try:
            lines = [line.strip() for line in content.decode("utf-8-sig").splitlines()]
        except UnicodeDecodeError:
            raise StartupError(f"VALENCE_API_KEYS_FILE: {self._path} is not UTF-8") from None
        return [line for line in lines if line and not line.startswith("#")]


def _without_waiting(path: str, flags: int) -> int:
    """A pipe would be waited for until somebody writes."""
    return os.open(path, flags | os.O_NONBLOCK)


class Keys:
    """Which keys open the service: those that were given at start, and those of the file as it is now."""

    def __init__(self, fixed: tuple[bytes, ...], file: KeyFile | None = None) -> None:
        self._fixed = fixed
        self._file = file

    def accept(self, given: bytes) -> bool:
        """Whether it is one of the keys. Takes as long for one that is as for one that is not."""
        if len(given) > MAX_KEY_CHARS:
            return False
        digest = hashlib.sha256(given).digest()
        found = False
        for one in self._fixed:
            found |= hmac.compare_digest(digest, one)
        if self._file is not None:
            for one in self._file.digests():
                found |= hmac.compare_digest(digest, one)
        return found


def open_keys(settings: Settings) -> Keys | None:
    """The keys that the settings name; None when they name none and the service is open.

    Raises:
        StartupError: keys are wanted and cannot be had.
    """
    fixed: tuple[bytes, ...] = ()
    if settings.api_keys is not None:
        keys = settings.api_keys.get_secret_value().split(",")
        fixed = digests_of([key.strip() for key in keys], "VALENCE_API_KEYS")
    file = KeyFile(settings.api_keys_file) if settings.api_keys_file is not None else None
    if not fixed and file is None:
        log_event(logger, logging.INFO, "no API keys are set: open to all")
        return None
    log_event(logger, logging.INFO, "API keys read", keys=len(fixed) + (len(file.digests()) if file else 0))
    return Keys(fixed, file)


def open_paths(settings: Settings) -> frozenset[str]:
    """The paths that need no key."""
    return ALWAYS_OPEN | OPEN_WITH_METRICS if settings.open_metrics else ALWAYS_OPEN


def given_keys(scope: Scope) -> Iterator[bytes]:
    """What the client sends as his key: `Authorization: Bearer <key>`, `X-API-Key: <key>`, or both."""
    for name in (b"authorization", b"x-api-key"):
        if sum(key == name for key, _ in scope["headers"]) > 1:
            return  # a proxy and its client may each have said something: neither is believed
    authorization = header_of(scope, b"authorization")
    if authorization is not None:
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() == b"bearer":
            yield key.strip()
    key_alone = header_of(scope, b"x-api-key")
    if key_alone is not None:
        yield key_alone


class Access:
    """Lets nobody without a key past, but to the open paths; the body of who is refused is not read.

    A path that does not exist is closed, too: what there is is told to those with a key.
    """

    def __init__(self, app: ASGIApp, *, keys: Keys, paths: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and scope["path"] not in self._open_paths
            and not any(map(self._keys.accept, given_keys(scope)))
        ):
            raise Unauthorized
        await self._app(scope, receive, send)
