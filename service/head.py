"""What a server has to see to in a request's head beyond its grammar, which the parser has checked.

Knows bytes, and nothing of connections or routes.
"""

from collections.abc import Sequence

import httptools

HEAD_TOO_LONG = b"431 Request Header Fields Too Large"
_BAD_REQUEST = b"400 Bad Request"
_NOT_IMPLEMENTED = b"501 Not Implemented"


def fault_of(headers: Sequence[tuple[bytes, bytes]], version: str) -> bytes | None:
    """The status line's end that the head is to be refused with, if it is.

    400 without a `Host`, which HTTP/1.0 did not have, and with more than one (RFC 9112, 3.2); and when the
    last transfer coding is not `chunked`, so that the body has no end (6.3). 501 for any coding before it
    (6.1): the body would be taken for what it is packed in.

    Args:
        headers: names in lower case.
        version: such as "1.1".
    """
    names = [name for name, _ in headers]
    hosts = names.count(b"host")
    if hosts > 1 or (not hosts and version != "1.0"):
        return _BAD_REQUEST
    if b"transfer-encoding" in names:
        codings = b",".join(value for name, value in headers if name == b"transfer-encoding").split(b",")
        if codings[-1].strip(b" \t").lower() != b"chunked":
            return _BAD_REQUEST
        if len(codings) > 1:
            return _NOT_IMPLEMENTED
    return None


def with_path(url: bytes) -> bytes:
    """An absolute URL without a path means the path `/` (RFC 9110, 4.2.3); any other comes back as it is.

    Raises:
        httptools.HttpParserInvalidURLError: it is no URL.
    """
    if url.startswith(b"/") or b"://" not in url or httptools.parse_url(url).path is not None:
        return url
    address, mark, query = url.partition(b"?")
    return address + b"/" + mark + query
