"""What is asked, and what the answer must be: sentences, reviews, lists, and requests that must be refused.

Knows nothing of locust, of how a request is sent or of when. No message repeats what was sent.
"""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from load_tests import texts

JSON = "application/json"
PROBLEM = "application/problem+json"
MARK = "unrepeatable"  # stands in what is refused, and must not come back
LARGEST_BODY_BYTES = 2_000_000  # the default of VALENCE_MAX_BODY_BYTES
MOST_TEXTS = 256  # the default of VALENCE_MAX_TEXTS
MIXES = ("realistic", "valid", "sentences")


class Outcome(StrEnum):
    """What became of a request.

    ANSWERED as documented, which for a wrong request is its refusal; REFUSED with 503 and when to come back;
    LATE with 504; WRONG is all else: another status, a body that is not true, no answer.
    """

    ANSWERED = "answered"
    REFUSED = "refused"
    LATE = "late"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The refusal that a wrong request must get."""

    status: int
    code: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """A `POST /predict` and what must come back.

    Attributes:
        kind: its name in the report.
        texts: how many it brings.
        unreadable: the places of those that must have an error in their place.
        refusal: set when the whole request must be refused.
    """

    kind: str
    body: bytes = field(repr=False)  # holds texts, which no trace may show
    content_type: str = JSON
    texts: int = 1
    unreadable: frozenset[int] = frozenset()
    refusal: Refusal | None = None

    def judge(self, status: int, headers: Mapping[str, str], body: bytes) -> tuple[Outcome, str]:
        """The outcome, and for a wrong one why, in words that hold nothing of either body.

        Args:
            headers: with names in lower case.
        """
        try:
            answer = json.loads(body)
        except ValueError:
            return Outcome.WRONG, f"status {status}, and a body that is not JSON"
        if status in {503, 504} or self.refusal is not None:
            return self._judge_refusal(status, headers, answer, body)
        if status != 200:
            return Outcome.WRONG, f"status {status} ({_code(answer)})"
        problem = _prediction_problem(answer, self.texts, self.unreadable)
        return (Outcome.WRONG, problem) if problem else (Outcome.ANSWERED, "")

    def _judge_refusal(
        self, status: int, headers: Mapping[str, str], answer: Any, body: bytes
    ) -> tuple[Outcome, str]:
        if headers.get("content-type", "").partition(";")[0] != PROBLEM or not _is_problem(answer, status):
            return Outcome.WRONG, f"status {status} without a problem body"
        if MARK.encode() in body:
            return Outcome.WRONG, "the refusal repeats what was sent"
        if status == 504:
            return Outcome.LATE, ""
        if status == 503:
            told = headers.get("retry-after", "")
            told_when = told.isdecimal() and int(told) >= 1
            return (Outcome.REFUSED, "") if told_when else (Outcome.WRONG, "status 503 without Retry-After")
        if self.refusal == Refusal(status, answer["code"]):
            return Outcome.ANSWERED, ""
        return Outcome.WRONG, f"status {status} ({answer['code']})"


def _code(answer: Any) -> str:
    return str(answer.get("code", "no code")) if isinstance(answer, dict) else "no code"


def _is_problem(answer: Any, status: int) -> bool:
    words = ("type", "title", "detail", "code", "request_id")
    return (
        isinstance(answer, dict)
        and answer.get("status") == status
        and all(isinstance(answer.get(word), str) and answer[word] for word in words)
    )


def _prediction_problem(answer: Any, count: int, unreadable: frozenset[int]) -> str:
    """What is not true of the body of a 200; empty when all is."""
    if not isinstance(answer, dict) or not answer.get("model") or not answer.get("version"):
        return "no model or version"
    predictions = answer.get("predictions")
    if not isinstance(predictions, list) or len(predictions) != count:
        return "not as many predictions as texts"
    for place, one in enumerate(predictions):
        if not isinstance(one, dict):
            return "a prediction of another shape"
        if place in unreadable:
            if _code(one.get("error")) != "text_empty":
                return "an empty text without its error"
        elif not _is_prediction(one):
            return "a prediction that does not agree with itself"
    return ""


def _is_prediction(one: Mapping[str, Any]) -> bool:
    """Label, its score, and the scores best first; all of them probabilities."""
    scores, tokens = one.get("scores"), one.get("tokens")
    if not isinstance(scores, dict) or not scores or not isinstance(tokens, int) or tokens < 1:
        return False
    values = list(scores.values())
    return (
        all(isinstance(value, int | float) and 0 <= value <= 1 for value in values)
        and values == sorted(values, reverse=True)
        and (one.get("label"), one.get("score")) == next(iter(scores.items()))
        and isinstance(one.get("truncated"), bool)
    )


def wrong_requests() -> list[Prepared]:
    """One of each kind that must be refused."""

    def wrong(kind: str, body: str, refusal: Refusal, content_type: str = JSON) -> Prepared:
        return Prepared(f"refused: {kind} ({refusal.status})", body.encode(), content_type, refusal=refusal)

    fitting = json.dumps({"inputs": MARK})
    return [
        wrong("not JSON", f'{{"inputs": "{MARK}', Refusal(400, "bad_request")),
        wrong(
            "body too large",
            json.dumps({"inputs": MARK + "." * LARGEST_BODY_BYTES}),
            Refusal(413, "body_too_large"),
        ),
        wrong(
            "too many texts",
            json.dumps({"inputs": [MARK] * (MOST_TEXTS + 1)}),
            Refusal(413, "too_many_texts"),
        ),
        wrong("not sent as JSON", fitting, Refusal(415, "unsupported_media_type"), "text/plain"),
        wrong("another field", json.dumps({"text": MARK}), Refusal(422, "unprocessable")),
        wrong("another type", json.dumps({"inputs": [MARK, 7]}), Refusal(422, "unprocessable")),
        wrong("empty text", json.dumps({"inputs": ""}), Refusal(422, "text_empty")),
    ]


class Deck:
    """A hundred requests in random order, then a hundred others: each kind is there, and in proportion.

    Args:
        mix: `realistic`; `valid`, the same without wrong requests; `sentences`, one sentence a request.
    """

    def __init__(self, mix: str, seed: int = 1) -> None:
        if mix not in MIXES:
            raise ValueError(f"there is no mix {mix!r}; there are {', '.join(MIXES)}")
        self._mix = mix
        self._dice = random.Random(seed)  # noqa: S311 - seeded dice
        self._sentences = texts.sentences()
        self._reviews = texts.whole_reviews() if mix != "sentences" else []
        self._wrong = wrong_requests() if mix == "realistic" else []

    def __iter__(self) -> Iterator[Prepared]:
        """Requests without end."""
        while True:
            cards = self._cards()
            self._dice.shuffle(cards)
            yield from cards

    def _cards(self) -> list[Prepared]:
        if self._mix == "sentences":
            return [self._sentence() for _ in range(100)]
        cards = [self._list() for _ in range(14)] + [self._list_with_an_empty_text() for _ in range(2)]
        cards += [Prepared("review", _body(self._dice.choice(self._reviews))) for _ in range(15)]
        cards += self._wrong
        return cards + [self._sentence() for _ in range(100 - len(cards))]

    def _sentence(self) -> Prepared:
        return Prepared("sentence", _body(self._dice.choice(self._sentences)))

    def _list(self) -> Prepared:
        """Of 2 to 32 sentences; short lists are more frequent."""
        chosen = self._dice.choices(self._sentences, k=round(2 ** self._dice.uniform(1, 5)))
        return Prepared("list", _body(chosen), texts=len(chosen))

    def _list_with_an_empty_text(self) -> Prepared:
        chosen = self._dice.choices(self._sentences, k=4)
        place = self._dice.randrange(4)
        chosen[place] = ""
        return Prepared("list with an empty text", _body(chosen), texts=4, unreadable=frozenset({place}))


def _body(inputs: str | list[str]) -> bytes:
    return json.dumps({"inputs": inputs}).encode()
