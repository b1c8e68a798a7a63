"""The CPU quota is the least of affinity and the limits of the cgroups on the way up; lanes share it."""

import os
from pathlib import Path

import pytest

from service.quota import (
    LanePlan,
    Throttling,
    cpu_quota,
    memory_limit,
    plan_lanes,
    throttled_folder,
    throttling,
)

V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "33 31 0:30 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct"
OTHER_MOUNTS = (
    "31 23 0:28 / /proc rw - proc proc rw\n36 31 0:33 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
)


def tree(root: Path, *, mount: str, own: str, files: dict[str, str], hierarchy_root: str = "/") -> Path:
    """A root folder with the two files of /proc that matter, and the given files of cgroups."""
    texts = {
        "proc/self/mountinfo": f"{OTHER_MOUNTS}\n{mount.format(root=hierarchy_root)}\n",
        "proc/self/cgroup": own + "\n",
        **{f"sys/fs/cgroup/{name}": content + "\n" for name, content in files.items()},
    }
    for name, content in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_v2_in_a_container_of_its_own(tmp_path: Path) -> None:
    root = tree(tmp_path, mount=V2_MOUNT, own="0::/", files={"cpu.max": "150000 100000"})
    assert cpu_quota(root, affinity=8) == 1.5


def test_v2_takes_the_least_limit_on_the_way_up(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        mount=V2_MOUNT,
        own="0::/kubepods.slice/pod1.slice/app",
        files={
            "kubepods.slice/cpu.max": "max 100000",
            "kubepods.slice/pod1.slice/cpu.max": "200000 100000",
            "kubepods.slice/pod1.slice/app/cpu.max": "400000 100000",
            "kubepods.slice/pod2.slice/cpu.max": "100000 100000",
        },
    )
    assert cpu_quota(root, affinity=8) == 2.0


def test_v2_without_a_limit_leaves_the_affinity(tmp_path: Path) -> None:
    root = tree(tmp_path, mount=V2_MOUNT, own="0::/", files={"cpu.max": "max 100000"})
    assert cpu_quota(root, affinity=3) == 3.0


def test_v2_when_the_mount_shows_only_our_part_of_the_host(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        mount=V2_MOUNT,
        hierarchy_root="/docker/abc",
        own="0::/docker/abc/inner",
        files={"cpu.max": "300000 100000", "inner/cpu.max": "250000 100000"},
    )
    assert cpu_quota(root, affinity=8) == 2.5


@pytest.mark.parametrize("own", ["0::/../../elsewhere", "0::/not/mounted/here"])
def test_v2_a_path_that_is_not_mounted_is_the_mount_point(tmp_path: Path, own: str) -> None:
    root = tree(tmp_path, mount=V2_MOUNT, own=own, files={"cpu.max": "100000 100000"})
    assert cpu_quota(root, affinity=8) == 1.0


def test_v1(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        mount=V1_MOUNT,
        own="4:memory:/x\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n0::/",
        files={
            "cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/cpu.cfs_period_us": "100000",
            "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "50000",
            "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "20000",
        },
    )
    assert cpu_quota(root, affinity=8) == 2.5


def test_affinity_counts_when_it_is_the_least(tmp_path: Path) -> None:
    root = tree(tmp_path, mount=V2_MOUNT, own="0::/", files={"cpu.max": "800000 100000"})
    assert cpu_quota(root, affinity=2) == 2.0


@pytest.mark.parametrize("content", ["", "garbage", "0 100000", "100000", "100000 0", "-5 7"])
def test_what_is_no_limit_is_passed_over(tmp_path: Path, content: str) -> None:
    root = tree(tmp_path, mount=V2_MOUNT, own="0::/", files={"cpu.max": content})
    assert cpu_quota(root, affinity=4) == 4.0


def test_any_name_of_a_mount_and_any_line_of_a_cgroup_is_survived(tmp_path: Path) -> None:
    root = tree(tmp_path, mount=V2_MOUNT, own="no line\n0::/", files={"cpu.max": "150000 100000"})
    with (root / "proc/self/mountinfo").open("ab") as mounts:
        mounts.write(
            b"40 23 0:40 / /mnt/caf\xe9 rw - tmpfs tmpfs rw\n"
            b"41 23 0:41 / /mnt/\xc2\x85a rw - tmpfs tmpfs rw\n"
        )
    assert cpu_quota(root, affinity=8) == 1.5


def test_without_proc_the_affinity_is_left(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path, affinity=4) == 4.0


def test_this_machine_gives_at_most_its_affinity() -> None:
    assert 0 < cpu_quota() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("cores", "lanes", "threads", "expected"),
    [
        (4.0, None, None, (4, 1)),
        (2.9, None, None, (2, 1)),
        (0.5, None, None, (1, 1)),
        (8.0, 2, None, (2, 4)),
        (8.0, 3, None, (3, 2)),
        (8.0, None, 4, (2, 4)),
        (8.0, None, 3, (2, 3)),
        (2.0, 1, 2, (1, 2)),
    ],
)
def test_lanes_and_threads_share_the_whole_cores(
    cores: float, lanes: int | None, threads: int | None, expected: tuple[int, int]
) -> None:
    assert plan_lanes(cores, lanes, threads) == LanePlan(*expected)


@pytest.mark.parametrize(("lanes", "threads", "expected"), [(9, None, (2, 1)), (None, 9, (1, 2))])
def test_one_number_alone_does_not_exceed_the_quota(
    lanes: int | None, threads: int | None, expected: tuple[int, int]
) -> None:
    plan = plan_lanes(2.0, lanes, threads)
    assert (plan.lanes, plan.threads_per_lane) == expected
    assert plan.warning is not None
    assert "do not fit the CPU quota" in plan.warning


def test_both_numbers_together_exceed_the_quota_with_a_warning() -> None:
    plan = plan_lanes(2.0, 3, 4)
    assert (plan.lanes, plan.threads_per_lane) == (3, 4)
    assert plan.warning is not None
    assert "more than the 2 cores" in plan.warning


def test_v2_the_least_limit_says_how_much_it_held_back(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        mount=V2_MOUNT,
        own="0::/pod/app",
        files={
            "pod/cpu.max": "100000 100000",
            "pod/cpu.stat": "usage_usec 9\nnr_periods 40\nnr_throttled 10\nthrottled_usec 2500000",
            "pod/app/cpu.max": "200000 100000",
            "pod/app/cpu.stat": "nr_periods 7\nnr_throttled 0\nthrottled_usec 0",
        },
    )
    assert throttling(throttled_folder(root)) == Throttling(40, 10, 2.5)


def test_v1_throttling_is_in_nanoseconds(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        mount=V1_MOUNT,
        own="3:cpu,cpuacct:/app",
        files={
            "cpu,cpuacct/app/cpu.cfs_quota_us": "150000",
            "cpu,cpuacct/app/cpu.cfs_period_us": "100000",
            "cpu,cpuacct/app/cpu.stat": "nr_periods 4\nnr_throttled 3\nthrottled_time 1500000000",
        },
    )
    assert throttling(throttled_folder(root)) == Throttling(4, 3, 1.5)


def test_without_a_cpu_limit_nothing_is_held_back(tmp_path: Path) -> None:
    root = tree(tmp_path, mount=V2_MOUNT, own="0::/", files={"cpu.max": "max 100000"})
    assert throttled_folder(root) is None
    assert throttling(None) == Throttling(0, 0, 0.0)
    assert throttling(tmp_path / "gone") == Throttling(0, 0, 0.0)


def test_v2_memory_is_the_least_limit_on_the_way_up(tmp_path: Path) -> None:
    files = {"pod/memory.max": "1000", "pod/app/memory.max": "max"}
    root = tree(tmp_path, mount=V2_MOUNT, own="0::/pod/app", files=files)
    assert memory_limit(root, machine_bytes=5000) == 1000
    assert memory_limit(root, machine_bytes=500) == 500


@pytest.mark.parametrize(("limit", "bytes_"), [("2000", 2000), ("9223372036854771712", 5000)])
def test_v1_memory(tmp_path: Path, limit: str, bytes_: int) -> None:
    files = {"memory/app/memory.limit_in_bytes": limit}
    root = tree(tmp_path, mount=V1_MOUNT, own="4:memory:/app", files=files)
    assert memory_limit(root, machine_bytes=5000) == bytes_


def test_memory_of_this_machine() -> None:
    assert 0 < memory_limit() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
