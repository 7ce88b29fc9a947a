"""How many trials this machine takes side by side, and what each gets of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ttrain.config import Runtime
from ttrain.pipeline.system_metrics import visible


def gpus(runtime: Runtime, *, devices: Path = Path("/dev"), chosen: str | None = None) -> list[int]:
    """Numbers of the NVIDIA GPUs that trials may use; none where they compute on something else.

    `chosen`: as CUDA_VISIBLE_DEVICES; with UUIDs there, trials take turns unless `runtime.gpus` names numbers. The driver
    makes one file for each GPU, so that no library has to be loaded.
    """
    if runtime.device not in ("auto", "cuda"):
        return []
    if runtime.gpus:
        return list(runtime.gpus)
    if chosen and not all(word.strip().lstrip("-").isdigit() for word in chosen.split(",") if word.strip()):
        return []  # a batch system names them by UUID: which numbers those are is not known, and others may belong to others
    return visible(len(list(devices.glob("nvidia[0-9]*"))), chosen)


def side_by_side(runtime: Runtime, found: Sequence[int]) -> int:
    """Trials at once where nobody says how many: one for each group of GPUs that a trial needs, else one."""
    return max(1, len(found) // runtime.devices)


def share(runtime: Runtime, found: Sequence[int], slot: int, slots: int) -> dict[str, Any]:
    """Settings of `runtime` for the trial in one of `slots` places: its GPUs, or its part of the cores.

    Where there are more places than groups of GPUs, trials share them.
    """
    if found and len(found) >= runtime.devices:
        group = slot % side_by_side(runtime, found)
        return {"runtime.gpus": [*found[group * runtime.devices : (group + 1) * runtime.devices]]}
    if slots == 1 or runtime.threads:
        return {}
    return {"runtime.threads": max(1, (os.cpu_count() or 1) // (slots * runtime.devices))}
