"""A version says what its run was trained on, a line for each data set and one for the teacher."""

from pathlib import Path
from typing import Any

from service.store import Source
from tests.training.test_distil import taught, teach
from tests.training.tiny import TRAIN_ROWS, tiny_config, write_rows
from training.mix import write_mix
from training.origin import open_origin
from training.recipe import Part, Recipe
from training.sources import training_sources
from training.train import fit


def make_mix(folder: Path) -> Path:
    """Films and goods that train, pieces of films that a teacher labels, films that judge."""
    data = folder / "sets"
    write_rows(data / "films" / "train.tsv", TRAIN_ROWS[:20] + TRAIN_ROWS[-20:])
    write_rows(data / "films" / "more.tsv", TRAIN_ROWS[20:26])
    write_rows(data / "goods" / "all.tsv", TRAIN_ROWS[30:34] + TRAIN_ROWS[-34:-30])
    write_rows(data / "films" / "dev.tsv", TRAIN_ROWS[40:44])
    (data / "goods" / "SOURCE.md").write_text("## Licence as stated\nCC BY 4.0\n", encoding="utf-8")
    parts = (
        Part(file="films/train.tsv"),
        Part(file="goods/all.tsv"),
        Part(file="films/more.tsv", role="unlabelled"),
        Part(file="films/dev.tsv", role="dev"),
    )
    write_mix(Recipe(seed=1, keep_out=(), parts=parts), data, folder / "mix")
    return folder / "mix"


def sources_of(run: Path, *given: Source) -> list[tuple[str, str, int | None]]:
    origin = open_origin(run, base_model=Source("tiny", "MIT"), training_data=given)
    return [(source.name, source.licence, source.rows) for source in origin.training_data]


def test_a_run_on_a_mix_names_the_sets_with_their_licences(tiny_base: Path, tmp_path: Path) -> None:
    """Without a teacher the pieces were not read."""
    fit(tiny_config(tiny_base, make_mix(tmp_path), epochs=1), tmp_path / "run", threads=1)
    assert sources_of(tmp_path / "run") == [("films", "none stated", 40), ("goods", "CC BY 4.0", 8)]
    given = sources_of(tmp_path / "run", Source("films", "CC0-1.0"), Source("pages", "MIT"))
    assert given == [("films", "CC0-1.0", 40), ("goods", "CC BY 4.0", 8), ("pages", "MIT", None)]


def test_a_teacher_is_a_source_and_so_are_the_texts_that_it_labels(tiny_base: Path, tmp_path: Path) -> None:
    mix = make_mix(tmp_path)
    teacher = teach(mix, tmp_path / "t.npz", base_licence="Apache-2.0")
    fit(taught(tiny_base, mix, teacher, epochs=1), tmp_path / "run", threads=1)
    assert sources_of(tmp_path / "run", Source("films", "CC0-1.0")) == [
        ("films", "CC0-1.0", 46),
        ("goods", "CC BY 4.0", 8),
        ("teacher big", "Apache-2.0", 54),
    ]


def test_a_folder_beside_the_mix_is_a_set_of_its_own() -> None:
    files = [file("mix/train.tsv", 5, "aa"), file("mix/dev.tsv", 0, "bb"), file("own/train.tsv", 3, "cc")]
    part = {"source": "films/train", "role": "train", "rows": 5}
    mix = {"parts": [part], "licences": {"films": None}, "sha256": {"train.tsv": "aa", "dev.tsv": "bb"}}
    run = {"files": files, "mix": [mix], "distillation": None}
    assert [(one.name, one.rows) for one in training_sources(run, ())] == [("own", 3), ("films", 5)]


def test_a_run_of_an_earlier_release_is_named_by_its_folders() -> None:
    run = {"files": [file("sst2/train.tsv", 67_349, "aa")], "training_rows": {"rows_kept": 66_971}}
    assert training_sources(run, ()) == (Source("sst2", "none stated", 66_971),)


def file(name: str, train: int, digest: str) -> dict[str, Any]:
    return {"name": name, "sha256": digest, "rows": {"train": train, "dev": 0, "test": 0}}
