"""`valence serve` with a model file that never comes back from loading; a test starts it as a process."""

import sys
import threading

from service.engines import Engine, EngineOptions
from service.environment import read_settings
from service.logs import configure
from service.server import serve
from service.store import Version


def never_open(version: Version, options: EngineOptions) -> Engine:
    threading.Event().wait()
    raise AssertionError("nobody sets the event")


if __name__ == "__main__":
    settings = read_settings()
    configure(settings.log_format, settings.log_level)
    sys.exit(serve(settings, open_engine=never_open))
