"""A check for schemathesis: what fits the document is accepted, but for what a schema cannot tell.

Knows nothing of the tokenizer: which texts hold nothing to read is decided here by other means than there.
"""

import json
from typing import Any

import schemathesis
from schemathesis.checks import CheckContext
from schemathesis.openapi.checks import RejectedPositiveData
from schemathesis.specs.openapi.checks import positive_data_acceptance

MAX_TOKENS = 64
"""Of the model behind the service that is tried; the special tokens take two."""


@schemathesis.check
def accepted_when_readable(
    ctx: CheckContext, response: schemathesis.Response, case: schemathesis.Case[Any]
) -> bool | None:
    """`positive_data_acceptance`, and a request may be refused with 422 when the refusal is true of it."""
    try:
        return positive_data_acceptance(ctx, response, case)
    except RejectedPositiveData:
        if response.status_code != 422 or not isinstance(case.body, dict):
            raise
        if not is_true(json.loads(response.content)["code"], case.body):
            raise
        return None


def is_true(code: str, body: dict[str, Any]) -> bool:
    """Whether the code of a refusal tells the truth of a body that fits the document."""
    text = body["inputs"]
    if code == "unprocessable":  # 2.0 is an integer to a schema; the service wants it written as one
        return isinstance(body.get("top_k"), float)
    if not isinstance(text, str):
        return False  # in a list a text has its error in its place
    if code == "text_empty":
        return not any(character.isalnum() for character in text)
    if code == "text_too_long":  # no text has more tokens than characters
        return body.get("truncate") is False and len(text) > MAX_TOKENS - 2
    return False
