#!/usr/bin/env bash
# The tests of this package with SGLang, which pins a torch of its own and so gets an environment of
# its own: a folder, build/sglang by default. Needs Python 3.11; takes minutes and 2 GB once.
#   plugins/sglang/test.sh [pytest arguments]
#   plugins/sglang/test.sh environment, which is made and nothing runs
#   SGLANG_VENV=FOLDER PYTHON=python3.11 TORCH_INDEX=URL plugins/sglang/test.sh -k retracted
# TORCH_INDEX: a further package index, of CPU builds of torch, https://download.pytorch.org/whl/cpu say.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=${SGLANG_VENV:-build/sglang}
done=$venv/.installed
if ! [ "$done" -nt plugins/sglang/test.sh -a "$done" -nt plugins/sglang/pyproject.toml ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    pip=("$venv/bin/python" -m pip --disable-pip-version-check)
    # SGLang asks for CUDA: on a CPU its wheel is laid beside what it imports there, and tests/stubs
    # stand in for the packages that are built for GPUs.
    "${pip[@]}" install --no-compile ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch==2.13.0
    "${pip[@]}" install --no-compile --no-deps sglang==0.5.23 transformers==5.19.0 triton==3.8.0 \
        apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 xgrammar==0.2.7 openai==2.8.0 openai-harmony==0.0.4 \
        gguf loguru jiter distro sniffio httpx httpcore sentencepiece tiktoken soundfile nvidia-ml-py airportsdata
    "${pip[@]}" install --no-compile numpy psutil pyzmq msgspec orjson pybase64 requests tqdm aiohttp fastapi uvicorn \
        uvloop pydantic huggingface_hub tokenizers==0.23.2 safetensors regex pyyaml packaging einops setproctitle \
        partial_json_parser pillow interegular llguidance cloudpickle prometheus_client python-multipart dill ipython \
        xxhash zstandard watchfiles typer jsonschema scipy cffi \
        hatchling editables attrs pluggy click rich pytest pytest-xdist hypothesis
    folders=(core tools/authoring tools/bench tools/dropping tools/engines tools/prediction tools/prefixes tools/cli
        tools/testing plugins/transformers plugins/sglang plugins/quest plugins/triton_attention plugins/clusterkv plugins/snapkv
        plugins/streaming_llm plugins/stalls plugins/deepseek_dsa plugins/triton_topk plugins/fp8_host_format)
    "${pip[@]}" install --no-deps --no-build-isolation "${folders[@]/#/-e./}"
    touch "$done"
fi
[ "${1:-}" != environment ] || exit 0
# Each engine is a process of one thread, and tests of a file share engines.
TOPKV_NEEDS_SGLANG=1 OMP_NUM_THREADS=1 exec "$venv/bin/python" -m pytest -q -p no:cacheprovider plugins/sglang/tests \
    tools/bench/tests/test_sglang.py "$@"
