"""Stage `source`: the quickstart's data, from the text that ships with ttrain."""

from ttrain.config import Settings
from ttrain.data import python_docs
from ttrain.tasks.common.job import Figures, StageContext


def run(settings: Settings, job: StageContext) -> Figures:
    """Write pretrain, sft, dpo and lora JSONL with held-out parts; returns the counts."""
    return python_docs.build(job.output, settings.python_docs)
