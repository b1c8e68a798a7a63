"""Makes the model card, the README.md of a version, from its manifest. Knows nothing of models or files."""

from collections.abc import Mapping, Sequence

from service.store import Manifest
from training.sources import NONE_STATED

WEAKNESSES = """\
- It has two sides only where it was trained with two: a text that is neutral is still put on one of them.
- Irony, comparisons with other things and praise that is taken back at the end are often read the wrong way.
- Words that its vocabulary does not have (most emoji, other scripts) become the unknown token.
- It knows the language and the kinds of text that it was trained on; it is too sure about others."""

HOW_INT8 = """\
`model.int8.onnx` multiplies in 8 bits: weights have a scale for each column, activations one for each row
(token). So a text gets the same answer whoever is beside it in the batch. Attention, LayerNorm and the head
stay in float32.
On an x86 processor without VNNI, onnxruntime must be told to be precise (the service does that)."""


HOW_TORCHSCRIPT = """\
`model.torchscript` is a program as well as weights (stored as float16, widened when it is loaded). Load it
only when its SHA-256 is the one in `manifest.json`, as the service does."""


def card_of(manifest: Manifest, sizes: Mapping[str, int], notes: Sequence[str] = ()) -> str:
    """Markdown. `sizes` are the bytes of each model file by name; `notes` are sections of their own."""
    parts = [
        f"# {manifest.name}, version {manifest.version}",
        _summary(manifest),
        "## Made from",
        _sources(manifest),
        "## Files",
        _table(
            ("file", "computes in", "MB"),
            [(f"`{m.path}`", m.precision, f"{sizes[m.path] / 1e6:.1f}") for m in manifest.models],
        ),
        "Weights were rounded to float16; the eager model with the rounded weights is the reference.",
    ]
    if any(model.precision == "int8" for model in manifest.models):
        parts.append(HOW_INT8)
    if any(model.format == "torchscript" for model in manifest.models):
        parts.append(HOW_TORCHSCRIPT)
    parts += [
        "## Measured",
        _table(
            ("what", "on", "form", "value", "examples"),
            [
                (m.name, m.dataset, f"{m.format}/{m.precision}", f"{m.value:.4g}", str(m.examples))
                for m in manifest.metrics
            ],
        ),
        "With these commands:",
        "\n".join(f"- `{command}`" for command in dict.fromkeys(m.command for m in manifest.metrics)),
        "## What it is bad at",
        WEAKNESSES,
        *notes,
    ]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _summary(manifest: Manifest) -> str:
    labels = ", ".join(f"`{label}`" for label in manifest.labels)
    return (
        f"Labels, in index order: {labels} ({manifest.activation}). It reads up to "
        f"{manifest.max_tokens} tokens of a text, special tokens included, and cuts the rest. "
        f"Made on {manifest.created}."
    ) + _temperature(manifest)


def _temperature(manifest: Manifest) -> str:
    if manifest.temperature == 1.0:
        return ""
    return (
        f"\n\nLogits are divided by a temperature of {manifest.temperature:.4g} before the "
        f"{manifest.activation}: the probabilities of the dev sets are then nearest to how often the model "
        "is right. No label changes by it."
    )


def _sources(manifest: Manifest) -> str:
    base = manifest.base_model
    rows = [("base model", base.name, base.licence, "")]
    rows += [
        ("training data", s.name, s.licence, "" if s.rows is None else f"{s.rows:,}")
        for s in manifest.training_data
    ]
    table = _table(("what", "name", "licence", "rows"), rows)
    silent = [source.name for source in (base, *manifest.training_data) if source.licence == NONE_STATED]
    if silent:
        table += (
            f"\n\nNo licence is stated by the source of: {', '.join(silent)}. "
            "Ask a lawyer before you use this version commercially."
        )
    return table


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
