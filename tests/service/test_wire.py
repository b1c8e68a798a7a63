"""How a prediction is written where rounding would hide which label is best."""

import numpy as np
import pytest

from service.classifier import activate
from service.core import Prediction
from service.schemas import PredictRequest
from service.wire import outcome_entry


@pytest.mark.parametrize("raw_scores", [False, True])
def test_the_best_label_is_that_of_the_largest_logit_where_both_probabilities_are_1(raw_scores: bool) -> None:
    logits = np.array([[40.0, 50.0, -1.0]], dtype=np.float32)
    scores = activate(logits, "sigmoid", temperature=1.0)
    assert scores[0, 0] == scores[0, 1] == 1.0
    one = Prediction(tuple(logits[0].tolist()), tuple(scores[0].tolist()), 3, truncated=False)
    entry = outcome_entry(["good", "loud", "new"], one, PredictRequest(inputs="", raw_scores=raw_scores))
    assert entry["label"] == "loud"
    assert isinstance(entry["scores"], dict)
    assert list(entry["scores"]) == ["loud", "good", "new"]
