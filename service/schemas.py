"""The wire types: what a request may hold, what an answer holds, and how a body becomes a request.

Knows the shapes alone: nothing of routes, of the model or of how an error is sent. No message made here
repeats what was sent, not even the name of a field that is not known.
"""

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from service.core import is_unicode
from service.errors import BadRequest, ServiceError, TextInvalid, TooManyTexts, Unprocessable

MISTAKEN_NAMES = ("text", "texts", "input", "instances")
"""What other services call the field `inputs`."""

MAX_ERRORS_READ = 64
"""More errors than this are only counted: each field of a hostile body can be one, and telling takes time."""


LARGE_BODY_BYTES = 65_536
"""Bodies above this are read without the cyclic collector."""


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PredictRequest(_Wire):
    """The body of `POST /predict`. Of a key that stands twice the last one counts, as most readers do."""

    # An empty text alone is refused where the other texts are that cannot be read, with their code.
    inputs: (
        Annotated[str, Field(json_schema_extra={"minLength": 1})]
        | Annotated[list[str], Field(fail_fast=True, min_length=1)]
    ) = Field(
        description="One text, or a list of texts. The answer has one prediction for each, in the same order."
    )
    top_k: int | None = Field(
        default=None,
        ge=1,
        description="Keep the best k labels in `scores`; all of them when null. Written as 2, not as 2.0.",
    )
    truncate: bool = Field(
        default=True, description="Cut a text that is too long. When false, such a text is refused."
    )
    raw_scores: bool = Field(
        default=False, description="Give logits in `score` and `scores` instead of probabilities."
    )


class Predicted(_Wire):
    """What the model says of one text."""

    label: str = Field(description="The best label.")
    score: float = Field(description="The score of the best label.")
    scores: dict[str, float] = Field(description="The score of each label, best first.")
    tokens: int = Field(description="How many tokens the model read, special tokens included.")
    truncated: bool = Field(description="Whether the text was cut to fit.")


class ErrorInPlace(_Wire):
    """Why one text of a list has no prediction."""

    code: str
    detail: str


class Failed(_Wire):
    """Stands in the place of a text of a list that could not be predicted."""

    error: ErrorInPlace


class PredictResponse(_Wire):
    """One shape whatever was sent: a single text gives a list of one."""

    model: str
    version: str
    predictions: list[Predicted | Failed]


class Problem(_Wire):
    """An error, as `application/problem+json` (RFC 9457). None of it repeats what was sent."""

    media_type: ClassVar[str] = "application/problem+json"

    type: str = Field(description="A reference to the description of the error on the page /docs.")
    title: str = Field(description="The kind of error, in words.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="What is wrong with this request, for a person.")
    code: str = Field(description="The kind of error, for a program; it does not change.")
    request_id: str = Field(description="The X-Request-ID of the answer, to find the request in the logs.")


class Health(_Wire):
    """How the service stands."""

    status: str = Field(description="live, ready or unready.")
    reason: str | None = Field(default=None, description="Why it is unready.")
    model: str | None = None
    version: str | None = None
    engine: str | None = None
    precision: str | None = None
    device: str | None = None


class ModelVersion(_Wire):
    """A version in the store."""

    name: str
    version: str
    served: bool = Field(description="Whether this is the version that answers.")
    labels: list[str] | None = Field(default=None, description="In the order of the model's outputs.")
    max_tokens: int | None = Field(default=None, description="The longest text the model reads.")
    forms: list[str] | None = Field(
        default=None, description="The forms it is there in, as format/precision."
    )
    problem: str | None = Field(default=None, description="What is wrong with the version, if anything is.")


class ModelList(_Wire):
    """What the model store holds."""

    models: list[ModelVersion]


def read_request(body: bytes, *, max_texts: int) -> PredictRequest:
    """The request that a body holds. A text with a lone surrogate is left in its place, to be refused there.

    Raises:
        BadRequest: not JSON, or not UTF-8.
        TextInvalid: a lone surrogate anywhere but in a list of texts.
        TooManyTexts: more than `max_texts`, lone surrogates among them; all others are counted by the caller.
        Unprocessable: JSON of another shape; the detail names the place.
    """
    with _collector_at_rest(len(body)):
        try:
            return PredictRequest.model_validate_json(body)
        except ValidationError as error:
            refusal = _explain_all(error)
        if not isinstance(refusal, TextInvalid):
            raise refusal from None
        return _read_with_surrogates(body, max_texts)


@contextmanager
def _collector_at_rest(size: int) -> Iterator[None]:
    """No cyclic collection while a large body is read.

    A body of 650,000 empty lists would start many, each of which looks through all lists so far, and hold the
    event loop three times as long as the reading itself.
    """
    rests = size > LARGE_BODY_BYTES and gc.isenabled()
    if rests:
        gc.disable()
    try:
        yield
    finally:
        if rests:
            gc.enable()


def refuse_too_many(texts: int, most: int) -> None:
    """Raises TooManyTexts when a request brings more than the most."""
    if texts > most:
        raise TooManyTexts(f"The request brings {texts} texts; at most {most} are taken.")


def _read_with_surrogates(body: bytes, max_texts: int) -> PredictRequest:
    """The same for a body with lone surrogates: pydantic refuses it whole, Python's own parser does not."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise TextInvalid from None
    if not isinstance(value, dict) or not isinstance(value.get("inputs"), list):
        raise TextInvalid from None
    if len(value) > len(PredictRequest.model_fields):
        raise Unprocessable(_UNKNOWN_FIELD)  # before 200,000 of them are copied and looked at
    texts = value["inputs"]
    refuse_too_many(len(texts), max_texts)  # before each is looked at: that may take a third of a second
    bad = {place for place, text in enumerate(texts) if isinstance(text, str) and not is_unicode(text)}
    if not bad or not all(map(is_unicode, value)):
        raise TextInvalid from None
    try:
        request = PredictRequest.model_validate(
            {**value, "inputs": ["" if place in bad else text for place, text in enumerate(texts)]}
        )
    except ValidationError as error:
        raise _explain_all(error) from None
    return request.model_copy(update={"inputs": texts})


def _explain_all(error: ValidationError) -> ServiceError:
    if error.error_count() > MAX_ERRORS_READ:
        return Unprocessable(_UNKNOWN_FIELD)
    found = error.errors(include_url=False, include_input=False)
    return _explain([(one["type"], one["loc"], one.get("ctx", {})) for one in found])


_UNKNOWN_FIELD = (
    f"There is a field that is not known; the fields are {', '.join(PredictRequest.model_fields)}."
)
_WRONG_SHAPE = {
    "top_k": "top_k must be null or a whole number of at least 1.",
    "truncate": "truncate must be true or false.",
    "raw_scores": "raw_scores must be true or false.",
}

_Found = tuple[str, tuple[int | str, ...], dict[str, Any]]


def _explain(found: Sequence[_Found]) -> ServiceError:
    """The most helpful of what pydantic found wrong (type, place, context), in words of our own."""
    kinds = {kind for kind, _, _ in found}
    if "json_invalid" in kinds:
        return _explain_syntax(str(found[0][2]["error"]))
    if any(not place for _, place, _ in found):
        return Unprocessable("The body must be a JSON object.")
    unknown = [place[0] for kind, place, _ in found if kind == "extra_forbidden"]
    if any(name in MISTAKEN_NAMES for name in unknown):
        mistaken = next(name for name in MISTAKEN_NAMES if name in unknown)
        return Unprocessable(f"There is no field `{mistaken}`: the texts belong in the field `inputs`.")
    if unknown:
        return Unprocessable(_UNKNOWN_FIELD)
    if "missing" in kinds:
        return Unprocessable("The field `inputs` is missing.")
    field = str(found[0][1][0])
    return Unprocessable(_WRONG_SHAPE.get(field) or _explain_inputs(found))


def _explain_inputs(found: Sequence[_Found]) -> str:
    if any(kind == "too_short" for kind, _, _ in found):
        return "inputs must hold at least one text."
    for _, place, _ in found:
        if isinstance(place[-1], int):
            return f"inputs.{place[-1]} must be a string."
    return "inputs must be a string or a list of strings."


def _explain_syntax(error: str) -> ServiceError:
    """`error` is the JSON parser's; it names a line and a column and quotes nothing."""
    if "surrogate" in error or "unexpected end of hex escape" in error:
        return TextInvalid()
    return BadRequest(f"The body is not valid JSON in UTF-8: {error}.")
