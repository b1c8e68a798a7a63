"""D. A tokenizer and an engine in a forked child, from several threads, and in processes of one store.

The service never forks: it is one process by design. What it uses survives a fork all the same.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from service.core import Encoding
from service.tokenizer import Tokenizer
from tests.models import bert_tokenizer
from tests.server import serving
from tests.service.engine_cases import CASES, Case, python

FORK = """
import os, signal, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads, which is meant here

def in_child(ask):
    expected = ask()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if ask() == expected else 1)
    print(os.waitpid(child, 0)[1])
"""


def test_r28_a_forked_child_reads_texts_after_its_parent_did(tmp_path: Path) -> None:
    """A child that hangs is ended by its alarm, which is not 0."""
    file = tmp_path / "tokenizer.json"
    bert_tokenizer().save(str(file))
    out = python(
        FORK
        + f"""
import asyncio
from pathlib import Path
from service.environment import keep_tokenizers_single
from service.tokenizer import Tokenizer

keep_tokenizers_single()
tokenizer = Tokenizer.load(Path({str(file)!r}), max_tokens=64, max_text_chars=9_000)
texts = [f"good film {{number}} " * 40 for number in range(32)]
asyncio.run(tokenizer.encode_all(texts))  # long enough for its threads
in_child(lambda: [tokenizer.encode(text).ids for text in texts])
tokenizer.close()
"""
    )
    assert out.stdout == "0\n"


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_r29_a_forked_child_predicts_after_its_parent_did(case: Case, threads: int) -> None:
    out = case.run_alone(
        FORK
        + f"""
engine = engine_of(1, {threads})
batch = TokenBatch.of([Encoding([5] * 60)] * 64)
in_child(lambda: engine.run(batch).tobytes())
"""
    )
    assert out.stdout == "0\n"


def test_r28_r29_processes_of_one_store_each_answer_their_first_request(store: Path) -> None:
    """What stands in place of workers: more processes, each with a model and a tokenizer of its own."""
    texts = [f"good film {number}" for number in range(32)]
    with serving(model_store=store) as one, serving(model_store=store) as other:
        answers = [
            httpx.post(f"{server.url}/predict", json={"inputs": texts}, trust_env=False)
            for server in (one, other)
        ]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json() == answers[1].json()


@pytest.fixture
def tokenizer() -> Tokenizer:
    content = bert_tokenizer().to_str().encode()
    return Tokenizer.load(content, max_tokens=64, max_text_chars=9_000)


def test_many_threads_read_different_texts_at_once(tokenizer: Tokenizer) -> None:
    """Every one the ids of its own text, of any length."""
    texts = [f"good {number} bad " * (1 + number % 50) for number in range(400)]
    alone = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(16) as executor:
        together: list[Encoding] = list(executor.map(tokenizer.encode, texts))
    assert together == alone


def test_loading_another_tokenizer_changes_nothing_for_the_first(tokenizer: Tokenizer) -> None:
    """Limits belong to each, not to the library."""
    text = "good film " * 100
    before = tokenizer.encode(text)
    other = Tokenizer.load(bert_tokenizer().to_str().encode(), max_tokens=5, max_text_chars=20)
    assert len(other.encode(text)) == 5
    assert tokenizer.encode(text) == before
    assert len(before) == 64


def test_nothing_of_the_service_starts_a_process() -> None:
    """No fork by the back door: a request, a load and a stop leave no child behind."""
    root = Path(sys.modules["service.tokenizer"].__file__ or "").parent
    sources = {path.name: path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    for word in ("multiprocessing", "subprocess", "os.fork", "ProcessPool"):
        assert [name for name, text in sources.items() if word in text] == []
