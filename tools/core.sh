#!/bin/sh
# Compile the allocator to WebAssembly, and note what it was compiled from (tests/estimator/test_compiled.py compares).
set -eu
cd "$(dirname "$0")/../explorer/estimator/core"
python -m ziglang cc -target wasm32-freestanding -O2 -nostdlib -mbulk-memory -Wall -Wextra -Werror \
    -Wl,--no-entry -Wl,--strip-all -Wl,--export=__heap_base -o allocator.wasm allocator.c
chmod 644 allocator.wasm
sha256sum allocator.c allocator.wasm > SHA256SUMS
