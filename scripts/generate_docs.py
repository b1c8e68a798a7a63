"""Writes the pages made from the code: docs/settings.md, docs/metrics.md, docs/errors.md and .env.example.

python scripts/generate_docs.py           write them
python scripts/generate_docs.py --check   exit 1 and name the pages that are not fresh
"""

import sys
from pathlib import Path

from service.catalogue import CATALOGUE
from service.errors import ServiceError, with_code
from service.settings import describe_settings, env_example

ROOT = Path(__file__).parent.parent
MADE = "<!-- Made by scripts/generate_docs.py from {source}; do not edit. -->\n"


def settings_page() -> str:
    """docs/settings.md: a row for each field of Settings."""
    lines = [
        "# Settings",
        "",
        "Every setting is an environment variable. A set variable that begins with `VALENCE_` and is none of",
        "these is named in a warning at start. `valence settings` prints this list as an environment file.",
        "",
        "| variable | default | what it does |",
        "|---|---|---|",
    ]
    lines += [
        f"| `{name}` | {f'`{default}`' if default else 'unset'} | {description} |"
        for name, default, description in describe_settings()
    ]
    return MADE.format(source="service/settings.py") + "\n".join(lines) + "\n"


def metrics_page() -> str:
    """docs/metrics.md: a row for each metric of the catalogue."""
    lines = [
        "# Metrics",
        "",
        "`GET /metrics` answers the Prometheus text format, or OpenMetrics when the scraper asks for it.",
        "Every counter and histogram exists from the start at 0, those with a label of the model once it is",
        "loaded. Beside these stand the `process_` and `python_` metrics of the Prometheus client.",
        "",
        "| metric | type | labels | what it says |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{metric.name}` | {metric.type} | {', '.join(metric.labels)} | {metric.help} |"
        for metric in CATALOGUE
    ]
    return MADE.format(source="service/catalogue.py") + "\n".join(lines) + "\n"


def errors_page() -> str:
    """docs/errors.md: a row for each code."""
    lines = [
        "# Errors",
        "",
        "Every error is `application/problem+json` (RFC 9457) with `type`, `title`, `status`, `detail`,",
        "`code` and `request_id`. In a list, a text that cannot be predicted has `error` with `code` and",
        "`detail` in its place. `code` is made for programs and does not change, `detail` for people.",
        "None repeats the text that was sent.",
        "",
        "Four answers come from below the application and have no such body: 400 to what is not HTTP or does",
        "not have one `Host`, 408 to a request that takes longer to arrive than the deadline, 431 to a head",
        "over its limit, 501 to a transfer coding before `chunked`.",
        "",
        "| status | code | what happened |",
        "|---|---|---|",
    ]
    rows = {(error.status, error.code): error.default_detail for error in with_code(ServiceError)}
    lines += [f"| {status} | `{code}` | {detail} |" for (status, code), detail in sorted(rows.items())]
    return MADE.format(source="service/errors.py") + "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Every generated page and what it should hold."""
    return {
        ROOT / "docs/settings.md": settings_page(),
        ROOT / "docs/metrics.md": metrics_page(),
        ROOT / "docs/errors.md": errors_page(),
        ROOT / ".env.example": env_example(),
    }


def main() -> int:
    stale = {
        path: text
        for path, text in pages().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not fresh: run `make docs`")
        return 1 if stale else 0
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
