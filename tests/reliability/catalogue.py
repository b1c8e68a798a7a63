"""The catalogue of faults that operators of such services have met, and the page that says what covers each.

    python -m tests.reliability.catalogue           write TABLE.md
    python -m tests.reliability.catalogue --check   exit 1 when it is not fresh

A test covers the rows in its name: `test_r09_r58_…` covers 9 and 58, wherever it lives. What a row needs that
no test can show stands in README.md, in a line that begins with "- r45: ". Knows nothing of the service.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
TESTS = FOLDER.parent
TABLE = FOLDER / "TABLE.md"

KINDS = {
    "A": "The batcher gets stuck, or spreads one failure",
    "B": "Clients that go away",
    "C": "Hostile or odd bodies",
    "D": "A tokenizer shared by threads, or forked",
    "E": "Wrong numbers: padding, precision, quantisation",
    "F": "Labels, scores, a model and a tokenizer that do not fit",
    "G": "Files and engines on another machine",
    "H": "Cores, threads and memory in a container",
    "I": "Health, readiness, start and stop",
    "J": "Metrics, autoscaling, load tests",
}

ROWS: dict[int, tuple[str, str]] = {
    2: ("A", "one bad text fails all that share its batch"),
    3: ("A", "an exception ends the thread that runs the model, and nobody is answered any more"),
    4: ("A", "a caller gets the answers of another, or none"),
    6: ("A", "the limit of a batch counts requests, not texts"),
    7: ("A", "an overflow drops requests without an answer"),
    8: ("A", "one text and a list of one are admitted by different rules"),
    9: ("A", "a full queue looks like a crash"),
    10: ("A", "a deadline is looked at only when the running batch ends"),
    11: ("A", "short texts pay for the long one beside them"),
    12: ("A", "the wait for company counts from the wrong moment"),
    13: ("B", "a layer hides that the client is gone, and its work goes on"),
    14: ("B", "gauges never come down after clients that went"),
    16: ("C", "NaN and Infinity in a body become a 500"),
    17: ("C", "bytes that are no UTF-8, or another content type, become a 500"),
    19: ("C", "a body of any size is read into memory"),
    20: ("C", "deep nesting becomes a 500"),
    21: ("C", "a limit on characters refuses a text that may be cut"),
    22: ("C", "a text is cut alone and not in a list"),
    23: ("C", "an empty or blank text fails deep in the model"),
    24: ("C", "control tokens can be typed"),
    25: ("C", "one huge word blocks everybody"),
    26: ("C", "texts of emoji alone all look the same, and nobody sees it"),
    28: ("D", "tokenizing hangs in a forked child"),
    29: ("D", "the first prediction of a forked worker hangs"),
    31: ("E", "int8 overflows on processors without the instructions"),
    32: ("E", "the answer depends on the neighbours"),
    33: ("E", "padding becomes NaN, and NaN leaves the service"),
    34: ("E", "a fused kernel takes padding to be on the right"),
    35: ("E", "dropout is still on"),
    36: ("F", "softmax of one output, or of labels that do not exclude each other"),
    37: ("F", "names of labels come from the server, or in a wrong order"),
    38: ("F", "the shape of an answer changes with an option"),
    39: ("F", "a foreign tokenizer is served without a word"),
    40: ("F", "the graph and the tokenizer disagree on the inputs"),
    41: ("F", "the longest texts are longer than the positions of the model"),
    43: ("G", "a trace is bound to the device that it was made on"),
    44: ("G", "the first calls of a shape compile"),
    45: ("G", "on a GPU the first run of each shape is slow"),
    48: ("H", "threads are pinned to cores that the process may not use"),
    49: ("H", "an idle process burns a core"),
    50: ("H", "memory grows with each larger shape"),
    51: ("H", "torch keeps memory for each shape and thread"),
    52: ("H", "after running out of memory the service hangs and says it is well"),
    53: ("I", "health waits for inference"),
    54: ("I", "health waits for a thread that predictions hold"),
    56: ("I", "ready although nothing is loaded"),
    57: ("I", "not even live while the model loads"),
    58: ("I", "liveness turns red when the queue is full"),
    59: ("I", "a supervisor kills the worker that loads"),
    61: ("I", "SIGTERM does not reach the server"),
    62: ("I", "idle connections are closed before the proxy closes them"),
    64: ("J", "each scrape shows another worker"),
    65: ("J", "files of dead workers pile up"),
    66: ("J", "the autoscaler looks at what only rises"),
    67: ("J", "durations follow the wall clock"),
    68: ("J", "the load tool is the limit, and mixes refusals with answers"),
}

_NAME = re.compile(r"test((?:_r\d+)+)_")
_REASON = re.compile(r"^- r(\d\d): (.+(?:\n {2}\S.*)*)", re.MULTILINE)


def rows_of(name: str) -> list[str]:
    """The rows in the name of a test, as they are written there."""
    found = _NAME.match(name)
    return re.findall(r"_r(\d+)", found.group(1)) if found else []


def named_tests() -> Iterator[tuple[Path, str]]:
    """Every test that names a row: its file, and its name."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and rows_of(node.name):
                yield path, node.name


def cover_by_tests() -> dict[int, list[str]]:
    """`file::test` of each row, as a path from the folder of the tests."""
    found: dict[int, list[str]] = defaultdict(list)
    for path, name in named_tests():
        for row in rows_of(name):
            found[int(row)].append(f"{path.relative_to(TESTS)}::{name}")
    return dict(found)


def reasons() -> dict[int, str]:
    """What README.md says of a row."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    return {int(row): " ".join(reason.split()) for row, reason in _REASON.findall(text)}


def page(tests: Mapping[int, Sequence[str]], said: Mapping[int, str]) -> str:
    """TABLE.md."""
    lines = [
        "# What covers each fault",
        "",
        "<!-- Made by `python -m tests.reliability.catalogue`; do not edit. -->",
        "",
        "Each row is a fault that operators of such services have met; a test names the rows that it covers.",
    ]
    for kind, title in KINDS.items():
        lines += ["", f"## {kind}. {title}", "", "| row | fault | covered by |", "|---|---|---|"]
        for row, (own_kind, fault) in ROWS.items():
            if own_kind == kind:
                cover = [f"`{test}`" for test in tests.get(row, ())]
                cover += [said[row]] if row in said else []
                lines.append(f"| {row} | {fault} | {'<br>'.join(cover)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    fresh = page(cover_by_tests(), reasons())
    if "--check" in arguments:
        return 0 if TABLE.is_file() and TABLE.read_text(encoding="utf-8") == fresh else 1
    TABLE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
