# Baton's images, one target each:
#   gateway       the front door, and every client command; no torch, no compiler
#   bench         the load generator: gateway, and what plots
#   worker        prefill and decode; with --build-arg TORCH=cuda (and its index) for GPUs, then as target:
#   worker-gpu    worker, and the C compiler by which Triton makes its driver's module at first use
#   worker-rdma   worker-gpu, and NIXL, for --kv-transport=nixl
# Whatever is installed comes from deploy/locks (`make locks`), before the sources are copied: editing one reinstalls nothing.
ARG PYTHON_VERSION=3.12
# To pin it by digest: --build-arg PYTHON_IMAGE=python:3.12-slim@sha256:...
ARG PYTHON_IMAGE=python:${PYTHON_VERSION}-slim

FROM ${PYTHON_IMAGE} AS runtime
RUN groupadd --gid 10001 baton && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin baton
# Slim images come without the standard library's bytecode, and a read-only container could never keep it.
RUN python -m compileall -q -x '/(test|tests|idlelib|tkinter|turtledemo|ensurepip|lib2to3|pydoc_data|site-packages|dist-packages)/' \
    "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
ENV PATH=/opt/baton/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /
STOPSIGNAL SIGTERM
ENTRYPOINT ["baton"]
CMD ["--help"]

FROM runtime AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# pip stays behind: the build's own installs into an environment without one.
RUN python -m venv --without-pip /opt/baton && python -m venv --without-pip /opt/backend
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PIP_PYTHON=/opt/baton/bin/python PIP_NO_DEPS=1 PIP_ONLY_BINARY=:all:
COPY deploy/locks /locks

# Baton itself, apart from what it needs: /package is laid over /opt/baton at the end.
FROM build AS package
RUN pip --python /opt/backend/bin/python install --require-hashes -r /locks/build.txt
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY client client
COPY baton baton
COPY gateway gateway
COPY prefill_svc prefill_svc
COPY decode_svc decode_svc
COPY worker_core worker_core
COPY engine engine
COPY distill distill
COPY kv_transfer kv_transfer
COPY kernels kernels
RUN pip --python /opt/backend/bin/python wheel --no-build-isolation --wheel-dir /wheels ./client . \
    && pip install --prefix /package /wheels/*.whl

FROM build AS gateway-needs
# Without symbols for debuggers, a sixth of it.
RUN pip install --require-hashes -r /locks/gateway.txt && find /opt/baton -name '*.so' -exec strip --strip-unneeded {} +

FROM runtime AS gateway
COPY --from=gateway-needs /opt/baton /opt/baton
COPY --from=package /package /opt/baton
USER 10001:10001
# gRPC, and OpenAI's HTTP API.
EXPOSE 50051 8000

FROM build AS bench-needs
RUN pip install --require-hashes -r /locks/bench.txt

# The load generator is no part of the package; it is run as `python -m bench.load` from its folder.
FROM runtime AS bench
COPY --from=bench-needs /opt/baton /opt/baton
COPY --from=package /package /opt/baton
COPY bench /opt/baton-bench/bench
USER 10001:10001

FROM build AS worker-needs
# cpu or cuda; and the index that has that build.
ARG TORCH=cpu
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
# torch first: it is by far the largest, and changes least.
RUN pip install --index-url "$TORCH_INDEX_URL" -r "/locks/torch-$TORCH.txt"
RUN pip install --require-hashes -r /locks/worker.txt

# The native kernels, for every level that a CPU of this architecture may have: they take minutes, and nothing but their own
# sources. They are to lie beside these, for the file system is read-only where they run.
FROM build AS kernels
COPY kernels /kernels
WORKDIR /kernels
RUN python -m baton_kernels.cpu.library \
    && site="/prebuilt/$(python -c 'import sysconfig; print(sysconfig.get_path("purelib", vars={"base": ""}))')" \
    && mkdir -p "$site/baton_kernels/cpu" && mv baton_kernels/cpu/*.so "$site/baton_kernels/cpu"

FROM runtime AS worker
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
COPY --from=worker-needs /opt/baton /opt/baton
COPY --from=kernels /prebuilt /opt/baton
COPY --from=package /package /opt/baton
USER 10001:10001
EXPOSE 50051

FROM worker AS worker-gpu
USER root
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# Compiled kernels, where TRITON_CACHE_DIR says so, as compose.yaml does. A volume mounted here begins with what the image
# has: an image made of this one may carry a cache. No ENV: where nothing is mounted, it cannot be written to.
RUN install --directory --owner=10001 --group=10001 /var/cache/baton /var/cache/baton/triton
USER 10001:10001

FROM build AS rdma-needs
RUN pip install --require-hashes --target /rdma -r /locks/nixl.txt

# NIXL's wheel brings UCX with libibverbs and the provider for Mellanox's adapters. Beside those of Debian's packages, which
# UCX loads for EFA, a process with an agent crashes when it ends.
FROM worker-gpu AS worker-rdma
COPY --from=rdma-needs /rdma /opt/rdma
ENV PYTHONPATH=/opt/rdma
USER 10001:10001

# What `docker build` makes when it is given no target.
FROM worker
