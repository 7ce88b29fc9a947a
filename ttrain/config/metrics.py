"""The metrics of an evaluation by which the models of a run are judged: the only place that names them."""

from __future__ import annotations

from dataclasses import dataclass

EVALUATED = "eval/"  # before the name of a metric of the evaluation, among the metrics of a run
VALIDATION_LOSS = "validation_loss"  # of a training, where nothing is evaluated


@dataclass(frozen=True)
class PrimaryMetric:
    """The metric that the model of a training stage is judged by, over the held-out records `records`."""

    name: str
    model: str
    label: str
    records: str
    higher_is_better: bool = False

    @property
    def family(self) -> str:
        """The name without the model."""
        return self.name.removesuffix(f"_{self.model}")

    @property
    def of_run(self) -> str:
        """The name among the metrics of a run."""
        return f"{EVALUATED}{self.name}"

    def of(self, model: str) -> str:
        """The name of the metric of another model."""
        return self.name if model == self.model else f"{self.family}_{model}"


BITS_PER_BYTE = PrimaryMetric("bits_per_byte", "base", "bits per byte", "documents")
CHAT_LOSS = PrimaryMetric("chat_loss_sft", "sft", "chats loss", "chats")
DOMAIN_LOSS = PrimaryMetric("domain_loss_lora", "lora", "domain loss", "domain")
