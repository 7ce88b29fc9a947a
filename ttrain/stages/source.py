"""Stage `source`: the quickstart's data, read from the Python that runs ttrain."""

from __future__ import annotations

from typing import Any

from ttrain.config import SourceConfig
from ttrain.data import python_docs
from ttrain.stages.job import StageContext


def run(config: SourceConfig, job: StageContext) -> dict[str, Any]:
    """Write pretrain, sft and lora JSONL with their held-out parts; returns the counts of rows and bytes."""
    settings = config.python_docs
    return python_docs.build(
        job.output,
        document_bytes=settings.document_bytes,
        source_code_fraction=settings.source_code_fraction,
        chat_rows=settings.chat_rows,
        domain_rows=settings.domain_rows,
        heldout_fraction=settings.heldout_fraction,
        progress=lambda done, total: job.progress.update(done, total, "files"),
    )
