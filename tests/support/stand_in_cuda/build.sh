#!/bin/sh
# Builds PyTorch's own caching allocator into a program that needs no device.
#
#   build.sh TORCH CUDA OUT
#
# TORCH is the folder `torch` of PyTorch built for CUDA 13 (its wheel, unpacked: libc10.so,
# libc10_cuda.so and the headers are used), CUDA the include folder of the toolkit, OUT a new folder.
# OUT/serve then serves requests: see serve.cpp, and allocator_record.py, which asks it.
set -e
torch=$(cd "$1" && pwd) cuda=$2 out=$3 here=$(dirname "$0")
mkdir -p "$out/lib"
echo 'libcudart.so.13 { global: *; };' > "$out/versions"
g++ -O1 -std=c++20 -shared -fPIC -I"$cuda" "$here/runtime.cpp" "$here/unused.cpp" \
  -o "$out/lib/libcudart.so.13" \
  -Wl,-soname,libcudart.so.13 -Wl,--version-script="$out/versions"
g++ -O1 -std=c++20 -shared -fPIC "$here/management.cpp" -o "$out/lib/libnvidia-ml.so.1" \
  -Wl,-soname,libnvidia-ml.so.1
cp "$torch/lib/libc10.so" "$torch/lib/libc10_cuda.so" "$out/lib"
g++ -O1 -std=c++20 -I"$torch/include" -I"$cuda" "$here/serve.cpp" -o "$out/serve.bin" -L"$out/lib" \
  -l:libc10_cuda.so -l:libc10.so -l:libcudart.so.13 -Wl,--allow-shlib-undefined
printf '#!/bin/sh\nLD_LIBRARY_PATH="%s" exec "%s" "$@"\n' \
  "$(cd "$out/lib" && pwd)" "$(cd "$out" && pwd)/serve.bin" > "$out/serve"
chmod +x "$out/serve"
