"""What ranks of one machine exchange, between three real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_trainers import in_ranks

from ttrain.errors import RankLost
from ttrain.train import local_group
from ttrain.train.distributed import Ranks


def exchange(ranks: Ranks) -> dict[str, Any]:
    """Each collective twice, of numbers that differ by rank and time."""
    assert ranks.local is not None
    generator = torch.Generator().manual_seed(ranks.rank)
    rows_WN = ranks.local.shared(7 + 5 * 11, torch.float32)
    found: dict[str, Any] = {"given": [], "summed": [], "gathered": []}
    for _ in range(2):
        tensors = [torch.randn(7, generator=generator), torch.randn(11, 5, generator=generator).t()]
        found["given"].append([tensor.clone() for tensor in tensors])
        ranks.local.sum_up(tensors, rows_WN)
        found["summed"].append(tensors)
        found["gathered"].append(ranks.gather(tensors[0] * 0 + ranks.rank + len(found["gathered"])).clone())
    many = local_group.LARGEST_MESSAGE // 4  # twice as many bytes as one message has
    found["sum"] = ranks.sum([0.1 * (ranks.rank + 1)]), ranks.sum([float(ranks.rank)] * many) == [3.0] * many
    return found


def test_three_ranks_have_the_same_sums_to_the_bit_and_all_numbers_of_all(tmp_path: Path) -> None:
    found = in_ranks(3, tmp_path, exchange)
    for turn in range(2):
        for place in range(2):
            expected = sum(rank["given"][turn][place].double() for rank in found)
            for rank in found:
                torch.testing.assert_close(rank["summed"][turn][place].double(), expected, rtol=0, atol=1e-6)
                assert rank["summed"][turn][place].equal(found[0]["summed"][turn][place])
        for rank in found:
            assert rank["gathered"][turn].tolist() == [[float(number + turn)] * 7 for number in range(3)]
    assert [rank["sum"] for rank in found] == [([pytest.approx(0.6, rel=1e-15)], True)] * 3


def test_a_rank_that_does_not_answer_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_group, "WAIT_SECONDS", 0.2)

    alive: list[Ranks] = []

    def work(ranks: Ranks) -> str:
        if not ranks.first:
            alive.append(ranks)  # it keeps its connections
            return ""
        with pytest.raises(RankLost) as lost:
            ranks.sum([1.0])
        return str(lost.value)

    assert in_ranks(2, tmp_path, work)[0] == "another rank ended while rank 0 was waiting for the others: timed out"
