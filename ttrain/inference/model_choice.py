"""Who answers a question: always the same model, one of several adapters, or the expert that a gate picks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ttrain.errors import UsageError
from ttrain.inference import gate_files, loading
from ttrain.inference.chat import Choice
from ttrain.inference.gate_router import OpenedGate
from ttrain.inference.loading import Speaker
from ttrain.model import adapters


def always(speaker: Speaker) -> Choice:
    """The same model for every question."""
    return lambda question: (speaker, {})


class ByAdapter:
    """One of several adapters on one base, which is in memory once: the one that was switched to, at first the first."""

    def __init__(self, speakers: Sequence[Speaker]) -> None:
        """`speakers`: of `loading.load_adapters`."""
        self._speakers = {speaker.name: (number, speaker) for number, speaker in enumerate(speakers)}
        self.active = speakers[0].name
        self.switch(self.active)

    @property
    def names(self) -> list[str]:
        """What the user calls the adapters."""
        return list(self._speakers)

    def switch(self, name: str) -> None:
        """Let this adapter answer from now on. Raises UsageError where there is none of this name."""
        if name not in self._speakers:
            raise UsageError(f"there is no adapter '{name}'; there are {', '.join(self.names)}")
        number, speaker = self._speakers[name]
        model: Any = speaker.model
        adapters.switch(model, loading.adapter_name(number))
        self.active = name

    def __call__(self, question: str) -> tuple[Speaker, dict[str, Any]]:
        return self._speakers[self.active][1], {}


class ByGate:
    """The expert whose loss on the question is most likely the least; each is loaded when it is first picked."""

    def __init__(self, directory: Path, *, device: str, dtype: str) -> None:
        """Raises UsageError where the directory holds no gate, ArtifactError where it is damaged."""
        self._gate = OpenedGate(directory)
        self._place = {"device": device, "dtype": dtype}
        self._speakers: dict[int, Speaker] = {}

    def __call__(self, question: str) -> tuple[Speaker, dict[str, Any]]:
        """Raises ArtifactError where the picked expert is not the one that the gate was trained on."""
        number, probabilities = self._gate.route(question)
        if number not in self._speakers:
            expert = self._gate.experts[number]
            gate_files.check([expert])
            self._speakers[number] = loading.load(gate_files.reference_of(expert), **self._place)
        return self._speakers[number], {"probabilities": [round(share, 4) for share in probabilities]}
