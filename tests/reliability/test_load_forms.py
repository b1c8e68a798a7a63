"""The load scripts in short form: the real model, the real server, real connections.

A busy machine decides no outcome here: counted are answers, kept are orders and gauges. Speeds are for the
long forms, which `load_tests/README.md` tells how to run.
"""

import asyncio
import shutil
from pathlib import Path

import pytest
import uvloop

from load_tests import abandoned, drain, kill, overload, soak
from load_tests.chosen import chosen_version
from load_tests.service_process import ServiceProcess
from load_tests.verdict import EXIT_CANNOT_RUN, Verdict
from service import tokenizer


def test_r07_r09_r53_r58_an_overload_answers_everybody_and_stays_live() -> None:
    with ServiceProcess(max_queue_items=8, max_texts=8, lanes=1) as server:
        server.wait_ready()
        seen = uvloop.run(
            overload.measure(
                server, overload.bodies_of("sentences"), factor=6, seconds=4, capacity_s=2, callers=2
            )
        )
        errors = [line for line in server.log() if line.get("level") == "error"]
    load = seen.load
    assert len(load.shots) > 8
    assert [shot.problem for shot in load.shots if shot.answer is None] == []
    # 504: the machine stood still for the whole of a deadline.
    assert {shot.status for shot in load.shots} <= {200, 503, 504}
    assert {200, 503} <= {shot.status for shot in load.shots}
    assert all(shot.retry_after_s >= 1 for shot in load.shots if shot.status == 503)
    assert seen.live
    assert {shot.status for shot in seen.live} == {200}
    assert seen.obeyed_after
    assert 200 in {shot.status for shot in seen.after.shots}
    assert errors == [], "a refusal is no error"


def test_r13_r14_clients_that_give_up_leave_nothing_behind() -> None:
    verdict = Verdict()
    with ServiceProcess(request_timeout_s=300, max_batch_items=8) as server:
        server.wait_ready()
        abandoned.judge(uvloop.run(abandoned.measure(server, max_batch_items=8, large_texts=128)), verdict)
    assert verdict.goals
    assert verdict.missed() == []


def test_r50_mixed_load_does_not_grow() -> None:
    verdict = Verdict()
    with ServiceProcess(request_timeout_s=300) as server:
        server.wait_ready()
        seen = uvloop.run(soak.measure(server, seconds=12, every_s=3, rest_s=1))
    soak.judge(seen, verdict, long=False)
    assert verdict.goals
    assert verdict.missed() == []
    ready, *loaded = seen.looks
    assert max(look.rss_bytes for look in loaded) < 1.4 * ready.rss_bytes, "the worst shape is run at warm-up"
    # The threads that read long texts are started when they are needed first.
    assert max(look.threads for look in loaded) <= ready.threads + tokenizer.THREADS


def test_r56_killed_at_any_moment_it_comes_back_as_it_was(tmp_path: Path) -> None:
    verdict = Verdict()
    store = tmp_path / "store"
    served = chosen_version().path
    shutil.copytree(served, store / "sentiment" / served.name)
    with ServiceProcess(model_store=store) as server:
        seen = kill.measure(server, store, rounds=2)
    kill.judge(seen, verdict, rounds=2)
    assert verdict.goals
    assert verdict.missed() == []


def test_behind_a_proxy_a_server_that_stops_fails_no_request() -> None:
    if shutil.which("haproxy") is None:
        pytest.skip("haproxy is missing: apt-get install haproxy")
    verdict = Verdict()
    with ServiceProcess(drain_delay_s=4) as leaving, ServiceProcess(drain_delay_s=4) as staying:
        leaving.wait_ready()
        staying.wait_ready()
        with drain.haproxy(leaving.port, staying.port) as url:
            seen = uvloop.run(drain.measure(url, leaving, requests=240, rate_per_s=30))
    drain.judge(seen, verdict)
    assert verdict.goals
    assert verdict.missed() == []
    assert set(seen.served()) == {"one", "two"}


def test_the_drain_script_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert drain.main([]) == EXIT_CANNOT_RUN
    assert "apt-get install haproxy" in capsys.readouterr().out


def test_a_store_that_was_touched_is_found(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/file").write_bytes(b"one")
    before = kill.tree(tmp_path)
    (tmp_path / "a/file").write_bytes(b"two")
    assert kill.tree(tmp_path) != before
    (tmp_path / "a/file").write_bytes(b"one")
    assert kill.tree(tmp_path) == before
    (tmp_path / "left.tmp").touch()
    assert kill.tree(tmp_path) != before


def test_a_server_that_ends_by_itself_is_told() -> None:
    with ServiceProcess(model="missing") as server, pytest.raises(RuntimeError, match="ended with code 1"):
        server.wait_ready()


def test_readiness_that_lies_is_found() -> None:
    honest = kill.Start(polls=[(503, 503), (200, 200)], ready_s=1.0)
    assert honest.honest
    assert not kill.Start(polls=[(200, 503), (200, 200)], ready_s=1.0).honest
    assert not kill.Start(polls=[(503, 503)]).honest
    assert not kill.Start(polls=[(200, 200)], ready_s=1.0, ready_early_s=0.5).honest


async def test_a_start_is_watched_to_its_end() -> None:
    with ServiceProcess(model="missing") as server:
        seen = await asyncio.wait_for(kill.watch_start(server, overload.bodies_of("sentences")[0]), 60)
    assert seen.ready_s is None
    assert not seen.honest
