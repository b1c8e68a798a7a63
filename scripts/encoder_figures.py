"""Draws the figures of docs/encoder.md, and prints the numbers that stand beside them.

python scripts/encoder_figures.py                  draw all, into docs/encoder
python scripts/encoder_figures.py --figures cost   measure and draw one

Needs the environment of `make test`. Weights and tokenizer come from the files of a version. Knows nothing of
training or serving.
"""

import argparse
import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tokenizers import Tokenizer
from torch import Tensor

from encoder.model import SequenceClassifier
from encoder.pretrained import from_checkpoint
from scripts.encoder_costs import PARTS, Cost, crossing, measure

ROOT = Path(__file__).parent.parent
VERSION = ROOT / "model_store/sentiment/1"
"""The version that the page speaks of, whichever is served: its heads, its probabilities."""
FIGURES = ("attention", "positions", "cost")
DPI = 100  # a figure 9 inches wide is 900 pixels

NEGATED = "The acting is good, but the story is not."
HEADS = (
    (1, 3, "the token before"),
    (4, 2, "‘not’ looks at ‘good’"),
    (3, 8, "rests on [CLS]"),
)
"""Layer and head, counted from 1, and what the head does in that sentence."""

SENTENCES = (
    NEGATED,
    "The film is not good, it is wonderful.",
    "The film is not wonderful, it is good.",
    "It was never dull, and I would watch it again.",
    "I wanted to like it, but I left early.",
    "Not cheap, but worth every penny.",
    "The waiter was rude and the soup was cold.",
    "A warm and funny evening with good friends.",
)
SHUFFLES = 50
SEED = 1

LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
STYLES = (("o", "-", "black"), ("s", "--", "black"), ("^", ":", "0.45"))
"""Marker, line and colour of each part."""


@dataclass(frozen=True)
class Shuffled:
    """Positive probabilities of a sentence: as it stands, and with its tokens shuffled."""

    sentence: str
    as_written: float
    shuffled: list[float]


def load_version(folder: Path) -> tuple[SequenceClassifier, Tokenizer]:
    """The classifier, in float32 and without dropout, and the tokenizer, from the files of a version."""
    architecture = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["architecture"]
    tensors = {
        tensor.name: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
        for tensor in onnx.load(folder / "model.onnx").graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT16  # the weights, and nothing else
    }
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return from_checkpoint(architecture, tensors).eval(), tokenizer


def without_positions(classifier: SequenceClassifier) -> SequenceClassifier:
    """The same weights, and nothing added for the place of a token."""
    bare = SequenceClassifier(replace(classifier.config, positions="none"))
    kept = {n: t for n, t in classifier.state_dict().items() if not n.startswith("encoder.positions.")}
    bare.load_state_dict(kept)
    return bare.eval()


@torch.no_grad()
def positive(classifier: SequenceClassifier, ids: Tensor) -> list[float]:
    """ids int64[b, n] without padding -> the positive probability of each text."""
    found: list[float] = classifier(ids).softmax(dim=-1)[:, 1].tolist()
    return found


def shuffle(classifier: SequenceClassifier, ids: Sequence[int], sentence: str) -> Shuffled:
    """Shuffles what stands between the special tokens; each call makes the same shuffles."""
    dice = random.Random(SEED)  # noqa: S311  repeatable, and no secret
    inner = list(ids[1:-1])
    rows = [list(ids)] + [[ids[0], *dice.sample(inner, len(inner)), ids[-1]] for _ in range(SHUFFLES)]
    as_written, *shuffled = positive(classifier, torch.tensor(rows))
    return Shuffled(sentence, as_written, shuffled)


def canvas(height: float) -> Figure:
    """An empty figure, 900 pixels wide."""
    figure = Figure(figsize=(9, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_map(axes: Axes, weights: Tensor, across: Sequence[str], down: Sequence[str]) -> None:
    """A map of weights [down, across], white for 0 and black for 1."""
    axes.imshow(weights.numpy(), cmap="Greys", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(across)), across, rotation=90)
    axes.set_yticks(range(len(down)), down)
    axes.tick_params(labelsize=10, length=0)
    axes.set_xticks([i + 0.5 for i in range(len(across) - 1)], minor=True)
    axes.set_yticks([i + 0.5 for i in range(len(down) - 1)], minor=True)
    axes.grid(which="minor", color="0.9", lw=0.6)


def draw_attention(classifier: SequenceClassifier, tokenizer: Tokenizer, path: Path) -> None:
    """Three heads over one sentence, and what the first token asks in every head of the last layer."""
    encoding = tokenizer.encode(NEGATED)
    ids, tokens = torch.tensor([encoding.ids]), encoding.tokens
    with torch.no_grad():
        weights = classifier.encoder(ids, return_weights=True).weights
    figure = canvas(8.6)
    *maps, last = figure.subplots(2, 2).flat
    for axes, (layer, head, what) in zip(maps, HEADS, strict=True):
        draw_map(axes, weights[layer - 1][0, head - 1], tokens, tokens)
        axes.set_title(f"layer {layer}, head {head}: {what}", fontsize=11)
    asked = weights[-1][0, :, 0]  # [h, n]: the row of [CLS] in each head
    draw_map(last, asked, tokens, [f"head {head}" for head in range(1, len(asked) + 1)])
    last.set_title("layer 6: where [CLS] looks, in each head", fontsize=11)
    figure.supxlabel("looked at (key)", fontsize=11)
    figure.supylabel("asking (query); each row sums to 1", fontsize=11)
    figure.savefig(path, format="png")
    print(f"attention: positive {positive(classifier, ids)[0]:.4f}: {NEGATED}")
    resting = sum(int((head[:, 0].mean() > 0.5).item()) for layer in weights for head in layer[0])
    heads = sum(layer.shape[1] for layer in weights)
    print(f"  {resting} of {heads} heads give [CLS] more than half of all weight")
    for i in range(1, len(tokens) - 1):
        left_out = torch.cat([ids[:, :i], ids[:, i + 1 :]], dim=1)
        print(
            f"  {tokens[i]:<8} read by [CLS] in layer 6: {asked[:, i].mean():.2f} (mean of the heads);"
            f" without it: {positive(classifier, left_out)[0]:.4f}"
        )


def draw_positions(results: Mapping[str, Sequence[Shuffled]], path: Path) -> None:
    """The probabilities of each sentence and its shuffles, a panel for each model."""
    figure = canvas(4.6)
    panels = figure.subplots(1, len(results), sharey=True)
    for axes, (title, sentences) in zip(panels, results.items(), strict=True):
        for row, found in enumerate(sentences):
            heights = [row + 0.5 * (i / (len(found.shuffled) - 1) - 0.5) for i in range(len(found.shuffled))]
            axes.plot(found.shuffled, heights, "o", ms=3.5, mfc="none", mec="0.35", mew=0.7, label="shuffled")
            axes.plot(found.as_written, row, "k|", ms=22, mew=2.5, label="as written")
        axes.axvline(0.5, color="0.6", lw=0.8, ls=":")
        axes.set(xlim=(-0.04, 1.04), xlabel="positive probability")
        axes.set_title(title, fontsize=11)
        axes.set_yticks(range(len(sentences)), [found.sentence for found in sentences], fontsize=9.5)
    panels[0].invert_yaxis()
    panels[-1].legend(*(marks[:2] for marks in panels[-1].get_legend_handles_labels()), fontsize=10)
    figure.savefig(path, format="png")


def draw_cost(costs: Sequence[Cost], path: Path) -> None:
    """Time and peak memory over the length, both axes logarithmic, with slopes 1 and 2."""
    figure = canvas(4.6)
    time_axes, memory_axes = figure.subplots(1, 2)
    draw_growth(time_axes, "CPU time of one call [ms]", [(c.part, c.tokens, c.seconds * 1e3) for c in costs])
    draw_growth(memory_axes, "peak memory [MB]", [(c.part, c.tokens, c.peak_bytes / 1e6) for c in costs])
    time_axes.legend(fontsize=10)
    figure.savefig(path, format="png")


def draw_growth(axes: Axes, title: str, points: Sequence[tuple[str, int, float]]) -> None:
    """A curve for each part, from its (part, tokens, value), over two grey lines that only show a slope."""
    lengths = sorted({tokens for _, tokens, _ in points})
    low, top = min(value for *_, value in points), max(value for *_, value in points)
    for part, (marker, line, colour) in zip(PARTS, STYLES, strict=True):
        values = [value for name, _, value in points if name == part]
        axes.loglog(lengths, values, marker=marker, ls=line, color=colour, ms=5, label=part)
    below, above = 0.4 * low / lengths[0], 2.5 * top / lengths[-1] ** 2
    axes.plot(lengths, [below * n for n in lengths], color="0.75", lw=1)
    axes.plot(lengths, [above * n**2 for n in lengths], color="0.75", lw=1)
    grey = {"fontsize": 10, "color": "0.35"}
    axes.text(lengths[-2], 0.75 * below * lengths[-2], "slope 1", ha="left", va="top", fontdict=grey)
    axes.text(lengths[-2], 1.3 * above * lengths[-2] ** 2, "slope 2", ha="right", fontdict=grey)
    axes.set_ylim(0.2 * low, 4 * top)
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=45)
    axes.tick_params(labelsize=10)
    axes.tick_params(which="minor", bottom=False, labelbottom=False)
    axes.set_xlabel("tokens", fontsize=11)
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25)


def print_positions(results: Mapping[str, Sequence[Shuffled]]) -> None:
    """For each model and sentence: the probability, its largest change, and the labels that flip."""
    for title, sentences in results.items():
        print(f"positions: {title}, {SHUFFLES} shuffles")
        for found in sentences:
            change = max(abs(p - found.as_written) for p in found.shuffled)
            flips = sum((p > 0.5) != (found.as_written > 0.5) for p in found.shuffled)
            print(f"  {found.as_written:.4f} change {change:.1e} flips {flips}: {found.sentence}")


def print_cost(costs: Sequence[Cost]) -> None:
    """The rows of the table, and where attention passes the feed-forward part."""
    print("cost: tokens | ms " + " | ms ".join(PARTS) + " | MB " + " | MB ".join(PARTS))
    for tokens in sorted({cost.tokens for cost in costs}):
        row = [cost for cost in costs if cost.tokens == tokens]
        values = [cost.seconds * 1e3 for cost in row] + [cost.peak_bytes / 1e6 for cost in row]
        cells = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]
        print(f"| {tokens:,} | {' | '.join(cells)} |")
    for cost in costs:
        if cost.part == PARTS[0]:
            share = cost.system_seconds / cost.seconds
            print(f"{cost.part}, {cost.tokens:,} tokens: {share:.0%} of the time is the operating system's")
    for part in PARTS[:2]:
        length = crossing(costs, part, PARTS[2])
        print(f"{part} passes the feed-forward part at: {length and round(length)} tokens")


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws what was asked for."""
    parser = argparse.ArgumentParser(description="Draws the figures of docs/encoder.md.")
    parser.add_argument("--figures", nargs="+", choices=FIGURES, default=FIGURES)
    parser.add_argument("--version", type=Path, default=VERSION)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/encoder")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens, for the cost")
    parser.add_argument("--repeats", type=int, default=10, help="runs at the greatest length")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    classifier, tokenizer = load_version(chosen.version)
    if "attention" in chosen.figures:
        draw_attention(classifier, tokenizer, chosen.out / "attention.png")
    if "positions" in chosen.figures:
        models = {"learned positions": classifier, "positions removed": without_positions(classifier)}
        results = {
            title: [shuffle(model, tokenizer.encode(text).ids, text) for text in SENTENCES]
            for title, model in models.items()
        }
        print_positions(results)
        draw_positions(results, chosen.out / "positions.png")
    if "cost" in chosen.figures:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes two lines for each run
        costs = measure(chosen.lengths, chosen.repeats)
        print_cost(costs)
        draw_cost(costs, chosen.out / "cost.png")


if __name__ == "__main__":
    main()
