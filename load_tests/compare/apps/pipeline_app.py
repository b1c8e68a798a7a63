"""The plain way: FastAPI, a transformers pipeline, a sync endpoint. `COMPARE_CHECKPOINT` names the folder."""

import os
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from transformers import pipeline


class Query(BaseModel):
    """The body."""

    text: str


def create_app() -> FastAPI:
    """For `uvicorn --factory`."""
    classify: Any = pipeline("text-classification", model=os.environ["COMPARE_CHECKPOINT"], device="cpu")
    app = FastAPI()

    @app.post("/predict")
    def predict(query: Query) -> dict[str, Any]:
        answer: dict[str, Any] = classify(query.text, truncation=True)[0]
        return answer

    return app
