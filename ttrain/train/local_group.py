"""What ranks of one machine exchange on the CPU: small messages through Unix sockets, tensors through memory they share.

gloo sends both through the network's loopback: between two ranks on two cores a sum of eight numbers takes it 1.0 ms, and
these sockets 0.02 ms; the gradients of the quickstart's model, 5 MB, took it 10 ms of a step, and take 2 ms here.
"""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

LARGEST_MESSAGE = 32 * 1024  # bytes: all send before any receives, and a socket holds 200 kB that nobody has read
WAIT_SECONDS = 600.0  # for another rank, as gloo does; the watchdog ends hanging ranks earlier


class LocalGroup:
    """All ranks of a training, if they are on one machine. Its methods are collectives, which all ranks must call alike.

    Raises ConnectionError from each of them where another rank has ended, and TimeoutError where it does not answer.
    """

    def __init__(self, rank: int, world: int) -> None:
        """Connect the ranks with each other; torch's process group must exist."""
        self.rank, self.world = rank, world
        self._peers: dict[int, socket.socket] = {}
        self._gathered: dict[tuple[int, torch.dtype], Tensor] = {}  # what `gather` writes to, by length and kind of number
        paths = [tempfile.mkdtemp(prefix="ttrain-ranks-") if rank == 0 else None]
        dist.broadcast_object_list(paths)
        directory = Path(str(paths[0]))
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.settimeout(WAIT_SECONDS)
                server.bind(str(directory / str(rank)))
                server.listen(world)
                dist.barrier()
                self._connect(server, directory)
            self.meet()
        finally:
            if rank == 0:
                shutil.rmtree(directory)

    def _connect(self, server: socket.socket, directory: Path) -> None:
        """Connect to the ranks below, which listen already, and accept those above."""
        for peer in range(self.rank):
            self._peers[peer] = socket.socket(socket.AF_UNIX)
            self._peers[peer].connect(str(directory / str(peer)))
            self._peers[peer].sendall(self.rank.to_bytes(4, "little"))
        for _ in range(self.rank + 1, self.world):
            connection, _ = server.accept()
            self._peers[int.from_bytes(_receive(connection, 4), "little")] = connection
        for connection in self._peers.values():
            connection.settimeout(WAIT_SECONDS)

    def meet(self) -> None:
        """Wait for all ranks; afterwards each sees what the others have written before."""
        self._swap(b".")

    def sum(self, values: list[float]) -> list[float]:
        """Sums over all ranks in fp64, which are the same bits on all of them."""
        own = np.asarray(values, dtype=np.float64)
        total = np.zeros_like(own)
        step = LARGEST_MESSAGE // own.itemsize
        for start in range(0, len(own), step):
            for message in self._swap(own[start : start + step].tobytes()):
                total[start : start + step] += np.frombuffer(message)
        return [float(value) for value in total]

    def shared(self, numbers: int, dtype: torch.dtype) -> Tensor:
        """A tensor [W, N] of zeros that all ranks see, a row for each to write. It lives as long as a rank refers to it."""
        size = self.world * numbers * dtype.itemsize
        if self.rank == 0:
            file = _unnamed_file()
            os.ftruncate(file, size)
            for connection in self._peers.values():
                socket.send_fds(connection, [b"."], [file])
        else:
            _, (file,), _, _ = socket.recv_fds(self._peers[0], 1, 1)
        try:
            return torch.frombuffer(mmap.mmap(file, size), dtype=dtype).view(self.world, numbers)
        finally:
            os.close(file)

    def sum_up(self, tensors: list[Tensor], rows_WN: Tensor) -> None:
        """Sum tensors of one kind of number over all ranks in place, through a shared tensor for all their numbers.

        Each rank sums a part of the columns into the first row, so that all ranks have the same bits.
        """
        sizes = [tensor.numel() for tensor in tensors]
        own, total = (
            [part.view_as(tensor) for part, tensor in zip(torch.split(row_N, sizes), tensors, strict=True)]
            for row_N in (rows_WN[self.rank], rows_WN[0])
        )
        numbers = sum(sizes)
        columns = slice(numbers * self.rank // self.world, numbers * (self.rank + 1) // self.world)
        self.meet()  # nobody reads the sums of before any more
        torch._foreach_copy_(own, tensors)
        self.meet()
        for row_N in rows_WN[1:]:
            rows_WN[0, columns] += row_N[columns]
        self.meet()
        torch._foreach_copy_(tensors, total)

    def gather(self, numbers_N: Tensor) -> Tensor:
        """The numbers of all ranks, [W, N], to be read before the next `gather` of as many."""
        rows_WN = self._gathered.get((len(numbers_N), numbers_N.dtype))
        if rows_WN is None:
            rows_WN = self._gathered[len(numbers_N), numbers_N.dtype] = self.shared(len(numbers_N), numbers_N.dtype)
        self.meet()
        rows_WN[self.rank] = numbers_N
        self.meet()
        return rows_WN

    def close(self) -> None:
        """Close the connections."""
        for connection in self._peers.values():
            connection.close()

    def _swap(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in their order; all are as long as this one."""
        for connection in self._peers.values():
            connection.sendall(message)
        received = {peer: _receive(connection, len(message)) for peer, connection in self._peers.items()}
        return [received.get(rank, message) for rank in range(self.world)]


def _receive(connection: socket.socket, length: int) -> bytes:
    """Exactly so many bytes."""
    message = bytearray()
    while len(message) < length:
        part = connection.recv(length - len(message))
        if not part:
            raise ConnectionResetError("it has closed its connection")
        message += part
    return bytes(message)


def _unnamed_file() -> int:
    """A descriptor of a file in memory, or in the system's temporary directory, that has no name: nobody else opens it, and
    it is gone with its last process."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ttrain-ranks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
