# One file, three images:
#
#   docker build --target coordinator -t outrider:coordinator .   the front: Ray Serve, both doors, no torch
#   docker build --target cpu         -t outrider:cpu .           draft and target service on CPUs
#   docker build --target cuda        -t outrider:cuda .          draft and target service on NVIDIA GPUs (torch brings CUDA)
#
# Build arguments: PYTHON_IMAGE pins the base further (by patch level or digest); TORCH_INDEX is where the cpu image gets
# its torch from, empty for the package index's own build.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# Dependencies in a layer of their own, from pyproject.toml and the tested versions: a change of the code keeps them.
FROM base AS requirements
WORKDIR /src
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = project['optional-dependencies']; \
[open(f'/src/{role}.txt', 'w').write('\n'.join(project['dependencies'] + extras[role] + extras['otel'])) for role in ('coordinator', 'services')]" \
 && python -m venv /opt/outrider

FROM requirements AS build-coordinator
RUN /opt/outrider/bin/pip install --constraint constraints.txt --requirement coordinator.txt
COPY . .
RUN /opt/outrider/bin/pip install --no-deps .

FROM requirements AS build-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN /opt/outrider/bin/pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --constraint constraints.txt --requirement services.txt
COPY . .
RUN /opt/outrider/bin/pip install --no-deps .

FROM requirements AS build-cuda
RUN /opt/outrider/bin/pip install --constraint constraints.txt --requirement services.txt
COPY . .
RUN /opt/outrider/bin/pip install --no-deps .

# The only writable places are /cache (a volume: models) and /tmp (a tmpfs: Ray's sockets and logs).
FROM base AS runtime
RUN groupadd --gid 10001 outrider && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp outrider \
 && install --directory --owner 10001 --group 10001 /cache
ENV PATH=/opt/outrider/bin:$PATH PYTHONDONTWRITEBYTECODE=1 HOME=/tmp \
    OUTRIDER_CACHE=/cache/outrider HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor HF_HUB_DISABLE_TELEMETRY=1
WORKDIR /tmp
USER 10001:10001
ENTRYPOINT ["python", "-m"]

FROM runtime AS coordinator
EXPOSE 8000 50050
CMD ["coordinator", "--help"]
COPY --from=build-coordinator /opt/outrider /opt/outrider

FROM runtime AS services
EXPOSE 50051 50052
VOLUME /cache
CMD ["target_service", "--help"]

FROM services AS cpu
COPY --from=build-cpu /opt/outrider /opt/outrider

FROM services AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility CUDA_DEVICE_ORDER=PCI_BUS_ID
COPY --from=build-cuda /opt/outrider /opt/outrider
