"""How many cores and how much memory this process may use, and how lanes and threads share the cores.

Reads CPU affinity and the limits of cgroup v1 and v2. Knows nothing of settings, engines or containers.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LanePlan:
    """How the cores are shared. `warning`: the plan is not what was asked for, or is more than fits."""

    lanes: int
    threads_per_lane: int
    warning: str | None = None


@dataclass(frozen=True, slots=True)
class Throttling:
    """How often and how long a CPU limit has made threads wait; the wait is added up over the cores."""

    periods: int = 0
    throttled_periods: int = 0
    throttled_s: float = 0.0


def cpu_quota(root: Path = Path("/"), *, affinity: int | None = None) -> float:
    """Cores that this process may use: the least of its affinity and of each limit on the way up its cgroups.

    Args:
        root: where `proc` and `sys` are; another folder in tests.
        affinity: cores that the process may run on; the system is asked when None.
    """
    cores = float(affinity if affinity is not None else _affinity())
    return min([cores, *(limit for limit, _ in _cpu_limits(root))])


def throttled_folder(root: Path = Path("/")) -> Path | None:
    """The cgroup with the least CPU limit, which is the one that is felt; None without a limit."""
    return min(_cpu_limits(root), default=(0.0, None))[1]


def throttling(folder: Path | None) -> Throttling:
    """What the cgroup of `throttled_folder` has counted so far; zeros for None."""
    lines = _read(folder / "cpu.stat").splitlines() if folder is not None else []
    told = (line.partition(" ") for line in lines)
    counts = {name: int(value) for name, _, value in told if value.isdecimal()}
    return Throttling(
        periods=counts.get("nr_periods", 0),
        throttled_periods=counts.get("nr_throttled", 0),
        # v2 has microseconds, v1 nanoseconds.
        throttled_s=counts.get("throttled_usec", 0) / 1e6 + counts.get("throttled_time", 0) / 1e9,
    )


def memory_limit(root: Path = Path("/"), *, machine_bytes: int | None = None) -> int:
    """Bytes that this process may use: the least of the machine's memory and each limit of its cgroups.

    Args:
        root: where `proc` and `sys` are; another folder in tests.
        machine_bytes: memory of the machine; the system is asked when None.
    """
    found = machine_bytes if machine_bytes is not None else _machine_bytes()
    for folder, is_v2 in _cgroup_folders(root, "memory"):
        limit = _read(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")).strip()
        if limit.isdecimal():  # "max" where v2 has none; v1 writes more than any machine has
            found = min(found, int(limit))
    return found


def plan_lanes(cores: float, lanes: int | None, threads_per_lane: int | None) -> LanePlan:
    """Share the cores: one lane of one thread for each unless asked otherwise.

    lanes × threads stays within the whole cores of the quota (at least 1), unless both numbers are given.
    """
    whole = max(1, int(cores))
    if lanes is not None and threads_per_lane is not None:
        over = lanes * threads_per_lane > whole
        warning = (
            f"{lanes} lanes × {threads_per_lane} threads are more than the {whole} cores of the CPU quota"
        )
        return LanePlan(lanes, threads_per_lane, warning if over else None)
    if lanes is not None:
        fitting = min(lanes, whole)
        return LanePlan(fitting, whole // fitting, _cut("lanes", lanes, fitting))
    if threads_per_lane is not None:
        fitting = min(threads_per_lane, whole)
        return LanePlan(whole // fitting, fitting, _cut("threads per lane", threads_per_lane, fitting))
    return LanePlan(whole, 1)


def _cut(what: str, asked: int, fitting: int) -> str | None:
    if asked == fitting:
        return None
    return f"{asked} {what} do not fit the CPU quota, {fitting} are used; set both numbers to exceed it"


def _affinity() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_limits(root: Path) -> Iterator[tuple[float, Path]]:
    """Each limit in cores, and the cgroup that has it."""
    for folder, is_v2 in _cgroup_folders(root, "cpu"):
        for cores in _limit_v2(folder) if is_v2 else _limit_v1(folder):
            yield cores, folder


def _cgroup_folders(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """The process's cgroup and its parents where they may have this controller; whether they are of v2."""
    own = _own_cgroups(root)
    for line in _read(root / "proc/self/mountinfo").split("\n"):  # a name may hold what else ends a line
        # <id> <parent> <device> <root in the hierarchy> <mount point> … - <type> <source> <super options>
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2" and "" in own:
            for folder in _way_up(root, fields[4], fields[3], own[""]):
                yield folder, True
        elif kind[0] == "cgroup" and controller in kind[2].split(",") and controller in own:
            for folder in _way_up(root, fields[4], fields[3], own[controller]):
                yield folder, False


def _own_cgroups(root: Path) -> dict[str, str]:
    """The path of this process for each controller of v1, and for v2 under the empty name."""
    paths: dict[str, str] = {}
    for line in _read(root / "proc/self/cgroup").split("\n"):
        _, _, told = line.partition(":")
        controllers, colon, path = told.partition(":")
        if colon:
            paths |= dict.fromkeys(controllers.split(","), path)
    return paths


def _way_up(root: Path, mount_point: str, hierarchy_root: str, own_path: str) -> Iterator[Path]:
    """The folders of the process's cgroup and of its parents, as far as they are mounted.

    A container may see its path as the host does (the mount's root is then the front part of it), or as one
    of its own; a path that leads out of the mount is taken as the mount point itself.
    """
    mount = root / mount_point.lstrip("/")
    inner = own_path.removeprefix(hierarchy_root if hierarchy_root != "/" else "").strip("/")
    folder = mount / inner
    if ".." in Path(inner).parts or not folder.is_dir():
        folder = mount
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _limit_v2(folder: Path) -> Iterator[float]:
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    yield from _cores(quota, period)


def _limit_v1(folder: Path) -> Iterator[float]:
    yield from _cores(_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip())


def _cores(quota: str, period: str) -> Iterator[float]:
    """quota / period in cores; nothing where there is no limit ("max", -1, no file)."""
    if quota.isdecimal() and period.isdecimal() and int(quota) > 0 and int(period) > 0:
        yield int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")  # a mount may have any name
    except OSError:
        return ""
