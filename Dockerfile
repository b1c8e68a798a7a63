# Valence, as an image: `docker build -t valence .`, then `docker run --rm -p 127.0.0.1:8000:8000 --read-only valence`.
# docs/image.md says what the build arguments give (GPU, torch, openvino, tracing, other precisions).

ARG PYTHON_IMAGE=docker.io/library/python:3.11.14-slim-bookworm

# 1. What the service depends on, at the versions of constraints.txt. It is made anew only when they change.
FROM ${PYTHON_IMAGE} AS dependencies
# Extras of pyproject.toml, separated by commas: exactly one of cpu and gpu, then torch, openvino, tracing.
ARG EXTRAS=cpu
# Further requirements, separated by spaces.
ARG ALSO=
# A further place where pip looks, e.g. for torch's build without CUDA.
ARG PIP_EXTRA_INDEX_URL
WORKDIR /build
COPY pyproject.toml constraints.txt deploy/image/dependencies.py ./
RUN python -m venv /app/.venv \
    && python dependencies.py --extras "${EXTRAS}" --also "${ALSO}" > requirements.txt \
    && /app/.venv/bin/python -m pip install --no-cache-dir --no-compile --disable-pip-version-check \
        --constraint constraints.txt --requirement requirements.txt

# 2. The service itself and the model, each in a folder of its own, so that they are layers of their own.
FROM dependencies AS application
COPY README.md LICENSE NOTICE ./
COPY service service
RUN /app/.venv/bin/python -m pip install --no-cache-dir --no-compile --disable-pip-version-check \
        --no-deps --target /app/lib . \
    && rm -f /app/lib/bin/valence-train \
    && python -m compileall -q --invalidation-mode unchecked-hash /app/lib
# The model: its name, its number (empty: the highest) and the precisions that are wanted (int8 for a CPU).
ARG MODEL=sentiment
ARG VERSION=
ARG PRECISIONS=int8
COPY model_store model_store
COPY deploy/image/pack_store.py ./
RUN PYTHONPATH=/app/lib /app/.venv/bin/python pack_store.py model_store /app/model_store \
        --model "${MODEL}" --version "${VERSION}" --precisions "${PRECISIONS}"

# 3. The dependencies without what only an installation or a test needs, compiled.
FROM dependencies AS environment
RUN /app/.venv/bin/python -m pip uninstall --yes --quiet setuptools pip \
    && find /app/.venv/lib -type d -name tests -path '*/numpy/*' -prune -exec rm -r {} + \
    && python -m compileall -q --invalidation-mode unchecked-hash /app/.venv/lib

# 4. What is shipped: nothing is run here, and nothing is written when it runs.
FROM ${PYTHON_IMAGE} AS runtime
COPY --from=environment /app/.venv /app/.venv
COPY --from=application /app/model_store /app/model_store
COPY deploy/image/healthcheck.py /app/healthcheck.py
COPY --from=application /app/lib /app/lib

ENV PATH=/app/lib/bin:/app/.venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONPATH=/app/lib \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    VALENCE_HOST=0.0.0.0 \
    VALENCE_MODEL_STORE=/app/model_store
WORKDIR /app
USER 65532:65532
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["/app/.venv/bin/python", "-S", "/app/healthcheck.py"]
ENTRYPOINT ["valence"]
CMD ["serve"]

ARG RELEASE=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Valence" \
      org.opencontainers.image.description="A REST inference microservice for sentiment classification" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${RELEASE}" \
      org.opencontainers.image.revision="${REVISION}"
