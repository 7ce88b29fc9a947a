"""Who answers a question: always the same model, or the expert that a gate picks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ttrain.gate import files
from ttrain.gate.router import OpenedGate
from ttrain.talk import loading
from ttrain.talk.chat import Choice
from ttrain.talk.loading import Speaker


def always(speaker: Speaker) -> Choice:
    """The same model for every question."""
    return lambda question: (speaker, {})


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
            files.check([expert])
            self._speakers[number] = loading.load(files.reference_of(expert), **self._place)
        return self._speakers[number], {"probabilities": [round(share, 4) for share in probabilities]}
