"""The servers that ttrain started: their records in the home, and the token that they ask for.

The token is in `servers/token`, which only its owner can read; it survives restarts, so that runs
in progress and open pages continue. No process gets it as an argument, which all accounts of a
machine can read.
"""

import contextlib
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from pydantic import TypeAdapter, ValidationError

from ttrain.core.files import PRIVATE_FILE, private_directory, read_object, write_bytes

HOST = "127.0.0.1"
# In the environment of a server's processes, to tell them from others: not a secret.
SERVER_MARK = "TTRAIN_SERVER_TOKEN"
ACCESS = "TTRAIN_SERVER_ACCESS"  # the token that a server asks for, in its environment
TOKEN_BYTES = 32


@dataclass(frozen=True)
class Server:
    """The record of a server that `up` started.

    Its processes share the session that `pid` leads and have the mark `token`, which is not secret,
    in their environment: a pid may be recycled, and a child may outlive its parent.
    """

    name: str
    pid: int
    port: int
    token: str
    owner: str = ""  # the command that ends it; "" for one of `up`, which stays

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def owns(self, pid: int) -> bool:
        """Whether a process is the server's. Two proofs, since what is owned gets killed."""
        try:
            return (
                os.getsid(pid) == self.pid
                and psutil.Process(pid).environ()[SERVER_MARK] == self.token
            )
        except (
            psutil.Error,
            LookupError,
            OSError,
            OverflowError,
        ):  # gone, a zombie, another's, or no pid at all
            return False

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self.owns(process.pid)]

    def is_at(self, url: str) -> bool:
        """Whether an address is this server's, by number.

        The name localhost means ::1 first on most machines, where another program may listen.
        """
        try:
            address = urlsplit(url)
            return (
                address.scheme == "http" and address.hostname == HOST and address.port == self.port
            )
        except ValueError:
            return False


def live_server(home: Path, name: str) -> Server | None:
    """The server of that name, if its process runs and its port answers."""
    server = read(home, name)
    if server and server.owns(server.pid):
        with (
            contextlib.suppress(OSError),
            socket.create_connection((HOST, server.port), timeout=2.0),
        ):
            return server
    return None


def listens(process: psutil.Process, port: int) -> bool:
    return any(
        connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        for connection in process.net_connections(kind="tcp")
    )


def read(home: Path, name: str) -> Server | None:
    try:
        return TypeAdapter(Server).validate_python(
            {**read_object(folder_of(home) / f"{name}.json"), "name": name}
        )
    except ValidationError:  # there is none, or a damaged one
        return None


def folder_of(home: Path) -> Path:
    return home.resolve() / "servers"


def make_folder(home: Path) -> Path:
    return private_directory(folder_of(home))


def token_file(home: Path) -> Path:
    return folder_of(home) / "token"


def make_token(home: Path) -> str:
    """The token of the home's servers; a new one if there is none, or others could read it."""
    token = read_token(home)
    if token is None:
        token = new_token()
        make_folder(home)
        write_bytes(token_file(home), f"{token}\n".encode(), PRIVATE_FILE)
    return token


def new_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


def read_token(home: Path) -> str | None:
    """The token of the home's servers; None if there is none, or others could read it."""
    with contextlib.suppress(OSError, ValueError), token_file(home).open("rb") as file:
        if not os.fstat(file.fileno()).st_mode & 0o077:
            return file.read(1024).decode("ascii").strip() or None
    return None


def token_for(home: Path, name: str, url: str) -> str | None:
    """The token, if the address is that of the home's running server of that name."""
    server = live_server(home, name) if url else None
    return read_token(home) if server and server.is_at(url) else None


def with_token(home: Path, url: str) -> str:
    """MLflow's address with the token as the password, if it is the home's own server.

    Not MLFLOW_TRACKING_TOKEN, which MLflow would send to every host. A user's own password stays.
    """
    if not url.startswith("http://") or "@" in url:
        return url
    token = token_for(home, "mlflow", url)
    return url.replace("http://", f"http://ttrain:{token}@", 1) if token else url


def page_with_token(home: Path, address: str) -> str:
    """The address of a server's page with the token, for which a browser then keeps a cookie."""
    token = next(
        (token for name in ("prefect", "mlflow") if (token := token_for(home, name, address))), None
    )
    if token is None:
        return address
    page, mark, fragment = address.partition("#")
    return f"{page.rstrip('/')}/?token={token}{mark}{fragment}"
