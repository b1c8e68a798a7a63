"""Asks the service in this container whether it is ready: exit code 0 when it is, 1 when not.

A slim image has no curl. Knows nothing of the service but its port and its ready path; needs the standard
library alone, and goes past any proxy.
"""

import http.client
import os
import sys

TIMEOUT_S = 4.0


def main() -> int:
    """Ask once."""
    port = int(os.environ.get("VALENCE_PORT") or 8000)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health/ready")
        answer = connection.getresponse()
        print(answer.status, answer.read(512).decode(errors="replace"))
    except (OSError, http.client.HTTPException) as error:
        print(type(error).__name__, error)
        return 1
    finally:
        connection.close()
    return 0 if answer.status == http.HTTPStatus.OK else 1


if __name__ == "__main__":
    sys.exit(main())
