"""ttrain: raw JSONL to an evaluated, registered language model, with one command."""

__version__ = "0.1.0"
