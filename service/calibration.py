"""Measures which engine, precision, lanes and batches are the fastest for a version on this machine.

Blocks. Knows nothing of how a round is measured or where the result is kept. Why it is so: docs/adr/0012.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from statistics import median
from typing import Literal, TypeAlias

from service.engines import AUTO_PRECISION, ENGINES, FORMATS, Engine, EngineOptions
from service.errors import EngineFailed, StartupError
from service.machine import Machine
from service.quota import LanePlan, plan_lanes
from service.settings import Settings
from service.store import Manifest, Version, form
from service.tokenizer import Tokenizer
from service.tuning import Choice, LeftOut, Record, Row, files_of, given
from service.warmup import MADE_AT_LOAD, check_golden_texts
from service.yardstick import Figures, Yardstick

OpenEngine: TypeAlias = Callable[[Version, EngineOptions], Engine]
Part: TypeAlias = Literal["forms", "lanes", "batches"]

ROUNDS = 5
LEAST_ROUNDS = 3
TOKEN_BUDGETS = (256, 512, 1024)
WORTH_A_CHANGE = 1.05
"""How much faster than the default something must be to be chosen."""
FINALISTS = 2
"""Forms whose lanes and threads are tried, too: not all, since every engine that is open takes memory."""
SHARES: dict[Part, float] = {"forms": 0.5, "lanes": 0.3, "batches": 0.2}
"""Of the time, for each part."""
PRECISIONS = ("int8", "bfloat16", "float32", "float16")
"""Those first that the engines take by themselves on a CPU."""


@dataclass(eq=False, slots=True)
class Arm:
    """One way to run, with what each round measured of it."""

    choice: Choice
    engine: Engine
    rounds: list[Figures] = field(default_factory=list)

    def row(self, part: Part) -> Row:
        """The medians of an arm that was measured at least once."""
        texts_per_s, lone_s, cpu_s = map(median, zip(*self.rounds, strict=True))
        return Row(
            part,
            self.choice,
            texts_per_s=texts_per_s,
            lone_p50_s=lone_s,
            cpu_s_per_text=cpu_s,
            rounds=len(self.rounds),
        )


def calibrate(
    version: Version,
    tokenizer: Tokenizer,
    settings: Settings,
    *,
    open_engine: OpenEngine,
    machine: Machine,
    seconds: float,
    go_on: Callable[[], bool] = lambda: True,
) -> Record:
    """Measure, and choose. What the settings give is not varied.

    Args:
        seconds: of measuring, about: opening the engines comes on top, and three rounds are made at least.
        go_on: asked in between; when it says no, the calibration ends early.

    Raises:
        StartupError: no form could be measured, with the reason of each; or it was ended early.
    """
    started_s = time.monotonic()
    bench = _Bench(version, tokenizer, settings, open_engine=open_engine, go_on=go_on)

    def compare(arms: list[Arm], part: Part) -> list[Arm]:
        return bench.compare(arms, part, seconds=seconds * SHARES[part])

    plans = lane_plans(machine.cpu_quota_cores, settings)
    try:
        arms = compare(bench.open_forms(plans[0]), "forms")
        if len(plans) > 1 and arms:
            finalists = bench.keep(arms[:FINALISTS])
            others = [bench.open(arm.choice, plan) for plan in plans[1:] for arm in finalists]
            arms = compare(finalists + [arm for arm in others if arm is not None], "lanes")
        if len(bench.budgets) > 1 and arms:
            [best] = bench.keep(arms[:1])
            arms = [Arm(replace(best.choice, max_batch_tokens=one), best.engine) for one in bench.budgets]
            arms = compare(arms, "batches")
    finally:
        bench.keep([])
    if not arms:
        reasons = "; ".join(f"{one.form}: {one.reason}" for one in bench.left_out)
        raise StartupError(f"nothing to tune: {reasons or 'the version has no file in what is asked for'}")
    return Record(
        schema_version=1,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=version.manifest.name,
        version=version.manifest.version,
        files=files_of(version.manifest),
        machine=machine,
        given=given(settings),
        seconds=round(time.monotonic() - started_s, 1),
        choice=arms[0].choice,
        table=bench.table,
        left_out=bench.left_out,
    )


def choose(rows: Sequence[Row]) -> int:
    """The place of the row that wins: the fastest, or the first, which is the default, if that is near it."""
    fastest = max(range(len(rows)), key=lambda place: rows[place].texts_per_s)
    return fastest if rows[fastest].texts_per_s > WORTH_A_CHANGE * rows[0].texts_per_s else 0


def lane_plans(cores: float, settings: Settings) -> list[LanePlan]:
    """What to try, the default first: a lane a core, one lane of all, halves. One alone if it is given."""
    default = plan_lanes(cores, settings.lanes, settings.threads_per_lane)
    if settings.lanes is not None or settings.threads_per_lane is not None:
        return [default]
    whole = default.lanes
    half = max(1, whole // 2)
    return list(dict.fromkeys([default, LanePlan(1, whole), LanePlan(half, whole // half)]))


def forms(manifest: Manifest, settings: Settings) -> Iterator[tuple[str, str]]:
    """Engine and precision of each form that the version has a file for and the settings leave open."""
    has = {form(model) for model in manifest.models}
    for engine in ENGINES:
        for precision in PRECISIONS:
            source, _ = MADE_AT_LOAD.get(f"{engine}/{precision}", (f"{FORMATS[engine]}/{precision}", 0.0))
            if (
                source in has
                and settings.engine in {"auto", engine}
                and settings.precision in {"auto", precision}
            ):
                yield engine, precision


class _Bench:
    """Opens ways to run, and measures them in turns.

    Attributes:
        budgets: the token budgets to try, the default first.
        table, left_out: what was measured so far, and what could not be.
    """

    def __init__(
        self,
        version: Version,
        tokenizer: Tokenizer,
        settings: Settings,
        *,
        open_engine: OpenEngine,
        go_on: Callable[[], bool],
    ) -> None:
        self._version, self._tokenizer, self._settings = version, tokenizer, settings
        self._open_engine, self._go_on = open_engine, go_on
        golden = [tokenizer.encode(one.text) for one in version.manifest.golden_texts]
        self._yardstick = Yardstick(version.manifest, settings, golden)
        self._engines: list[Engine] = []
        others = () if "max_batch_tokens" in given(settings) else TOKEN_BUDGETS
        self.budgets = list(dict.fromkeys([settings.max_batch_tokens, *others]))
        self.table: list[Row] = []
        self.left_out: list[LeftOut] = []

    def open_forms(self, plan: LanePlan) -> list[Arm]:
        """An arm for each form, the default first. One that cannot be opened or proven is left out."""
        arms = [
            self._open(engine, precision, plan)
            for engine, precision in forms(self._version.manifest, self._settings)
        ]
        found = [arm for arm in arms if arm is not None]

        def later(arm: Arm) -> tuple[bool, int, bool]:
            """What runs on a GPU comes first, and there the precision that is taken on one."""
            on_gpu = arm.choice.device == "cuda"
            engine = list(ENGINES).index(arm.choice.engine)
            return not on_gpu, engine, on_gpu and arm.choice.precision != AUTO_PRECISION["cuda"]

        return sorted(found, key=later)

    def open(self, choice: Choice, plan: LanePlan) -> Arm | None:
        """An arm of the same form with other lanes."""
        return self._open(choice.engine, choice.precision, plan)

    def keep(self, arms: Sequence[Arm]) -> list[Arm]:
        """The same arms, not yet measured; every other engine is closed."""
        kept = [arm.engine for arm in arms]
        for engine in self._engines:
            if engine not in kept:
                engine.close()
        self._engines = kept
        return [Arm(arm.choice, arm.engine) for arm in arms]

    def compare(self, arms: list[Arm], part: Part, *, seconds: float) -> list[Arm]:
        """Measure the arms in turns, and give those that did not fail: the winner, then the others by speed.

        A first round, which compiles and allocates, does not count.
        """
        until_s = time.monotonic() + seconds
        round_s = seconds / max(1, len(arms) * (ROUNDS + 1))
        arms = [arm for arm in arms if self._measure(arm, round_s, counts=False)]
        for number in range(ROUNDS):
            if number >= LEAST_ROUNDS and time.monotonic() > until_s:
                break
            arms = [arm for arm in arms if self._measure(arm, round_s)]
        rows = [arm.row(part) for arm in arms]
        self.table += rows
        if not arms:
            return []
        winner = choose(rows)
        rest = [place for place in range(len(rows)) if place != winner]
        rest.sort(key=lambda place: rows[place].texts_per_s, reverse=True)
        return [arms[place] for place in (winner, *rest)]

    def _open(self, engine: str, precision: str, plan: LanePlan) -> Arm | None:
        self._check_wanted()
        options = EngineOptions(
            engine, precision, self._settings.device, lanes=plan.lanes, threads_per_lane=plan.threads_per_lane
        )
        try:
            opened = self._open_engine(self._version, options)
            self._engines.append(opened)
            check_golden_texts(
                opened, self._tokenizer, self._version.manifest, max_batch_tokens=max(self.budgets)
            )
            choice = Choice.of(
                engine=opened.name,
                precision=opened.precision,
                device=opened.device,
                lanes=plan.lanes,
                threads_per_lane=plan.threads_per_lane,
                max_batch_tokens=self._settings.max_batch_tokens,
            )
        except StartupError as error:
            self.left_out.append(LeftOut(f"{engine}/{precision}", str(error)))
            return None
        return Arm(choice, opened)

    def _measure(self, arm: Arm, round_s: float, *, counts: bool = True) -> bool:
        """One round; whether it went well."""
        self._check_wanted()
        try:
            figures = self._yardstick.measure(
                arm.engine,
                lanes=arm.choice.lanes,
                max_batch_tokens=arm.choice.max_batch_tokens,
                seconds=round_s,
            )
        except EngineFailed as error:
            name = f"{arm.choice.engine}/{arm.choice.precision}"
            self.left_out.append(LeftOut(name, f"{error.detail} ({type(error.__cause__).__name__})"))
            return False
        if counts:
            arm.rounds.append(figures)
        return True

    def _check_wanted(self) -> None:
        if not self._go_on():
            raise StartupError("stopped before the tuning was done")
