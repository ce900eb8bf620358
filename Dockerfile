# shardwise on the CPU, with the versions that the tests run with.
#
#   docker build -t shardwise .
#   docker run --rm --shm-size 1g shardwise train demo --nproc 2
#
# On NVIDIA GPUs leave --extra-index-url out: PyPI's wheel of torch for Linux has the CUDA libraries,
# and the host needs its driver and `docker run --gpus all`. The base image stays as it is.
FROM python:3.11-slim
WORKDIR /shardwise
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
COPY recipes ./recipes
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt ".[train,hf,peft]"
ENV OMP_NUM_THREADS=1
ENTRYPOINT ["shardwise"]
CMD ["--help"]
