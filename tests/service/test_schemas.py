"""What a body may be, what is said of one that may not, and that nothing of it is ever said back."""

import gc
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service import schemas
from service.errors import BadRequest, ServiceError, TextInvalid, TooManyTexts, Unprocessable
from service.schemas import MISTAKEN_NAMES, PredictRequest

MARKER = "xyzzy"
MOST = 8


def read_request(body: bytes) -> PredictRequest:
    return schemas.read_request(body, max_texts=MOST)


def refusal(body: bytes) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        read_request(body)
    assert MARKER not in caught.value.detail
    assert MARKER not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__, (
        "what pydantic says quotes what was sent"
    )
    return caught.value


def test_defaults() -> None:
    assert read_request(b'{"inputs": "good"}') == PredictRequest(
        inputs="good", top_k=None, truncate=True, raw_scores=False
    )


def test_a_list_and_all_options() -> None:
    body = b'{"inputs": ["a", ""], "top_k": 2, "truncate": false, "raw_scores": true}'
    assert read_request(body) == PredictRequest(inputs=["a", ""], top_k=2, truncate=False, raw_scores=True)


@pytest.mark.parametrize("text", ["", "\x00", "é😀", "\u200b", "[SEP]", "a" * 1_000_000])
def test_any_string_of_characters_is_a_text(text: str) -> None:
    assert read_request(json.dumps({"inputs": [text]}).encode()).inputs == [text]
    assert read_request(json.dumps({"inputs": text}, ensure_ascii=False).encode()).inputs == text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"xyzzy",
        b'{"inputs": "xyzzy"',
        b'{"inputs": "xyzzy"} xyzzy',
        b"{'inputs': 'xyzzy'}",
        b'{"inputs": "xyzzy\xe9"}',
        b'{"inputs": "xyzzy\xed\xa0\x80"}',
        b'{"inputs": "xyzzy\x00"}',
        b'\xef\xbb\xbf{"inputs": "xyzzy"}',
        '{"inputs": "xyzzy"}'.encode("utf-16"),
        b'{"inputs": ' + b"9" * 100_000 + b"}",
        b'{"inputs": "\\uxyzzy"}',
    ],
)
def test_no_json_in_utf_8(body: bytes) -> None:
    assert isinstance(refusal(body), BadRequest)


@pytest.mark.parametrize("text", [r"xyzzy \ud800", r"\udc00 xyzzy", r"\ud800A xyzzy", r"\ud800\ud800"])
def test_a_lone_surrogate_is_a_text_that_cannot_be(text: str) -> None:
    assert isinstance(refusal(f'{{"inputs": "{text}"}}'.encode()), TextInvalid)
    inputs = read_request(f'{{"inputs": ["fine", "{text}"]}}'.encode()).inputs
    assert isinstance(inputs, list)
    assert inputs[0] == "fine"
    with pytest.raises(UnicodeEncodeError):
        inputs[1].encode()
    assert read_request(rb'{"inputs": "\ud83d\ude00"}').inputs == "😀"


SHAPES: list[tuple[Any, str]] = [
    ([], "The body must be a JSON object."),
    ("xyzzy", "The body must be a JSON object."),
    (None, "The body must be a JSON object."),
    ({}, "The field `inputs` is missing."),
    ({"inputs": []}, "inputs must hold at least one text."),
    ({"inputs": None}, "inputs must be a string or a list of strings."),
    ({"inputs": 5}, "inputs must be a string or a list of strings."),
    ({"inputs": {"xyzzy": "xyzzy"}}, "inputs must be a string or a list of strings."),
    ({"inputs": float("nan")}, "inputs must be a string or a list of strings."),
    ({"inputs": ["xyzzy", "b", "c", 5]}, "inputs.3 must be a string."),
    ({"inputs": ["xyzzy", None]}, "inputs.1 must be a string."),
    ({"inputs": [["xyzzy"]]}, "inputs.0 must be a string."),
    ({"inputs": [float("nan")]}, "inputs.0 must be a string."),
    *(
        ({"inputs": "xyzzy", "top_k": top_k}, "top_k must be null or a whole number of at least 1.")
        for top_k in (0, -1, "3", "xyzzy", True, 3.0, float("inf"), [3], 10**4000 * -1)
    ),
    *(({"inputs": "xyzzy", "truncate": no}, "truncate must be true or false.") for no in (1, "true", None)),
    ({"inputs": "xyzzy", "raw_scores": 0}, "raw_scores must be true or false."),
]


@pytest.mark.parametrize(("value", "detail"), SHAPES, ids=lambda value: str(value)[:40])
def test_another_shape_is_told_its_place(value: Any, detail: str) -> None:
    error = refusal(json.dumps(value).encode())
    assert type(error) is Unprocessable
    assert error.detail == detail


def test_an_infinite_number() -> None:
    for number in (b"1e999", b"Infinity", b"-Infinity", b"NaN"):
        assert isinstance(refusal(b'{"inputs": "xyzzy", "top_k": ' + number + b"}"), Unprocessable)
        assert isinstance(refusal(b'{"inputs": ' + number + b"}"), Unprocessable)


@pytest.mark.parametrize("name", MISTAKEN_NAMES)
def test_a_name_that_others_use_is_told_the_right_one(name: str) -> None:
    for body in ({name: "xyzzy"}, {name: "xyzzy", "inputs": "a"}, {name: "xyzzy", "xyzzy": 1}):
        error = refusal(json.dumps(body).encode())
        assert isinstance(error, Unprocessable)
        assert f"`{name}`" in error.detail
        assert "`inputs`" in error.detail


def test_an_unknown_field_is_refused_and_not_named() -> None:
    error = refusal(b'{"inputs": "a", "xyzzy": 1}')
    assert isinstance(error, Unprocessable)
    assert all(name in error.detail for name in PredictRequest.model_fields)


def test_of_equal_keys_the_last_counts() -> None:
    assert read_request(b'{"inputs": "a", "inputs": "b", "top_k": 1, "top_k": 2}') == PredictRequest(
        inputs="b", top_k=2
    )


@pytest.mark.parametrize("depth", [1, 2, 100, 199, 200, 201, 500, 960, 5_000, 100_000])
def test_r20_nesting_of_any_depth_is_a_refusal(depth: int) -> None:
    for start, end in ((b"[", b"]"), (b'{"inputs":', b"}")):
        assert refusal(b'{"inputs":' + start * depth + b"1" + end * depth + b"}").status in {400, 422}


def test_a_crowd_of_faults_is_counted_and_not_told() -> None:
    fields = ",".join(f'"xyzzy{number}":{number}' for number in range(20_000))
    assert isinstance(refusal(f'{{"inputs": "a", {fields}}}'.encode()), Unprocessable)
    numbers = ",".join("1" for _ in range(100_000))
    assert refusal(f'{{"inputs": [{numbers}]}}'.encode()).detail == "inputs.0 must be a string."


def test_too_many_texts_with_lone_surrogates_are_not_even_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find out takes a microsecond each, for 200,000 of which everybody else would wait."""
    looked_at: list[str] = []

    def look(text: str) -> bool:
        looked_at.append(text)
        return False

    monkeypatch.setattr(schemas, "is_unicode", look)
    texts = ",".join([r'"\ud800"'] * (MOST + 1))
    refused = refusal(f'{{"inputs": [{texts}]}}'.encode())
    assert isinstance(refused, TooManyTexts)
    assert refused.detail == "The request brings 9 texts; at most 8 are taken."
    assert looked_at == []


def outcome(body: bytes) -> PredictRequest | ServiceError:
    try:
        return read_request(body)
    except ServiceError as error:
        return error


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_refusal(body: bytes) -> None:
    read = outcome(body)
    assert isinstance(read, PredictRequest) or read.status in {400, 422}


def values() -> st.SearchStrategy[Any]:
    """Any JSON, with names that matter among the keys."""
    names = st.sampled_from(["inputs", "top_k", "truncate", "raw_scores", *MISTAKEN_NAMES, "other"])
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4)
    )


@given(values())
def test_any_json_is_a_request_or_a_refusal(value: Any) -> None:
    read = outcome(json.dumps(value).encode())
    if isinstance(read, ServiceError):
        assert read.status in {400, 422}
    else:
        assert value["inputs"] == read.inputs


def test_a_large_body_is_read_without_the_collector() -> None:
    """Hundreds of thousands of lists would start it again and again, and hold the loop for long."""
    collections: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(info["generation"])

    body = b'{"inputs": "good", "z": [' + b",".join([b"[]"] * 300_000) + b"]}"
    gc.callbacks.append(note)
    try:
        with pytest.raises(Unprocessable):
            read_request(body)
    finally:
        gc.callbacks.remove(note)
    assert 2 not in collections
    assert gc.isenabled()
