"""Renews what README.md says of the version that is served: its answers to the examples, and its card.

python -m scripts.readme_examples    serve it, ask what the page asks, write the answers that are others

An answer that differs by no more than TOLERANCE stays as it is, since other processors round otherwise.
`make docs` runs this. Knows nothing of what is asked.
"""

import re
import subprocess
import sys
import urllib.request
from pathlib import Path

from load_tests.service_process import ServiceProcess
from service.store import versions

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
ADDRESS = "http://127.0.0.1:8000"
"""Where the examples ask."""
TOLERANCE = 0.02
NUMBER = re.compile(r"\d+\.\d+")
CURL = re.compile(rf"^(\$ curl .* -d '(\{{.*\}})' {ADDRESS}(/\S+)\n)(\{{.*\}})$", re.MULTILINE)
PYTHON = re.compile(r"(```python\n(.*?)```\n\n```\n)(.*?)(?=```)", re.DOTALL)
CARD = re.compile(r"(?<=\(model_store/sentiment/)\d+(?=/README\.md\))")


def renewed(page: str, url: str) -> str:
    """The page with the answers that the service at `url` gives now. Raises RuntimeError: no such example."""

    def by_curl(example: re.Match[str]) -> str:
        asked, body, path, told = example.groups()
        request = urllib.request.Request(  # noqa: S310 - the address is ours
            url + path, body.encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return asked + _latest(told, answer.read().decode())

    def by_python(example: re.Match[str]) -> str:
        asked, code, told = example.groups()
        command = [sys.executable, "-c", code.replace(ADDRESS, url)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        return asked + _latest(told, ran.stdout)

    page, by_curls = CURL.subn(by_curl, page)
    page, by_pythons = PYTHON.subn(by_python, page)
    newest = versions(ROOT / "model_store", "sentiment")[-1]
    page, cards = CARD.subn(str(newest), page)
    if not (by_curls and by_pythons and cards):
        raise RuntimeError("an example, or the link to the card, is not where it was")
    return page


def _latest(told: str, tells: str) -> str:
    """What was told where it still holds, else what is told now."""
    words, new_words = NUMBER.split(told), NUMBER.split(tells)
    numbers, new_numbers = (map(float, NUMBER.findall(text)) for text in (told, tells))
    if words != new_words:
        return tells
    near = all(abs(one - other) <= TOLERANCE for one, other in zip(numbers, new_numbers, strict=True))
    return told if near else tells


def main() -> None:
    """Write the page if an answer of it is another now."""
    page = README.read_text(encoding="utf-8")
    with ServiceProcess() as server:
        server.wait_ready()
        made = renewed(page, server.url)
    if made != page:
        README.write_text(made, encoding="utf-8")
        print(f"{README.name}: renewed")


if __name__ == "__main__":
    main()
