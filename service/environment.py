"""Reads the settings from the environment, and tells libraries through it what they are to leave be.

What is set and means nothing is found here. Knows nothing of what the settings are for.
"""

import difflib
import os
import re

from pydantic import ValidationError

from service.settings import PREFIX, Settings

# Where tests and scripts find the data sets: no setting of the service, and often set beside it.
_NOT_OURS = {"VALENCE_DATA"}
# With one of these the metrics client writes files that outlive the process, and starts with a trace without
# their folder.
_METRICS_OF_SEVERAL = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")
# What Kubernetes puts into every pod of a namespace that has a Service called "valence" or "valence-…".
_SERVICE_LINK = re.compile(r"VALENCE_(\w+_)?(SERVICE_(HOST|PORT.*)|PORT_\d+_(TCP|UDP|SCTP).*)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")
# What is written so, or near to it, was meant to close the service.
_MEANS_KEYS = re.compile(r"^VALENCE_(API|\w*KEY)|is VALENCE_API_KEYS")


class SettingsError(Exception):
    """The environment holds values that cannot be used.

    Attributes:
        problems: one line for each, with the name of the variable.
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


def read_settings() -> Settings:
    """The settings of this process.

    Raises:
        SettingsError: a value has the wrong form, two do not agree, or keys were meant and are not set.
    """
    several = [name for name in _METRICS_OF_SEVERAL if name in os.environ]
    if several:
        raise SettingsError(
            [f"{several[0]} is set: metrics would be kept in files for several processes, and this is one"]
        )
    mistyped = [line for line in unknown_variables() if _MEANS_KEYS.search(line)]
    if mistyped:  # a warning would be too little: the service would be open to all
        raise SettingsError(mistyped)
    try:
        return Settings()
    except ValidationError as error:
        problems = [
            _problem(str(one["loc"][0]) if one["loc"] else None, one["msg"], one["input"])
            for one in error.errors(include_url=False)
        ]
        raise SettingsError(problems) from None


def _problem(field: str | None, message: str, value: object) -> str:
    message = message.removeprefix("Value error, ")
    if field is None:
        return message
    name = PREFIX + field.upper()
    if name == "VALENCE_PORT" and "://" in str(value):
        return (
            f"{name} is {value!r}, which Kubernetes sets for a Service called valence: "
            "set enableServiceLinks: false on the pod, or VALENCE_PORT in its env"
        )
    return f"{name} is {value!r}: {message[:1].lower()}{message[1:]}"


def keep_tokenizers_single() -> None:
    """Tell the tokenizers library to start no threads of its own; to be called before the first text is read.

    It would start one for each core of the host, blind to a quota, for lists that we never give it; and a
    process that has them cannot be forked safely. An operator's own choice is kept.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def keep_onnxruntime_silent() -> None:
    """Tell onnxruntime to report to nobody; to be called before it is imported.

    Since 1.32 its builds for Linux keep a database of events in the home folder and send them to their maker
    over HTTPS, from a thread of their own. An operator's own choice is kept.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def unknown_variables() -> list[str]:
    """One line for each VALENCE_* variable that is set and is no setting, with the nearest real one."""
    known = {name.upper() for name in Settings.model_fields}
    lines = []
    for name in sorted(os.environ):
        own = name.upper().removeprefix(PREFIX)
        if (
            not name.upper().startswith(PREFIX)
            or own in known
            or name in _NOT_OURS
            or _SERVICE_LINK.fullmatch(name)
            or _SERVICE_URL.match(os.environ[name])
        ):
            continue
        nearest = difflib.get_close_matches(own, sorted(known), n=1)
        lines.append(f"{name} is not a setting" + (f"; is {PREFIX}{nearest[0]} meant?" if nearest else ""))
    return lines
