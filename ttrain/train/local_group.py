"""What ranks of one machine exchange on the CPU: small messages through Unix sockets, tensors through memory they share.

gloo sends both through the network's loopback: between two ranks on two cores a sum of eight numbers takes it 1.0 ms, and
these sockets 0.02 ms; the gradients of the quickstart's model, 5 MB, took it 10 ms of a step, and take 2 ms here.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import sys
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

# Bytes: all ranks send before any receives, so a socket must hold a message that nobody has read.
LARGEST_MESSAGE = 4 * 1024
WAIT_SECONDS = 600.0  # for another rank, as gloo does; the watchdog ends hanging ranks earlier


class PeerLost(ConnectionError):
    """A rank has closed its connection, or does not answer."""


class LocalGroup:
    """All ranks of a training, if they are on one machine. Its methods are collectives, which all ranks must call alike.

    Each of them raises PeerLost. They need Linux, for abstract sockets and files in memory: neither has a path, which could
    be too long for a socket or on a file system without sockets, and a killed rank leaves nothing behind.
    """

    def __init__(self, rank: int, world: int) -> None:
        """Connect the ranks with each other; torch's process group must exist."""
        self.rank, self.world = rank, world
        self._peers: dict[int, socket.socket] = {}
        self._gathered: dict[tuple[int, torch.dtype], Tensor] = {}  # what `gather` writes to, by length and kind of number
        names = [f"\0ttrain-ranks-{secrets.token_hex(16)}"]
        dist.broadcast_object_list(names)  # that of rank 0
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(WAIT_SECONDS)
            server.bind(f"{names[0]}-{rank}")
            server.listen(world)
            dist.barrier()
            self._connect(server, names[0])
        self.barrier()

    @staticmethod
    def is_available() -> bool:
        """Whether this system has what it needs."""
        return sys.platform == "linux" and hasattr(os, "memfd_create")

    def _connect(self, server: socket.socket, name: str) -> None:
        """Connect to the ranks below, which listen already, and accept those above."""
        for peer in range(self.rank):
            self._peers[peer] = socket.socket(socket.AF_UNIX)
            self._peers[peer].settimeout(WAIT_SECONDS)
            try:
                self._peers[peer].connect(f"{name}-{peer}")
            except OSError as error:
                raise _lost(peer, error) from None
            self._send(peer, self.rank.to_bytes(4, "little"))
        while len(self._peers) < self.world - 1:
            try:
                connection, _ = server.accept()
                connection.settimeout(WAIT_SECONDS)
                number = connection.recv(4) if _is_of_same_user(connection) else b""
            except TimeoutError:
                raise PeerLost(f"a rank has not connected for {WAIT_SECONDS:.0f} s") from None
            if number:
                self._peers[int.from_bytes(number, "little")] = connection
            else:
                connection.close()

    def barrier(self) -> None:
        """Wait for all ranks; afterwards each sees what the others have written before."""
        self._exchange(b".")

    def sum(self, values: list[float]) -> list[float]:
        """Sums over all ranks in fp64, which are the same bits on all of them."""
        array = np.asarray(values, dtype=np.float64)
        total = np.zeros_like(array)
        step = LARGEST_MESSAGE // array.itemsize
        for start in range(0, len(array), step):
            for message in self._exchange(array[start : start + step].tobytes()):
                total[start : start + step] += np.frombuffer(message)
        return [float(value) for value in total]

    def shared_tensor(self, numbers: int, dtype: torch.dtype) -> Tensor:
        """A tensor [W, N] of zeros that all ranks see, a row for each to write. It lives as long as a rank refers to it."""
        size = self.world * numbers * dtype.itemsize
        if self.rank == 0:
            file = os.memfd_create("ttrain-ranks")  # nobody else can open it, and it is gone with its last process
            os.ftruncate(file, size)
            for peer in self._peers:
                self._send(peer, b".", [file])
        else:
            file = self._receive_file(0)
        try:
            return torch.frombuffer(mmap.mmap(file, size), dtype=dtype).view(self.world, numbers)
        finally:
            os.close(file)

    def all_reduce(self, tensors: list[Tensor], rows_WN: Tensor) -> None:
        """Sum tensors of one kind of number over all ranks in place, through a shared tensor for all their numbers.

        Each rank sums a part of the columns into the first row, so that all ranks have the same bits.
        """
        sizes = [tensor.numel() for tensor in tensors]
        views, total = (
            [numbers_N.view_as(tensor) for numbers_N, tensor in zip(torch.split(row_N, sizes), tensors, strict=True)]
            for row_N in (rows_WN[self.rank], rows_WN[0])
        )
        numbers = sum(sizes)
        columns = slice(numbers * self.rank // self.world, numbers * (self.rank + 1) // self.world)
        self.barrier()  # nobody reads the sums of before any more
        torch._foreach_copy_(views, tensors)
        self.barrier()
        for row_N in rows_WN[1:]:
            rows_WN[0, columns] += row_N[columns]
        self.barrier()
        torch._foreach_copy_(tensors, total)

    def gather(self, numbers_N: Tensor) -> Tensor:
        """The numbers of all ranks, [W, N], to be read before the next `gather` of as many."""
        rows_WN = self._gathered.get((len(numbers_N), numbers_N.dtype))
        if rows_WN is None:
            rows_WN = self._gathered[len(numbers_N), numbers_N.dtype] = self.shared_tensor(len(numbers_N), numbers_N.dtype)
        self.barrier()
        rows_WN[self.rank] = numbers_N
        self.barrier()
        return rows_WN

    def close(self) -> None:
        """Close the connections."""
        for connection in self._peers.values():
            connection.close()

    def _exchange(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in their order; all are as long as this one."""
        for peer in self._peers:
            self._send(peer, message)
        received = {peer: self._receive(peer, len(message)) for peer in self._peers}
        return [received.get(rank, message) for rank in range(self.world)]

    def _send(self, peer: int, message: bytes, files: Sequence[int] = ()) -> None:
        try:
            if files:
                socket.send_fds(self._peers[peer], [message], files)
            else:
                self._peers[peer].sendall(message)
        except OSError as error:
            raise _lost(peer, error) from None

    def _receive(self, peer: int, length: int) -> bytes:
        """Exactly so many bytes."""
        message = b""
        while len(message) < length:
            try:
                received = self._peers[peer].recv(length - len(message))
            except OSError as error:
                raise _lost(peer, error) from None
            if not received:
                raise _lost(peer)
            message += received
        return message

    def _receive_file(self, peer: int) -> int:
        """The descriptor of a file that the other rank has sent."""
        try:
            _, files, _, _ = socket.recv_fds(self._peers[peer], 1, 1)
        except OSError as error:
            raise _lost(peer, error) from None
        if not files:
            raise _lost(peer)
        return files[0]


def _lost(peer: int, error: OSError | None = None) -> PeerLost:
    did = f"has not answered for {WAIT_SECONDS:.0f} s" if isinstance(error, TimeoutError) else "has closed its connection"
    return PeerLost(f"rank {peer} {did}")


def _is_of_same_user(connection: socket.socket) -> bool:
    """Whether the process that has connected is this user's: a name that is no file has no permissions."""
    credentials = struct.Struct("iII")  # process, user, group
    _, user, _ = credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return bool(user == os.geteuid())
