"""Fixtures that several files share."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

# A shell without job control starts what it puts into the background with SIGINT ignored, and so would be what tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes in one thread, so that tests neither wait for each other's threads nor depend on the cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def threads_of_the_process() -> Iterator[None]:
    """What a file leaves of torch's threads moves no file after it: sums in two threads have other last bits."""
    torch: Any = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else 0
    yield
    if torch:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def no_telemetry() -> Iterator[None]:
    """Before anything imports MLflow: it would write an installation id into the user's ~/.config."""
    from ttrain import tracking

    with pytest.MonkeyPatch.context() as patch:
        for name, value in tracking.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield
