"""The sets that a sentiment classifier of two labels is judged on, and how their files are read.

Knows nothing of models. Where the sets come from and what each is for: `training/recipes/README.md`.
"""

from dataclasses import dataclass
from pathlib import Path

from training.data import TEXT_COLUMNS, DataError, Example, table_rows
from training.evaluate import LabelledSet


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteSet:
    """A set of the suite.

    Attributes:
        file: below the folder of the data sets.
        purpose: "select" (it may choose a version), "test", or "other domain" (nothing of its kind was
            trained on).
        split: only the rows whose column `split` says so.
        quick: the file that stands for it where time is short.
        paired: its column `pair_id` says which rows belong together.
    """

    name: str
    file: str
    purpose: str
    split: str | None = None
    quick: str | None = None
    paired: bool = False


SUITE = (
    SuiteSet(name="sst2/dev", file="sst2/dev.tsv", purpose="select"),
    SuiteSet(name="sst2/test", file="sst2/test.tsv", purpose="test"),
    SuiteSet(name="imdb/test", file="imdb/test.tsv.gz", purpose="test", quick="imdb/test_subset1000.tsv.gz"),
    SuiteSet(name="imdb_cad/paired_test", file="imdb_cad/paired_test.tsv.gz", purpose="test", paired=True),
    *(
        SuiteSet(name=f"blitzer/{kind} dev", file=f"blitzer/{kind}.tsv.gz", purpose="select", split="dev")
        for kind in ("books", "dvd", "electronics")
    ),
    SuiteSet(name="blitzer/kitchen", file="blitzer/kitchen.tsv.gz", purpose="other domain"),
    SuiteSet(name="cr/all", file="cr/all.tsv.gz", purpose="other domain"),
    SuiteSet(name="movie_reviews/all", file="movie_reviews/all.tsv.gz", purpose="test"),
)
CHECKLIST = "checklist"
LABELS = 2


def read_suite(folder: Path, *, quick: bool = False) -> dict[str, LabelledSet]:
    """The rows of all sets by name, label 0 negative and 1 positive. Raises DataError.

    A row whose text is empty is left out and counted. With `quick` a part stands for the longest set, under
    a name of its own.
    """
    sets = {}
    for one in SUITE:
        file, name = one.file, one.name
        if quick and one.quick is not None:
            file, name = one.quick, one.quick.removesuffix(".tsv.gz")
        sets[name] = _read(folder / file, one)
    return sets


def _read(path: Path, one: SuiteSet) -> LabelledSet:
    examples, pairs, left_out = [], [], 0
    for where, row in table_rows(path):
        text = next((row[name] for name in TEXT_COLUMNS if name in row), None)
        if text is None or "label" not in row:
            raise DataError(f"{where}: no column 'text' or 'sentence', or no column 'label'")
        if (one.split and "split" not in row) or (one.paired and "pair_id" not in row):
            raise DataError(f"{where}: no column '{'split' if one.split else 'pair_id'}'")
        if one.split and row["split"] != one.split:
            continue
        if row["label"].strip() not in ("0", "1"):
            raise DataError(f"{where}: the label is neither 0 nor 1")
        if not text.strip():
            left_out += 1
            continue
        examples.append(Example(text.strip(), int(row["label"])))
        pairs.append(row.get("pair_id", ""))
    if not examples:
        raise DataError(f"{path}: no rows to measure")
    return LabelledSet(examples, left_out, pairs if one.paired else None)
