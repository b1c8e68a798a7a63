"""Says what a run was trained on, as its version states it. Reads the metrics of the run; knows no model."""

from collections.abc import Mapping, Sequence
from typing import Any

from service.store import Source

NONE_STATED = "none stated"


def training_sources(run: Mapping[str, Any], given: Sequence[Source]) -> tuple[Source, ...]:
    """What was trained on, by the sets of a mix or the folders of the training files.

    `given` adds licences and other sets. A teacher is a source, too: its answers were learnt.
    """
    mixes = run.get("mix") or []
    lesson = run.get("distillation")
    rows = _of_files(run, mixes)
    licences = [mix["licences"] for mix in mixes]
    learnt = ("train",) if lesson is None else ("train", "unlabelled")
    for part in (part for mix in mixes for part in mix["parts"] if part["role"] in learnt):
        name = _set_of(part["source"])
        rows[name] = rows.get(name, 0) + int(part["rows"])
    if lesson is not None:
        kept = int(run["training_rows"]["rows_kept"]) + int(lesson["unlabelled"]["rows_kept"])
        about = lesson["teacher"]
        teacher = f"teacher {about.get('base') or about['model']}"
        rows[teacher] = kept
        licences.append({teacher: about.get("base_licence")})
    stated = {name: licence for known in licences for name, licence in known.items() if licence}
    stated |= {source.name: source.licence for source in given}
    read = [Source(name, stated.get(name, NONE_STATED), count) for name, count in rows.items()]
    return (*read, *(source for source in given if source.name not in rows))


def _of_files(run: Mapping[str, Any], mixes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The rows of each folder of training files that is no mix."""
    mixed = {digest for mix in mixes for digest in mix["sha256"].values()}
    rows: dict[str, int] = {}
    for file in run.get("files", []):
        if (count := int(file["rows"]["train"])) and not (mixed and file["sha256"] in mixed):
            name = _set_of(file["name"])
            rows[name] = rows.get(name, 0) + count
    if len(rows) == 1 and not mixes:
        # What was left after duplicates and leaks were taken out is known for the whole alone.
        kept = run.get("training_rows", {}).get("rows_kept")
        rows = {name: int(kept or count) for name, count in rows.items()}
    return rows


def _set_of(name: str) -> str:
    return str(name).partition("/")[0]
