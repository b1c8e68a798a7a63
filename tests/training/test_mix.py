"""The rows of a recipe: what is drawn, what is cut, what is kept out, and the same bytes each time."""

import gzip
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from training.cli import main
from training.config import ConfigError
from training.data import DataError
from training.mix import read_mix, write_mix
from training.recipe import Part, Recipe, read_recipe

RECIPES = Path(__file__).parents[2] / "training" / "recipes"
SENTENCES = tuple((f"sentence number {number} is here", number % 2) for number in range(40))
REVIEWS = tuple((" ".join(f"w{number}_{place}" for place in range(300)), number % 2) for number in range(400))
FROZEN = {
    "teacher": {
        "train.tsv": "dd0286cd3626ff63382c3f9e925a3555221c5ddca50b12b9f6cbf5fa55ad9d40",
        "dev.tsv": "9e39a2136b3a1a24a386f5e0237e05bcb98a5bc6a69be16108f195bdb19ba1a4",
    },
    "student": {
        "train.tsv": "5b99ca6c7b78a385d443b26da1d080ce4d529014d7902f7778744a8feb672700",
        "dev.tsv": "9e39a2136b3a1a24a386f5e0237e05bcb98a5bc6a69be16108f195bdb19ba1a4",
        "unlabelled.tsv": "9bf8207cf3cc0a8cf947e3fb27f4e55e52e65ac5d44119cdc3a4d55dbaf706b4",
    },
}


def write_table(path: Path, header: str, rows: Sequence[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{line}\n" for line in (header, *("\t".join(map(str, row)) for row in rows))).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    write_table(folder / "short" / "train.tsv", "sentence\tlabel", SENTENCES)
    write_table(folder / "short" / "dev.tsv", "sentence\tlabel", [("a fair  judge", 1), ("another judge", 0)])
    write_table(folder / "long" / "all.tsv.gz", "text\tlabel", REVIEWS)
    (folder / "long" / "SOURCE.md").write_text(
        "# Long\n\n## Licence as stated\nApache-2.0 (LICENSE)\n\n## Labels\n0, 1\n", encoding="utf-8"
    )
    return folder


def mix(data: Path, *parts: Part, seed: int = 1, keep_out: tuple[str, ...] = ()) -> Path:
    """The folder of a mix of these parts."""
    out = data.parent / "mix"
    write_mix(Recipe(seed=seed, keep_out=keep_out, parts=parts), data, out)
    return out


def rows_of(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def texts_of(path: Path) -> list[str]:
    return [row[0] for row in rows_of(path)]


def test_rows_keep_label_and_source_and_each_role_has_its_file(data: Path) -> None:
    out = mix(
        data,
        Part(file="short/train.tsv"),
        Part(file="short/dev.tsv", role="dev"),
        Part(file="long/all.tsv.gz", role="unlabelled", rows=5),
    )
    assert sorted(path.name for path in out.iterdir()) == [
        "dev.tsv",
        "mix.json",
        "train.tsv",
        "unlabelled.tsv",
    ]
    assert Counter(map(tuple, rows_of(out / "train.tsv"))) == Counter(
        (text, str(label), "short/train") for text, label in SENTENCES
    )
    assert ["a fair judge", "1", "short/dev"] in rows_of(out / "dev.tsv")
    assert (out / "unlabelled.tsv").read_text(encoding="utf-8").startswith("text\tsource\n")
    assert {row[1] for row in rows_of(out / "unlabelled.tsv")} == {"long/all"}


def test_the_same_seed_gives_the_same_bytes_and_another_others(data: Path) -> None:
    parts = (Part(file="long/all.tsv.gz", rows=50, crop_words=(5, 50)),)
    first = (mix(data, *parts) / "train.tsv").read_bytes()
    assert (mix(data, *parts) / "train.tsv").read_bytes() == first
    assert (mix(data, *parts, seed=2) / "train.tsv").read_bytes() != first


def test_the_order_of_a_file_does_not_matter(data: Path) -> None:
    first = (mix(data, Part(file="short/train.tsv", rows=7)) / "train.tsv").read_bytes()
    write_table(data / "short" / "train.tsv", "sentence\tlabel", SENTENCES[::-1])
    assert (mix(data, Part(file="short/train.tsv", rows=7)) / "train.tsv").read_bytes() == first


def test_another_turn_draws_and_cuts_otherwise(data: Path) -> None:
    """Two parts of one file hold other rows, and of the same row another piece."""
    drawn, cut = [], []
    for turn in (0, 1):
        out = mix(data, Part(file="short/train.tsv", rows=7, turn=turn))
        drawn.append(set(texts_of(out / "train.tsv")))
        out = mix(data, Part(file="long/all.tsv.gz", crop_words=(5, 50), turn=turn))
        cut.append(set(texts_of(out / "train.tsv")))
    assert drawn[0] != drawn[1]
    assert len(cut[0] & cut[1]) < 5


def test_pieces_are_pieces_and_their_lengths_are_log_uniform_within_the_bounds(data: Path) -> None:
    whole = dict.fromkeys(text for text, _ in REVIEWS)
    pieces = texts_of(mix(data, Part(file="long/all.tsv.gz", crop_words=(8, 128))) / "train.tsv")
    assert len(pieces) == len(REVIEWS)
    for piece in pieces:
        assert any(f" {piece} " in f" {text} " for text in whole)
        assert 8 <= len(piece.split()) <= 128
    # Between 8 and 128 lie four octaves; each has its quarter, give or take 5 standard deviations.
    octaves = Counter(min(3, int(math.log2(len(piece.split()) / 8))) for piece in pieces)
    assert all(100 - 43 <= octaves[octave] <= 100 + 43 for octave in range(4))
    starts = [int(piece.split()[0].partition("_")[2]) for piece in pieces]
    assert min(starts) < 30
    assert max(starts) > 200


def test_a_text_that_is_no_longer_than_its_piece_stays_whole(data: Path) -> None:
    out = mix(data, Part(file="short/train.tsv", crop_words=(5, 5)))
    assert set(texts_of(out / "train.tsv")) == {text for text, _ in SENTENCES}


def test_rows_are_chosen_by_split_label_length_and_the_ids_to_leave_out(data: Path) -> None:
    rows = [("one two", 0, "train", "a"), ("three four", 2, "train", "b"), ("five", 2, "train", "c")]
    write_table(data / "s" / "x.tsv", "text\tlabel\tsplit\tid", [*rows, ("six seven", 2, "dev", "d")])
    write_table(data / "s" / "out.tsv", "id\treason", [("b", "twice")])

    def chosen(**choice: Any) -> set[str]:
        return set(texts_of(mix(data, Part(file="s/x.tsv", **choice)) / "train.tsv"))

    assert chosen() == {"one two", "three four", "five", "six seven"}
    assert chosen(split="train") == {"one two", "three four", "five"}
    assert chosen(only_label=2) == {"three four", "five", "six seven"}
    assert chosen(least_words=2) == {"one two", "three four", "six seven"}
    assert chosen(exclude="s/out.tsv") == {"one two", "five", "six seven"}


def test_what_is_reported_on_is_not_drawn_but_for_dev(data: Path) -> None:
    """In another spelling, too; and it is counted."""
    write_table(
        data / "held" / "test.tsv", "text\tlabel", [("SENTENCE  Number 3 is here", 1), ("a FAIR judge", 0)]
    )
    parts = (Part(file="short/train.tsv"), Part(file="short/dev.tsv", role="dev"))
    out = mix(data, *parts, keep_out=("held/test.tsv",))
    assert "sentence number 3 is here" not in texts_of(out / "train.tsv")
    assert len(texts_of(out / "train.tsv")) == len(SENTENCES) - 1
    assert "a fair judge" in texts_of(out / "dev.tsv")
    parts_of = json.loads((out / "mix.json").read_text(encoding="utf-8"))["parts"]
    assert [part["also_reported"] for part in parts_of] == [1, 0]


def test_the_summary_counts_names_licences_and_hashes(data: Path) -> None:
    out = mix(
        data, Part(file="short/train.tsv", rows=4), Part(file="long/all.tsv.gz", role="unlabelled", rows=2)
    )
    summary = read_mix(out)
    assert summary is not None
    assert summary["parts"][0] == {
        "source": "short/train",
        "role": "train",
        "rows": 4,
        "words": 20,
        "also_reported": 0,
    }
    assert summary["licences"] == {"short": None, "long": "Apache-2.0 (LICENSE)"}
    digest = hashlib.sha256((out / "unlabelled.tsv").read_bytes()).hexdigest()
    assert summary["sha256"]["unlabelled.tsv"] == digest


@pytest.mark.parametrize(
    "stated",
    [
        "the repository states no licence",
        "No licence stated",
        "Apache-2.0; the data sets state none there",
        "",
    ],
)
def test_a_set_without_a_licence_of_its_own_has_none(data: Path, stated: str) -> None:
    source = data / "short" / "SOURCE.md"
    source.write_text(f"## Licence as stated\n{stated}\n\n## Labels\n0\n", encoding="utf-8")
    summary = read_mix(mix(data, Part(file="short/train.tsv")))
    assert summary is not None
    assert summary["licences"]["short"] is None


def test_a_file_of_another_recipe_does_not_stay(data: Path) -> None:
    mix(data, Part(file="short/train.tsv"), Part(file="long/all.tsv.gz", role="unlabelled"))
    out = mix(data, Part(file="short/train.tsv"))
    assert sorted(path.name for path in out.iterdir()) == ["mix.json", "train.tsv"]


def test_a_summary_that_is_of_other_files_is_refused(data: Path) -> None:
    out = mix(data, Part(file="short/train.tsv"))
    (out / "unlabelled.tsv").write_text("text\tsource\nx\ty\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"unlabelled\.tsv: not the file that mix\.json describes"):
        read_mix(out)
    (out / "mix.json").write_text("[]", encoding="utf-8")
    with pytest.raises(DataError, match="not the summary of a mix"):
        read_mix(out)
    (out / "mix.json").unlink()
    assert read_mix(out) is None


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (Part(file="short/train.tsv", rows=41), r"short/train\.tsv: 41 rows are asked for, 40 are left"),
        (Part(file="short/train.tsv", only_label=7), "1 rows are asked for, 0 are left"),
        (Part(file="short/train.tsv", split="train"), r"train\.tsv:2: no column 'split'"),
        (Part(file="short/train.tsv", exclude="short/dev.tsv"), r"dev\.tsv:2: no column 'id'"),
        (Part(file="short/gone.tsv"), r"gone\.tsv: cannot be read"),
        (Part(file="odd/words.tsv"), r"words\.tsv:2: the label is not a whole number"),
        (Part(file="odd/nameless.tsv"), r"nameless\.tsv:2: no column 'text' or 'sentence'"),
        (Part(file="odd/unlabelled.tsv"), r"unlabelled\.tsv:2: no column 'label'"),
        (Part(file="odd/ragged.tsv"), r"ragged\.tsv:3: 1 fields, the header has 2"),
    ],
)
def test_files_that_do_not_fit_are_told_and_nothing_is_written(data: Path, part: Part, reason: str) -> None:
    write_table(data / "odd" / "words.tsv", "text\tlabel", [("good", "positive")])
    write_table(data / "odd" / "nameless.tsv", "words\tlabel", [("good", 1)])
    write_table(data / "odd" / "unlabelled.tsv", "text\tsource", [("good", "x")])
    write_table(data / "odd" / "ragged.tsv", "text\tlabel", [("good", 1), ("bad",)])
    with pytest.raises(DataError, match=reason):
        mix(data, part)
    assert not (data.parent / "mix").exists()


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("seed = ", "Invalid value"),
        ("seed = 1", r"there is no \[\[part\]\]"),
        ("seed = 1\npart = []", r"there is no \[\[part\]\]"),
        ("seed = 1\n[part]\nfile = 'x'", r"there is no \[\[part\]\]"),
        ("[[part]]\nfile = 'x'", "seed: a whole number is needed"),
        ("seed = '1'\n[[part]]\nfile = 'x'", "seed: a whole number is needed"),
        ("seed = 1\nsalt = 2\n[[part]]\nfile = 'x'", "unknown: salt"),
        ("seed = 1\nkeep_out = 'x'\n[[part]]\nfile = 'x'", "keep_out: not a list of files"),
        ("seed = 1\n[[part]]\nrows = 3", "part 1: file is missing"),
        ("seed = 1\n[[part]]\nfile = 'x'\n[[part]]\nfile = 'x'\nrow = 3", "part 2: unknown: row"),
        ("seed = 1\n[[part]]\nfile = 'x'\nrows = true", "part 1: rows: not of the type int"),
        ("seed = 1\n[[part]]\nfile = 'x'\nrows = 0", "x: rows: 0 is less than 1"),
        ("seed = 1\n[[part]]\nfile = 'x'\nrole = 'test'", "x: role 'test' is not train, dev, unlabelled"),
        ("seed = 1\n[[part]]\nfile = 'x'\ncrop_words = [9]", r"part 1: crop_words: \[9\] is not shortest"),
        ("seed = 1\n[[part]]\nfile = 'x'\ncrop_words = [9, 3]", r"x: crop_words: \[9, 3\] is not shortest"),
        ("seed = 1\n[[part]]\nfile = 'x'\ncrop_words = [0, 3]", r"x: crop_words: \[0, 3\] is not shortest"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused_with_its_file(
    tmp_path: Path, recipe: str, reason: str
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(recipe, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"bad\.toml: .*{reason}"):
        read_recipe(path)


def test_a_recipe_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml: cannot be read: No such file"):
        read_recipe(tmp_path / "gone.toml")


def test_the_command_prints_the_parts(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "few.toml"
    recipe.write_text('seed = 1\n[[part]]\nfile = "short/train.tsv"\nrows = 3\n', encoding="utf-8")
    out = tmp_path / "few"
    assert main(["mix", str(recipe), "--data", str(data), "--out", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split()[:4] == ["source", "role", "rows", "words"]
    assert said[-1].split() == ["short/train", "train", "3", "15", "0"]
    recipe.write_text("seed = 1", encoding="utf-8")
    assert main(["mix", str(recipe), "--data", str(data), "--out", str(out)]) == 2
    assert "few.toml: there is no [[part]]" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(FROZEN))
def test_the_recipes_of_the_project_give_the_bytes_that_were_trained_on(name: str, tmp_path: Path) -> None:
    """The logits of the teacher that are kept belong to these bytes."""
    folder = os.environ.get("VALENCE_DATA")
    if folder is None:
        pytest.skip("VALENCE_DATA, the folder of the data sets, is not set")
    summary = write_mix(read_recipe(RECIPES / f"{name}.toml"), Path(folder), tmp_path)
    assert summary["sha256"] == FROZEN[name]
