"""The program behind `ttrain serve`: transformers' server with ttrain's limits, and the guard in front. Run as a module.

Its arguments are the port, the number of requests at once, and those of `transformers`.
"""

from __future__ import annotations

import os
import sys

from ttrain.export import serve_process
from ttrain.flows.guard import Guard
from ttrain.store.server_records import ACCESS


def main() -> None:
    """Serve until the process that started this one ends."""
    port, max_requests, *arguments = sys.argv[1:]
    token = os.environ.pop(ACCESS, "")

    serve_process.serve(arguments, max_requests=int(max_requests), guard=lambda app: Guard(app, int(port), token))


if __name__ == "__main__":
    main()
