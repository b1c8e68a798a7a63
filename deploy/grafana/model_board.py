"""The dashboard of the model: what it is asked, what it answers, and whether either has changed.

A table of panels; knows nothing of how one is drawn.
"""

from deploy.grafana.boards import Board, Row
from deploy.grafana.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE_BLUE,
    PURPLE,
    RED,
    YELLOW,
    Heat,
    Lines,
    Query,
    Stat,
)
from deploy.grafana.queries import JOB, RATE, SELECTED, some_or_none


def _share(part: str, whole: str) -> str:
    """Of two counters; nothing where there is no traffic, which is not a share of 0."""
    return f"sum(rate({part})) / (sum(rate({whole})) > 0)"


def _quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket{RATE})))"


_LABELS = f"sum by (label) (rate(valence_predictions_total{RATE}))"
_UNSURE = _share(
    f'valence_prediction_confidence_bucket{{le="0.6", {SELECTED}}}[$__rate_interval]',
    f"valence_prediction_confidence_count{RATE}",
)
_TRUNCATED = _share(f"valence_texts_truncated_total{RATE}", f"valence_text_tokens_count{RATE}")
_LABEL_COLORS = {"^positive": GREEN, "^negative": RED}
_BOUND = 3
"""Standard deviations beyond which a change is no longer taken for chance."""

_GLANCE = (
    Stat(
        title="Served",
        says="Model, version, engine and precision that answer now.",
        advice="Two of them for longer than a rollout: it has stopped half way.",
        unit="none",
        width=6,
        names=True,
        base=BLUE,
        queries=[
            Query(
                f"count by (model, version, engine, precision) (valence_model_info{{{SELECTED}}})",
                "{{model}} {{version}}, {{engine}} {{precision}}",
            )
        ],
    ),
    Stat(
        title="Texts",
        says="Texts predicted a second; a request may bring many.",
        advice="Everything below is about these texts: few of them make every share jump.",
        unit="suffix: texts/s",
        decimals=0,
        base=BLUE,
        queries=[Query(f"sum(rate(valence_predictions_total{RATE}))", "texts")],
    ),
    Stat(
        title="Commonest label",
        says="The share of the label that is answered most.",
        advice="Near 100 %: the texts are all alike, or the model no longer tells them apart.",
        unit="percentunit",
        decimals=0,
        steps=[(0.9, ORANGE), (0.98, RED)],
        queries=[Query(f"max({_LABELS}) / (sum({_LABELS}) > 0)", "share")],
    ),
    Stat(
        title="Median confidence",
        says="Half of the texts got their label with a higher score.",
        advice="Falling: texts unlike those that the model was trained with. Read some, with their "
        "owners' consent.",
        unit="percentunit",
        decimals=1,
        base=RED,
        steps=[(0.7, ORANGE), (0.85, GREEN)],
        queries=[Query(_quantile(0.5, "valence_prediction_confidence"), "median")],
    ),
    Stat(
        title="Unsure",
        says="The share of the texts whose best label scored at most 0.6.",
        advice="What is done with such answers is for the caller to decide; tell them when it doubles.",
        unit="percentunit",
        decimals=1,
        steps=[(0.1, YELLOW), (0.25, ORANGE)],
        queries=[Query(_UNSURE, "unsure")],
    ),
    Stat(
        title="Cut",
        says="The share of the texts that were longer than the model reads.",
        advice="Above a few per cent: callers should send paragraphs, or ask with truncate: false.",
        unit="percentunit",
        decimals=1,
        steps=[(0.02, YELLOW), (0.1, ORANGE)],
        queries=[Query(_TRUNCATED, "cut")],
    ),
    Stat(
        title="Drift",
        says="The largest distance of a label's share, or of the confidence, from its week, in standard "
        "deviations.",
        advice=f"Above {_BOUND}: see the row Drift.",
        unit="suffix: σ",
        decimals=1,
        steps=[(2, YELLOW), (_BOUND, RED)],
        queries=[
            Query(
                f"max(abs(valence:label_drift:zscore{{{JOB}}}) or "
                f"abs(valence:confidence_drift:zscore{{{JOB}}}))",
                "drift",
            )
        ],
    ),
)

_ANSWERS = Row(
    "Labels and confidence",
    (
        Lines(
            title="Label mix",
            says="The share of each label.",
            advice="A step at a rollout is the model's doing; a step without one is the texts'.",
            unit="percentunit",
            stacked=True,
            least=0,
            most=1,
            colors=_LABEL_COLORS,
            queries=[
                Query(f"{_LABELS} / on() group_left() (sum({_LABELS}) > 0)", "{{label}}"),
            ],
        ),
        Heat(
            title="Confidence",
            says="How many texts got their label with which score.",
            advice="Sound is a bright band on top. A band that sinks: see Median confidence.",
            unit="percentunit",
            queries=[Query(f"sum by (le) (increase(valence_prediction_confidence_bucket{RATE}))", "{{le}}")],
        ),
        Lines(
            title="Confidence by share",
            says="The score that half, and that nine of ten texts, exceed; and the share with at most 0.6.",
            advice="The lowest tenth falls first when texts become unlike those of training.",
            unit="percentunit",
            least=0,
            most=1,
            queries=[
                Query(_quantile(0.5, "valence_prediction_confidence"), "half exceed", GREEN),
                Query(_quantile(0.1, "valence_prediction_confidence"), "nine of ten exceed", BLUE),
                Query(_UNSURE, "share with at most 0.6", ORANGE),
            ],
        ),
    ),
)

_TEXTS = Row(
    "Texts",
    (
        Lines(
            title="Input length",
            says="Tokens of a text as the model reads it: longer ones cost more than in proportion.",
            advice="p50 has doubled: so has the work of a request. Size anew by docs/kubernetes.md.",
            unit="suffix: tokens",
            queries=[
                Query(_quantile(0.5, "valence_text_tokens"), "p50", PALE_BLUE),
                Query(_quantile(0.95, "valence_text_tokens"), "p95", BLUE),
                Query(_quantile(0.99, "valence_text_tokens"), "p99", PURPLE),
            ],
        ),
        Heat(
            title="Lengths of all",
            says="How many texts had how many tokens.",
            advice="Two bands are two callers: sentences and documents. Ask whether they need the same "
            "service.",
            unit="suffix: tokens",
            queries=[Query(f"sum by (le) (increase(valence_text_tokens_bucket{RATE}))", "{{le}}")],
        ),
        Lines(
            title="Truncated",
            says="The share of the texts of which the model read only the beginning.",
            advice="Above a few per cent: the end of a review is often its verdict. Callers should send "
            "paragraphs.",
            unit="percentunit",
            least=0,
            queries=[Query(_TRUNCATED, "cut", ORANGE)],
        ),
        Lines(
            title="Unknown tokens",
            says="The share of the tokens that the vocabulary does not know: another script, or noise.",
            advice="A rise is another language or a broken encoding at a caller. The model guesses on "
            "such texts.",
            unit="percentunit",
            decimals=2,
            width=12,
            least=0,
            queries=[
                Query(
                    _share(f"valence_unknown_tokens_total{RATE}", f"valence_text_tokens_sum{RATE}"),
                    "unknown",
                    PURPLE,
                )
            ],
        ),
        Lines(
            title="Texts without an answer",
            says="Texts that were refused or failed, alone or in their place in a list, by error code.",
            advice="docs/errors.md says what each code means. engine_failed is ours: see the log.",
            unit="suffix: texts/s",
            width=12,
            colors={"^engine_failed$": RED, "^text_empty$": BLUE, "^none$": GREY},
            queries=[
                Query(
                    some_or_none(f"sum by (reason) (rate(valence_text_errors_total{RATE}))", "reason"),
                    "{{reason}}",
                )
            ],
        ),
    ),
)

_DRIFT = Row(
    "Drift: the last hour against the last week",
    (
        Lines(
            title="Drift z-score",
            says="How far the last hour is from the last week, in standard deviations of that week.",
            advice=f"Beyond ±{_BOUND} for an hour: compare Label mix, Input length and Unknown tokens "
            "over a week, find the "
            "caller whose texts changed, and score a sample by hand before you trust the answers.",
            unit="suffix: σ",
            decimals=1,
            width=12,
            colors={"^label positive$": GREEN, "^label negative$": RED},
            queries=[
                Query(f"max by (label) (valence:label_drift:zscore{{{JOB}}})", "label {{label}}"),
                Query(f"max(valence:confidence_drift:zscore{{{JOB}}})", "confidence", BLUE),
                Query(f"vector({_BOUND})", f"+{_BOUND}", GREY, dashed=True),
                Query(f"vector(-{_BOUND})", f"-{_BOUND}", GREY, dashed=True),
            ],
        ),
        Lines(
            title="What drifts",
            says="The hourly means that the z-scores are made of: a label's share, and the confidence.",
            advice="A slow slope never reaches a z-score: look at this over a month.",
            unit="percentunit",
            width=12,
            least=0,
            most=1,
            colors={"^share of positive$": GREEN, "^share of negative$": RED},
            queries=[
                Query(f"max by (label) (valence:label:ratio1h{{{JOB}}})", "share of {{label}}"),
                Query(f"max(valence:confidence:mean1h{{{JOB}}})", "mean confidence", BLUE),
            ],
        ),
    ),
)

MODEL = Board(
    uid="valence-model",
    title="Valence: model",
    description="What the model is asked, what it answers, and whether either has changed.",
    glance=_GLANCE,
    rows=(_ANSWERS, _TEXTS, _DRIFT),
)
