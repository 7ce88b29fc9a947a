# CPU:   docker build -t ttrain .
# CUDA:  docker build -t ttrain --build-arg TORCH=cu130 .
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# cpu, cu126, cu128, cu130, ...: the builds of torch that uv's --torch-backend knows.
ARG TORCH=cpu
ARG EXTRAS=postgres

ENV PYTHONUNBUFFERED=1 UV_NO_CACHE=1
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY configs configs
COPY flows flows
COPY tasks tasks
COPY ttrain ttrain
# build-essential: gcc compiles ttrain's native kernels, and what runtime.compile makes.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/* \
    && python -m pip install --no-cache-dir uv==0.13.9 \
    && uv pip install --system --torch-backend="${TORCH}" --constraints constraints.txt ".[${EXTRAS}]" \
    && useradd --create-home --uid 1000 ttrain \
    && install --directory --owner ttrain --mode 700 /home/ttrain/artifacts

USER ttrain
WORKDIR /home/ttrain
ENV TTRAIN_HOME=/home/ttrain/artifacts
VOLUME /home/ttrain/artifacts
ENTRYPOINT ["ttrain"]
CMD ["pipeline", "run", "full"]
