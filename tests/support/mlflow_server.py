"""A real MLflow server that keeps artifacts itself."""

from collections.abc import Iterator

import pytest
from support.outage_proxy import mlflow_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("server")) as url:
        yield url
