# syntax=docker/dockerfile:1
# Lockstep with PyTorch for CPUs. Linted with hadolint; CI does not build it.
#
#   docker build --tag lockstep --build-arg PIP_EXTRA_INDEX_URL=URL .
#   docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD":/runs lockstep train --recipe demo --data DATA --out RUN
#
# URL is PyTorch's index of builds for CPUs; PyTorch's start page names it. Without it, the image also holds several gigabytes
# of CUDA libraries that it does not use.

FROM python:3.11.14-bookworm AS build
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE NOTICE ./
COPY src src
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11.14-slim-bookworm
LABEL org.opencontainers.image.source="https://github.com/lockstep-vision/lockstep" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PYTHONUNBUFFERED=1
ARG PIP_EXTRA_INDEX_URL
# The framework comes first: it is large and rarely changes, so Docker reuses its layer when Lockstep changes.
RUN --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    python -m pip install --no-cache-dir --constraint /constraints.txt torch
RUN --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python -m pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/*.whl)[serve]"
# Any user can use the home folder: `docker run --user` takes a number that has no name and no home here.
ENV HOME=/home/lockstep USER=lockstep
RUN useradd --create-home --uid 1000 lockstep \
    && chmod 1777 /home/lockstep \
    && install --directory --owner lockstep /runs
USER 1000
WORKDIR /runs
# A container that serves (on port 8000) is healthy when the server is ready. One that does something else always is.
HEALTHCHECK --interval=30s --timeout=5s --start-period=2m CMD ! grep -qzx serve /proc/1/cmdline || python -c "import http.client, sys; \
    server = http.client.HTTPConnection('127.0.0.1', 8000, timeout=4); \
    server.request('GET', '/v2/health/ready'); \
    sys.exit(server.getresponse().status != 200)"
ENTRYPOINT ["lockstep"]
CMD ["doctor"]
