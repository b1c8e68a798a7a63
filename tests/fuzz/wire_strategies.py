"""Strategies for what a client may put on the wire: bodies, the forms they come in, and headers.

Knows bytes and JSON, and nothing of the answers.
"""

import json
from functools import cache
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.aftermath import MARKER

Strategy = st.SearchStrategy[bytes]

_SPLICES = [
    b"\r\n",
    b"\x00",
    b"\xff",
    b'"',
    b"\\",
    b"\\ud800",
    b"\\u12",
    b"[",
    b"}",
    b",",
    b"1e999",
    b"-",
    b"//",
]
_PIECES = [
    b'{"inputs":',
    b'"xyzzy"',
    b'["xyzzy","good"]',
    b"null",
    b'"top_k":',
    b"NaN",
    b"-0",
    b"1E400",
    b"{}",
]
_KINDS = [
    b"application/json",
    b"application/json; charset=utf-8",
    b'APPLICATION/JSON;charset="UTF-8"',
    b"application/json; charset=utf-16",
    b"application/json, text/html",
    b"application/problem+json",
    b"multipart/form-data; boundary=xyzzy",
    b"text/plain",
    b"",
]


@cache
def any_character() -> st.SearchStrategy[str]:
    """Lone surrogates, too."""
    return st.characters(exclude_categories=())


@cache
def any_text() -> st.SearchStrategy[str]:
    return st.text(any_character(), max_size=8).map(lambda text: text + MARKER)


@cache
def values() -> st.SearchStrategy[Any]:
    """Any JSON value, and numbers that no other parser would take."""
    plain = st.none() | st.booleans() | st.integers() | st.floats() | any_text()
    huge = st.integers(1, 5_000).map(lambda digits: int("9" * min(digits, 4_000)))
    return st.recursive(
        plain | huge,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text(), inner, max_size=2),
        max_leaves=5,
    )


@cache
def proper_requests() -> Strategy:
    """Mostly requests that can be answered; some hold a text that cannot, and some are too long."""
    texts = any_text() | st.just("") | st.just("good " * 100)
    return st.fixed_dictionaries(
        {"inputs": texts | st.lists(texts, max_size=4)},
        optional={
            "top_k": st.none() | st.integers(-1, 3) | st.just(10**30),
            "truncate": st.booleans(),
            "raw_scores": st.booleans(),
        },
    ).map(lambda value: json.dumps(value).encode())


@cache
def wrong_requests() -> Strategy:
    """JSON of any shape, under names that are known and names that are not."""
    names = st.sampled_from(["inputs", "top_k", "truncate", "raw_scores", "text", MARKER, "__proto__"])
    return (st.dictionaries(names, values(), max_size=3) | values()).map(
        lambda value: json.dumps(value).encode()
    )


@cache
def nested() -> Strategy:
    """Brackets by the thousand, closed or not."""

    def build(opening: bytes, depth: int, closed: bool) -> bytes:
        closing = (b"]" if opening == b"[" else b"}") * depth if closed else b""
        return b'{"inputs": ' + opening * depth + b'"xyzzy"' + closing + b"}"

    return st.builds(build, st.sampled_from([b"[", b'{"xyzzy":']), st.integers(1, 1_500), st.booleans())


@cache
def huge_numbers() -> Strategy:
    def build(sign: bytes, digits: int, exponent: int, point: bool) -> bytes:
        number = sign + b"9" * digits + (b".5" if point else b"") + (b"e%d" % exponent if exponent else b"")
        return b'{"inputs": ["good", "\\ud800"], "top_k": ' + number + b"}"

    return st.builds(
        build, st.sampled_from([b"", b"-"]), st.integers(1, 6_000), st.integers(-400, 400), st.booleans()
    )


@cache
def damage() -> st.SearchStrategy[list[tuple[int, int, int, bytes]]]:
    """What to do to some bytes, for `damaged`."""
    one = st.tuples(st.integers(0, 3), st.integers(0, 5_000), st.integers(1, 40), st.sampled_from(_SPLICES))
    return st.lists(one, min_size=1, max_size=3)


def damaged(whole: bytes, changes: list[tuple[int, int, int, bytes]]) -> bytes:
    """Something whole, with bytes changed, dropped, doubled or put in."""
    made = bytearray(whole)
    for kind, place, length, splice in changes:
        at = place % (len(made) + 1)
        if kind == 0:
            made[at : at + 1] = bytes([length * 6])
        elif kind == 1:
            del made[at : at + length]
        elif kind == 2:
            made[at:at] = made[at : at + length]
        else:
            made[at:at] = splice
    return bytes(made)


@cache
def bodies() -> Strategy:
    """Anything that a body may be."""
    return st.one_of(
        proper_requests(),
        wrong_requests(),
        st.builds(damaged, proper_requests(), damage()),
        nested(),
        huge_numbers(),
        st.lists(st.sampled_from(_PIECES) | st.binary(max_size=4), max_size=8).map(b"".join),
        st.binary(max_size=60),
        proper_requests().map(lambda body: body.decode().encode("utf-16")),
        st.integers(0, 300).map(lambda count: json.dumps({"inputs": [MARKER] * count}).encode()),
        st.integers(16_000, 17_000).map(lambda size: json.dumps({"inputs": MARKER + "a" * size}).encode()),
    )


@cache
def kinds() -> Strategy:
    """Content types: half of the time the right one."""
    odd = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12)
    return st.just(_KINDS[0]) | st.sampled_from(_KINDS) | odd.map(lambda text: text.strip().encode())


@cache
def timeouts() -> Strategy:
    """Header lines with a deadline: good, tiny, absurd."""
    odd = st.sampled_from([b"0", b"-1", b"1e3", b"nan", b"1,5", b"0x10", b"xyzzy", b"9" * 400, b"", b"1 1"])
    good = st.sampled_from([b"5", b"60.5", b"999999999", b"0.000000001"])
    return (odd | good).map(lambda value: b"x-request-timeout: " + value)


@cache
def header_lines() -> st.SearchStrategy[list[bytes]]:
    """Further headers, which a request may have."""
    others = st.sampled_from(
        [
            b"content-encoding: gzip",
            b"content-encoding: identity",
            b"expect: 100-continue",
            b"expect: xyzzy",
            b"x-request-id: x y z z y xyzzy",
            b"x-request-id: " + b"a" * 100,
            b"x-forwarded-for: xyzzy",
            b"upgrade: h2c",
            b"accept: xyzzy/*",
            b"cookie: " + b"\xff\xfe" * 40,
            b"authorization: Bearer xyzzy",
        ]
    )
    return st.lists(timeouts() | others, max_size=2)


@cache
def chunks() -> st.SearchStrategy[tuple[list[int], bytes, bytes]]:
    """How to send a body in chunks, for `framed_in_chunks`: sizes, the form of a head, and a trailer."""
    heads = st.sampled_from([b"%x", b"%X", b"000%x", b"%x;xyzzy=1", b'%x;a="b"'])
    sizes = st.lists(st.sampled_from([1, 2, 7, 64, 1_000]), max_size=5)
    return st.tuples(sizes, heads, st.sampled_from([b"", b"x-trailer: xyzzy\r\n"]))


def framed_in_chunks(body: bytes, chosen: tuple[list[int], bytes, bytes]) -> bytes:
    """The body in chunks of these sizes; what is left over is the last one."""
    sizes, head, trailer = chosen
    made, at = [], 0
    for size in (*sizes, len(body)):
        part = body[at : at + size]
        at += size
        made += [head % len(part), b"\r\n", part, b"\r\n"] if part else []
    return b"".join([*made, b"0\r\n", trailer, b"\r\n"])
