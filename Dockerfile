# One image for gateway, prefill, decode and the load generator; the command says which. See compose.yaml.
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS build
# Where torch comes from: the CPU build unless told otherwise.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/baton
ENV PATH=/opt/baton/bin:$PATH
# torch first: it is by far the largest layer, and changes least.
RUN pip install --index-url "$TORCH_INDEX_URL" "torch>=2.11,<=2.13.0"
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY client client
COPY baton baton
COPY gateway gateway
COPY prefill_svc prefill_svc
COPY decode_svc decode_svc
COPY kv_transfer kv_transfer
COPY kernels kernels
RUN pip install ./client ".[gateway,worker,bench]"
# Beside its sources, for the file system is read-only where it runs. Away from /src, so that the installed package is meant.
RUN cd / && python -m baton_kernels.cpu.library

FROM python:${PYTHON_VERSION}-slim
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 baton && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin baton
COPY --from=build /opt/baton /opt/baton
# The load generator is no part of the package; it is run as `python -m bench.load` from its folder.
COPY bench /opt/baton-bench/bench
ENV PATH=/opt/baton/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /
EXPOSE 50051
STOPSIGNAL SIGTERM
ENTRYPOINT ["baton"]
CMD ["--help"]
