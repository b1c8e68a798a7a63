"""The command, as an operator uses it: a process, its output and its exit code."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from service.cli import main
from service.settings import Settings, env_example
from tests.models import make_version
from tests.server import ROOT, SAFETY_S, environment


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    make_version(folder)
    make_version(folder, version=10, precisions=("float32", "int8"))
    broken = make_version(folder, "broken")
    (broken / "model.onnx").write_bytes(b"no model")
    return folder


def valence(
    *arguments: str, stdin: bytes = b"", extra: dict[str, str] | None = None, **settings: Any
) -> "subprocess.CompletedProcess[str]":
    ran = subprocess.run(
        [sys.executable, "-m", "service", *arguments],
        cwd=ROOT,
        env=environment(**settings) | (extra or {}),
        input=stdin,
        capture_output=True,
        timeout=SAFETY_S,
        check=False,
    )
    assert b"Traceback" not in ran.stderr, ran.stderr.decode()
    return subprocess.CompletedProcess(
        ran.args, ran.returncode, ran.stdout.decode(), ran.stderr.decode(errors="replace")
    )


def objects(ran: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    return [json.loads(line) for line in ran.stdout.splitlines()]


# --- predict


def test_predict_texts_of_the_command_line(store: Path) -> None:
    ran = valence("predict", "a good film", "bad", model_store=store)
    assert ran.returncode == 0, ran.stderr
    good, bad = objects(ran)
    assert (good["label"], bad["label"]) == ("positive", "negative")
    assert list(good) == ["label", "score", "scores", "tokens", "truncated"]
    assert ran.stderr == ""


def test_predict_lines_of_standard_input(store: Path) -> None:
    lines = ["good", "bad"] * 100
    ran = valence("predict", stdin="\r\n".join(lines).encode(), model_store=store, max_texts=7)
    assert ran.returncode == 0, ran.stderr
    assert [one["label"] for one in objects(ran)] == ["positive", "negative"] * 100


def test_predict_answers_each_bad_text_in_its_place(store: Path) -> None:
    ran = valence("predict", stdin=b"good\n\n\xff\xfe bad\nbad", model_store=store)
    assert ran.returncode == 1
    first, empty, invalid, last = objects(ran)
    assert (first["label"], last["label"]) == ("positive", "negative")
    assert (empty["error"]["code"], invalid["error"]["code"]) == ("text_empty", "text_invalid")


def test_predict_options(store: Path) -> None:
    long = "good " * 500
    [logits] = objects(valence("predict", "--raw-scores", long, model_store=store))
    assert logits["truncated"] is True
    assert logits["score"] > 1
    [refused] = objects(valence("predict", "--no-truncate", long, model_store=store))
    assert refused["error"]["code"] == "text_too_long"


def test_predict_of_nothing_says_nothing(store: Path) -> None:
    ran = valence("predict", model_store=store)
    assert (ran.returncode, ran.stdout) == (0, "")


def test_predict_stops_quietly_when_nobody_reads_on(store: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "service", "predict"],
        cwd=ROOT,
        env=environment(model_store=store),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, complaint = process.communicate(b"good\n" * 10_000, timeout=SAFETY_S)
    assert (process.returncode, complaint) == (1, b"")


def test_predict_takes_the_time_that_a_file_needs(store: Path) -> None:
    """A deadline is for callers who wait."""
    ran = valence("predict", stdin=b"good\nbad", model_store=store, request_timeout_s=1e-9)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [one["label"] for one in objects(ran)] == ["positive", "negative"]


def test_predict_needs_no_standard_input_for_texts_that_are_given(store: Path) -> None:
    command = 'exec "$0" -m service predict "$@" <&-'
    for texts, labels in (["good", "bad"], ["positive", "negative"]), ([], []):
        ran = subprocess.run(
            ["/bin/sh", "-c", command, sys.executable, *texts],
            cwd=ROOT,
            env=environment(model_store=store),
            capture_output=True,
            timeout=SAFETY_S,
            check=False,
        )
        assert (ran.returncode, ran.stderr) == (0, b"")
        assert [json.loads(line)["label"] for line in ran.stdout.splitlines()] == labels


def test_tune_tells_of_the_setting_that_is_wrong(store: Path) -> None:
    """And not of its own option, which is right."""
    ran = valence("tune", "--seconds", "5", model_store=store, lanes=0)
    assert ran.returncode == 2
    assert "VALENCE_LANES" in ran.stderr
    assert "--seconds" not in ran.stderr
    ran = valence("tune", "--seconds", "0", model_store=store)
    assert ran.returncode == 2
    assert "--seconds" in ran.stderr


# --- check and models


def test_check_proves_the_version(store: Path) -> None:
    ran = valence("check", model_store=store)
    assert ran.returncode == 0, ran.stderr
    [said] = objects(ran)
    assert (said["status"], said["name"], said["version"], said["precision"]) == (
        "ready",
        "sentiment",
        "10",
        "int8",
    )
    pinned = valence("check", model_store=store, version=1)
    assert objects(pinned)[0]["version"] == "1"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model": "broken"}, "model.onnx"),
        ({"model": "nothing"}, "nothing"),
        ({"version": 3}, "3"),
        ({"model_store": "/nowhere"}, "nowhere"),
    ],
)
def test_check_says_why_not(store: Path, settings: dict[str, Any], reason: str) -> None:
    ran = valence("check", **{"model_store": store, **settings})
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("valence: ")
    assert reason in ran.stderr
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["check"], ["predict", "good"]], ids=" ".join)
def test_ctrl_c_ends_it_at_once_while_a_model_never_comes_back(
    tmp_path_factory: pytest.TempPathFactory, arguments: list[str]
) -> None:
    """A load that nothing can end, in a thread that the end of Python would wait for."""
    scripts = pytest.importorskip("tests.scripts")
    endless = """input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    print("loading")
    for turn in range(1000000000000):
        input_ids = input_ids + 1
    return input_ids.float()"""
    folder = tmp_path_factory.mktemp("endless")
    make_version(folder, precisions=(), script=lambda _: scripts.scripted(endless))
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "service", *arguments],
        cwd=ROOT,
        env=environment(model_store=folder, device="cpu"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=SAFETY_S)
        assert (process.returncode, said) == (130, b"valence: interrupted\n")
    finally:
        process.kill()


def test_models_are_listed(store: Path) -> None:
    ran = valence("models", model_store=store)
    assert ran.returncode == 0
    assert ran.stdout.splitlines()[1:] == [
        "sentiment 1: negative, positive; onnx/float32",
        "sentiment 10: negative, positive; onnx/float32, onnx/int8",
    ]
    empty = valence("models", model_store="/nowhere")
    assert (empty.returncode, empty.stdout) == (1, "")


# --- settings


def test_settings_print_the_example_file() -> None:
    ran = valence("settings", extra={"VALENCE_PORT": "nonsense"})
    assert ran.returncode == 0
    assert ran.stdout == env_example()
    names = [line.partition("=")[0] for line in ran.stdout.splitlines() if line.startswith("#VALENCE_")]
    assert names == [f"#VALENCE_{name.upper()}" for name in Settings.model_fields]


def test_the_example_file_means_the_defaults() -> None:
    given = dict(
        line[1:].split("=", 1) for line in env_example().splitlines() if line.startswith("#VALENCE_")
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("VALENCE_")]:
            patch.delenv(name)
        defaults = Settings()
        for name, value in given.items():
            patch.setenv(name, value)
        assert Settings() == defaults


@pytest.mark.parametrize("command", ["serve", "models"])
def test_a_wrong_setting_is_one_clear_line_each(command: str) -> None:
    ran = valence(command, port="eighty", lanes=0, engine="steam")
    assert ran.returncode == 2
    lines = ran.stderr.splitlines()
    assert len(lines) == 3
    for name, line in zip(
        ("VALENCE_PORT is 'eighty'", "VALENCE_ENGINE", "VALENCE_LANES"), lines, strict=True
    ):
        assert line.startswith(f"valence: {name}")


def test_settings_that_do_not_agree() -> None:
    ran = valence("check", max_texts=2000)
    assert ran.returncode == 2
    assert ran.stderr == (
        "valence: VALENCE_MAX_QUEUE_ITEMS (1024) must be at least VALENCE_MAX_TEXTS (2000)\n"
    )


def test_a_variable_that_is_no_setting_is_told(store: Path) -> None:
    extra = {
        "VALENCE_MAX_TEXT": "3",
        "VALENCE_COLOUR": "red",
        "VALENCE_SERVICE_HOST": "10.0.0.1",
        "VALENCE_KEYS_SERVICE_HOST": "10.0.0.2",
        "VALENCE_KEYS_PORT": "tcp://10.0.0.2:80",
        "VALENCE_SERVICE_PORT": "80",
        "VALENCE_SERVICE_PORT_HTTP": "80",
        "VALENCE_PORT_80_TCP_ADDR": "10.0.0.1",
        "VALENCE_DATA": "data",  # of tests and scripts
    }
    ran = valence("models", model_store=store, extra=extra)
    assert ran.returncode == 0
    told = [json.loads(line)["event"] for line in ran.stderr.splitlines()]
    assert told == [
        "VALENCE_COLOUR is not a setting",
        "VALENCE_MAX_TEXT is not a setting; is VALENCE_MAX_TEXTS meant?",
    ]


def test_a_port_that_kubernetes_sets_is_explained() -> None:
    ran = valence("serve", port="tcp://10.0.0.1:8000")
    assert ran.returncode == 2
    assert "enableServiceLinks" in ran.stderr
    assert "Kubernetes" in ran.stderr


def test_serve_on_a_port_that_is_taken(store: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        ran = valence("serve", model_store=store, port=port)
    assert ran.returncode == 1
    assert ran.stderr == f"valence: cannot listen on 127.0.0.1:{port}: Address already in use\n"


# --- the command itself


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    for command in ("serve", "predict", "check", "tune", "models", "settings"):
        assert command in shown
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])


@pytest.mark.parametrize("arguments", [(), ("fly",), ("serve", "--fast")])
def test_a_wrong_command_is_told(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: valence" in capsys.readouterr().err


def test_version() -> None:
    assert valence("--version").stdout.strip() != ""
