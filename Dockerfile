# nvcli in a container, with the versions that its figures were made with.
#   docker build -t nvcli .
#   docker run --rm --gpus all --ipc host -v "$PWD:/data" -v nvcli-cache:/cache nvcli generate questions.jsonl -m MODEL
# The GPU comes from the host's driver and the NVIDIA container toolkit; torch's wheels bring CUDA. /cache holds models
# and compiled kernels, so keep it. On a CPU: --build-arg CONSTRAINTS=scripts/constraints.txt
# It has not been built yet: what pip installs by it was resolved for Python 3.12 (torch 2.11.0, triton 3.6.0), and the
# wheel was built and run outside of a container.
FROM python:3.12-slim

# Triton compiles its access to the driver with a C compiler when it is first used.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY scripts/constraints.txt scripts/constraints-gpu.txt scripts/
ARG CONSTRAINTS=scripts/constraints-gpu.txt
# torch first: it is large and changes rarely, so that its layer is kept when only nvcli changes.
RUN pip install --no-cache-dir -c "$CONSTRAINTS" torch
COPY src src
RUN pip install --no-cache-dir -c "$CONSTRAINTS" '.[parquet,remote]'

ENV HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton XDG_CACHE_HOME=/cache
VOLUME /cache
WORKDIR /data
ENTRYPOINT ["nvcli"]
CMD ["--help"]
