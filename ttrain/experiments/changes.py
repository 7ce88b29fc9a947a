"""The settings that an experiment compares: the baseline, and named changes of it."""

from dataclasses import dataclass, field
from pathlib import Path

from ttrain.config import flatten
from ttrain.config.loading import read_yaml
from ttrain.config.yaml_text import shown
from ttrain.errors import UsageError
from ttrain.experiments.space import Values, assignment

BASELINE = "baseline"


@dataclass(frozen=True)
class Change:
    """Settings that differ from the present ones; none of the baseline."""

    name: str
    values: Values = field(default_factory=dict)

    @classmethod
    def of(cls, values: Values) -> "Change":
        """The change to these values, which are its name."""
        return cls(" ".join(assignment(key, value) for key, value in values.items()), values)


def read_changes(path: Path) -> list[Change]:
    """The changes of a file, {name: {setting: value}}. Raises UsageError for anything else."""
    changes = list[Change]()
    for name, tree in read_yaml(path).items():
        if not isinstance(tree, dict) or not tree or name == BASELINE:
            raise UsageError(
                f"{path}: {name} is {shown(tree)}, but a change is a name, other than {BASELINE}, "
                "of a mapping of settings; write, for example, "
                "'no-decay: {pretrain.optim.weight_decay: 0}'"
            )
        changes.append(Change(name, dict(flatten(tree))))
    return changes
