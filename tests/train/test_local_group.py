"""What ranks of one machine exchange, between three real processes."""

from __future__ import annotations

import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_trainers import in_ranks
from torch import Tensor, nn

from ttrain.errors import RankLost
from ttrain.train import local_group
from ttrain.train.distributed import Ranks
from ttrain.train.local_group import LocalGroup, PeerLost
from ttrain.train.parallel import broadcast, parallelize


def exchange(ranks: Ranks) -> dict[str, Any]:
    """Each collective twice, of numbers that differ by rank and time."""
    assert ranks.local is not None
    generator = torch.Generator().manual_seed(ranks.rank)
    rows_WN = ranks.local.shared_tensor(7 + 5 * 11, torch.float32)
    found: dict[str, Any] = {"given": [], "summed": [], "gathered": []}
    for _ in range(2):
        tensors = [torch.randn(7, generator=generator), torch.randn(11, 5, generator=generator).t()]
        found["given"].append([tensor.clone() for tensor in tensors])
        ranks.local.all_reduce(tensors, rows_WN)
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


def test_ranks_connect_where_the_temporary_directory_has_a_long_path_or_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a Unix socket has at most 107 bytes."""
    long = tmp_path / ("long" * 30)
    long.mkdir()
    for directory in (long, tmp_path / "missing"):
        monkeypatch.setenv("TMPDIR", str(directory))
        monkeypatch.setattr(tempfile, "tempdir", str(directory))
        assert in_ranks(2, tmp_path / "ranks", lambda ranks: ranks.sum([1.0])) == [[2.0]] * 2


class Parts(nn.Module):
    """Parameters and buffers of all kinds that a model may have."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        numbers = torch.full((4, 6), float(rank))
        self.with_gaps, self.transposed = nn.Parameter(numbers[:, ::2]), nn.Parameter(numbers.clone().t())
        self.tied, self.one = self.transposed, nn.Parameter(torch.tensor(float(rank)))
        self.bf16 = nn.Parameter(torch.full((3,), float(rank), dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)
        self.unused, self.empty = nn.Parameter(torch.full((2,), float(rank))), nn.Parameter(torch.zeros(0))
        self.used_by_last = nn.Parameter(torch.full((2,), float(rank)))
        self.register_buffer("seen", torch.zeros(1))
        self.rank = rank

    def forward(self, factor: float) -> Tensor:
        self.seen = self.seen + factor  # a new tensor
        sums = [self.with_gaps.sum(), self.transposed.sum(), self.tied.sum(), self.one, self.bf16.float().sum()]
        return factor * sum(sums + [self.used_by_last.sum()] * (self.rank == 2))


def test_three_ranks_sum_gradients_of_all_kinds_over_their_micro_batches(tmp_path: Path) -> None:
    def gradients(ranks: Ranks) -> Any:
        module = Parts(ranks.rank)
        parallel = parallelize(module, ranks, parallel="ddp", reduction="fast")
        for _ in range(2):
            for factor in (1.0, float(ranks.rank)):
                parallel.module(factor).backward()
            parallel.finish()
            found = {name: parameter.grad for name, parameter in module.named_parameters()}
            module.zero_grad()
        return (
            {name: parameter.detach().abs().sum().item() for name, parameter in module.named_parameters()},
            found,
            module.seen,
        )

    ranks = in_ranks(3, tmp_path, gradients)
    for weights, found, seen in ranks:
        assert set(weights.values()) == {0.0}, "those of rank 0"
        assert found.pop("unused") is None and found.pop("frozen") is None and found.pop("empty") is None
        every = {name: set(gradient.float().flatten().tolist()) for name, gradient in found.items()}
        assert every == {"with_gaps": {6.0}, "transposed": {12.0}, "one": {6.0}, "bf16": {6.0}, "used_by_last": {3.0}}
        assert seen.item() == 2.0, "that of rank 0, whose second micro-batch has the factor 0"


def test_a_rank_that_ends_is_named_whatever_the_others_wait_for(tmp_path: Path) -> None:
    def lost(ranks: Ranks) -> list[str]:
        group, reasons = ranks.local, []
        assert group is not None
        if ranks.first:
            group.close()
            return []
        for collective in (group.barrier, lambda: group.sum([1.0]), lambda: group.shared_tensor(4, torch.float32)):
            with pytest.raises(PeerLost) as error:
                collective()
            reasons.append(str(error.value))
        return reasons

    assert in_ranks(2, tmp_path, lost)[1] == ["rank 0 has closed its connection"] * 3


def test_a_rank_that_ends_before_all_are_connected_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = LocalGroup._connect

    def end_or_connect(group: LocalGroup, server: socket.socket, name: str) -> None:
        if group.rank == 0:
            server.close()
            raise PeerLost("it ends")
        time.sleep(0.2)
        connect(group, server, name)

    def lost(ranks: Ranks) -> str:
        monkeypatch.setattr(LocalGroup, "_connect", end_or_connect)
        with pytest.raises(PeerLost) as error:
            LocalGroup(ranks.rank, ranks.world)
        return str(error.value)

    assert in_ranks(2, tmp_path, lost) == ["it ends", "rank 0 has closed its connection"]


def test_a_rank_that_ends_before_the_model_is_placed_is_lost(tmp_path: Path) -> None:
    def lost(ranks: Ranks) -> str:
        module = nn.Linear(2, 2)
        if ranks.first:
            assert ranks.local is not None
            broadcast(module.parameters())
            ranks.local.close()
            return ""
        with pytest.raises(RankLost) as error:
            parallelize(module, ranks, parallel="ddp", reduction="fast")
        return str(error.value)

    told = in_ranks(2, tmp_path, lost)[1]
    assert told == "another rank ended while rank 1 was exchanging gradients: rank 0 has closed its connection"


def test_an_error_of_the_network_in_a_task_is_not_taken_for_a_lost_rank() -> None:
    with pytest.raises(ConnectionResetError), Ranks(0, 2, torch.device("cpu")).exchanging():
        raise ConnectionResetError("of a file that the task reads")


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

    assert (
        in_ranks(2, tmp_path, work)[0]
        == "another rank ended while rank 0 was waiting for the others: rank 1 has not answered for 0 s"
    )
