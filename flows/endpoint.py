"""The program behind `ttrain serve`: transformers' server with ttrain's limits, and the guard in front. Run as a module.

Its arguments are the port, the number of requests at once, and those of `transformers`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ttrain.export import serve_process
from ttrain.export.serve import HOST
from ttrain.flows.access_control import HostCheck, TokenRequired, hosts_of
from ttrain.store.server_records import ACCESS


def main() -> None:
    """Serve until the process that started this one ends."""
    port, max_requests, *arguments = sys.argv[1:]
    token = os.environ.pop(ACCESS, "")

    def guard(app: Any) -> Any:
        return HostCheck(TokenRequired(app, token, int(port)) if token else app, hosts_of(HOST, int(port)))

    serve_process.serve(arguments, max_requests=int(max_requests), guard=guard)


if __name__ == "__main__":
    main()
