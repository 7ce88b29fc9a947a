"""Settings of the servers that ttrain starts. None of them is part of a key."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ttrain.config.base import Section, off_as_a_word

Auth = Literal["token", "off"]


class Servers(Section):
    """Prefect's and MLflow's servers, where ttrain starts them."""

    auth: Annotated[Auth, BeforeValidator(off_as_a_word)] = Field(
        "token", description="who may use them: who shows the token in servers/token of the home; off: every account"
    )


class ServersConfig(Section):
    """What the commands take that start servers alone."""

    servers: Servers = Servers()
